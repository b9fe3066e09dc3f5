# SPDX-License-Identifier: Apache-2.0
"""ModelScope as the hub of models and data sets."""

import os
from importlib import import_module


def use_modelscope_hub_if_asked() -> None:
    """Load models and data sets from ModelScope if the environment variable `USE_MODELSCOPE_HUB` is 1."""
    if os.environ.get("USE_MODELSCOPE_HUB", "0").lower() not in ("1", "true", "y", "yes"):
        return
    try:
        hub = import_module("modelscope.utils.hf_util")
    except ImportError as error:
        raise RuntimeError("`USE_MODELSCOPE_HUB=1` needs modelscope: pip install modelscope") from error
    hub.patch_hub()
