# SPDX-License-Identifier: Apache-2.0
"""transformers' auto classes, which here also load the models that this project ports, and their hub.

Import them from this module: those ports register themselves when it is imported.
"""

import os
from importlib import import_module

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,  # noqa: F401 - imported from here
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,  # noqa: F401
    AutoProcessor,
    AutoTokenizer,
)

from verl.models.vila.config import VilaConfig
from verl.models.vila.model import VilaForConditionalGeneration
from verl.models.vila.processor import VilaProcessor, VilaTokenizer

AutoConfig.register(VilaConfig.model_type, VilaConfig)
AutoModelForImageTextToText.register(VilaConfig, VilaForConditionalGeneration)
AutoProcessor.register(VilaConfig, VilaProcessor)
AutoTokenizer.register(VilaConfig, tokenizer_class=VilaTokenizer)


def use_modelscope_hub_if_asked() -> None:
    """Load models and data sets from ModelScope if the environment variable `USE_MODELSCOPE_HUB` is 1."""
    if os.environ.get("USE_MODELSCOPE_HUB", "0").lower() not in ("1", "true", "y", "yes"):
        return
    try:
        hub = import_module("modelscope.utils.hf_util")
    except ImportError as error:
        raise RuntimeError("`USE_MODELSCOPE_HUB=1` needs modelscope: pip install modelscope") from error
    hub.patch_hub()
