# SPDX-License-Identifier: Apache-2.0
"""Models of which the generic family gets all but one thing right."""

from typing import Any, NamedTuple

from torch import nn

from verl.models.families.generic import GenericFamily
from verl.models.scalar_head import is_scalar


class LogitScale(NamedTuple):
    """A forward hook of a head."""

    factor: float

    def __call__(self, head: nn.Module, args: tuple, logits: Any) -> Any:
        return logits * self.factor


class CohereVision(GenericFamily):
    """Aya Vision and Command A Vision, whose classes in transformers leave out the scale of their logits."""

    def engine_overrides(self, config: Any) -> dict[str, Any]:
        # vLLM (0.32, commandr.py:244) adds a token to the window, which transformers' class does not.
        text = config.get_text_config()
        if config.model_type != "cohere2_vision" or not text.sliding_window:
            return {}
        return {"sliding_window": text.sliding_window - 1}

    def repair(self, model: Any) -> None:
        # Cohere's text models and vLLM multiply logits by `logit_scale`; the forward of transformers 5.19
        # around them, modeling_cohere2_vision.py:334 and modeling_aya_vision.py:391, does not.
        head: nn.Module = model.get_output_embeddings()
        is_repaired = any(isinstance(hook, LogitScale) for hook in head._forward_hooks.values())
        if not is_repaired and not is_scalar(model.config):
            head.register_forward_hook(LogitScale(model.config.get_text_config().logit_scale))


class DeepseekVL(GenericFamily):
    """DeepSeek-VL in transformers' format, which vLLM does not have: the engine is its language model."""

    embeds_prompts = True
