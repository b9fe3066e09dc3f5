# SPDX-License-Identifier: Apache-2.0
"""transformers' auto classes, which here also load the models that this project ports.

Import them from this module: those ports register themselves when it is imported.
"""

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoProcessor,
    AutoTokenizer,
)

from verl.models.vila.config import VilaConfig
from verl.models.vila.model import VilaForConditionalGeneration
from verl.models.vila.processor import VilaProcessor, VilaTokenizer

__all__ = (
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoProcessor",
    "AutoTokenizer",
)

AutoConfig.register(VilaConfig.model_type, VilaConfig)
AutoModelForImageTextToText.register(VilaConfig, VilaForConditionalGeneration)
AutoProcessor.register(VilaConfig, VilaProcessor)
AutoTokenizer.register(VilaConfig, tokenizer_class=VilaTokenizer)
