# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5: Qwen3-VL's media without deepstack, in front of a language model with linear attention layers.

Checkpoints on the hub also have a head that predicts several tokens (`mtp.*`), which neither transformers nor
the policy loss uses: it is not loaded.
"""

from functools import partial
from typing import ClassVar

from verl.models.families.interface import TinyModel
from verl.models.families.qwen_vl import TINY_TOWER, TOKEN_IDS, Qwen3VL, tiny_processor
from verl.models.families.tiny_sizes import HYBRID, HYBRID_MOE, TEXT, mrope

TINY_TEXT = TEXT | HYBRID | mrope([3, 3, 2], mrope_interleaved=True, partial_rotary_factor=0.5)


class Qwen35(Qwen3VL):
    """Qwen3.5, dense and with experts."""

    model_types = ("qwen3_5", "qwen3_5_moe")
    processors = ()  # that of Qwen3-VL
    hub_names = ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-35B-A3B")
    transposed_experts: ClassVar = {}
    tiny: ClassVar = {
        name: TinyModel(
            name,
            TINY_TEXT | experts,
            TINY_TOWER | dict(patch_size=16, num_position_embeddings=64),
            token_ids=TOKEN_IDS,
            processor=partial(tiny_processor, "Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16),
        )
        for name, experts in (("qwen3_5", {}), ("qwen3_5_moe", HYBRID_MOE))
    }
