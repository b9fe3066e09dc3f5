# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-VL in transformers' format, which vLLM does not have."""

from verl.models.families.generic import GenericFamily


class DeepseekVL(GenericFamily):
    """Found as a model without a file; the engine is its language model."""

    embeds_prompts = True
