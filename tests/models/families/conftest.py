# SPDX-License-Identifier: Apache-2.0
from tests.workers.rollout.conftest import single_process

__all__ = ["single_process"]
