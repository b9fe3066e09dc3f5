# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5: Qwen3-VL's media without deepstack, in front of a language model with linear attention layers.

Checkpoints on the hub also have a head that drafts further tokens (`mtp.*`), which transformers does not
load: it is not trained.
"""

from typing import ClassVar

from verl.models.families.interface import Family
from verl.models.families.qwen_vl import TINY_PROCESSOR_3, TINY_TOWER, TOKEN_IDS, Qwen3VL
from verl.models.families.tiny_sizes import HALF_ROPE, HYBRID, HYBRID_MOE, TEXT, TinyModel, mrope

TINY_TEXT = TEXT | HYBRID | mrope([3, 3, 2], mrope_interleaved=True, partial_rotary_factor=0.5)


DRAFT_HEAD = ("mtp.",)


class HybridText(Family):
    """Qwen3-Next, and the language models of Qwen3.5."""

    unread = DRAFT_HEAD
    tiny: ClassVar = {
        "qwen3_next": TinyModel(  # vLLM does not tie its head
            "qwen3_next", TEXT | HYBRID | HYBRID_MOE | HALF_ROPE | {"tie_word_embeddings": False}
        ),
        "qwen3_5_text": TinyModel("qwen3_5_text", TINY_TEXT),
    }


class Qwen35(Qwen3VL):
    """Qwen3.5, dense and with experts."""

    transposed_experts: ClassVar = {}
    unread = DRAFT_HEAD
    tiny: ClassVar = {
        name: TinyModel(
            name,
            TINY_TEXT | experts,
            TINY_TOWER | dict(patch_size=16, num_position_embeddings=64),
            token_ids=TOKEN_IDS,
            processor=TINY_PROCESSOR_3,
            keeps_words=False,
        )
        for name, experts in (("qwen3_5", {}), ("qwen3_5_moe", HYBRID_MOE))
    }
