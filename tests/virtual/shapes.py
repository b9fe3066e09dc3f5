# SPDX-License-Identifier: Apache-2.0
"""Published shapes of models, and a run's setup on the virtual cluster. Imports no torch."""

from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 152064
FRAME, FRAME_TOKENS = 448, 256  # edge of a video's frame in pixels, and its features; a newline follows
SPECIAL = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}  # fmt: skip


def _dense(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    return dict(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=32768, vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    ) | others  # fmt: skip


def _tied(*sizes: int) -> dict[str, Any]:
    return _dense(*sizes, vocab_size=151936, tie_word_embeddings=True)


def _experts(inner: int, *sizes: int) -> dict[str, Any]:
    return _dense(
        *sizes, head_dim=128, moe_intermediate_size=inner, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, vocab_size=151936,
    )  # fmt: skip


def _latent(heads: int, experts: int, dense_layers: int, **others: Any) -> dict[str, Any]:
    return dict(
        hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61,
        num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=1536, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=experts,
        n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=dense_layers, norm_topk_prob=True,
        routed_scaling_factor=2.5, max_position_embeddings=32768, tie_word_embeddings=False,
    ) | others  # fmt: skip


def _with_images(text: dict[str, Any]) -> dict[str, Any]:
    rope = dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24])
    tower = dict(
        depth=32, num_heads=16, hidden_size=1280, intermediate_size=3420,
        out_hidden_size=text["hidden_size"], patch_size=14, window_size=112,
        fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2,
    )  # fmt: skip
    return dict(
        text_config=text | dict(rope_parameters=rope), vision_config=tower,
        tie_word_embeddings=text["tie_word_embeddings"], **SPECIAL,
    )  # fmt: skip


def _with_frames(text: dict[str, Any]) -> dict[str, Any]:
    tower = dict(
        model_type="siglip_vision_model", hidden_size=1152, intermediate_size=4304, num_hidden_layers=27,
        num_attention_heads=16, image_size=FRAME, patch_size=14,
    )  # fmt: skip
    return dict(
        text_config=text | dict(model_type="qwen2"), vision_config=tower, projector_type="mlp_downsample",
        tie_word_embeddings=False, **SPECIAL,
    )  # fmt: skip


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # type of model, and its config
    "0.5b": ("qwen2", _tied(896, 4864, 24, 14, 2)),
    "1.5b": ("qwen2", _tied(1536, 8960, 28, 12, 2)),
    "3b": ("qwen2", _tied(2048, 11008, 36, 16, 2)),
    "7b": ("qwen2", _dense(3584, 18944, 28, 28, 4)),
    "14b": ("qwen2", _dense(5120, 13824, 48, 40, 8)),
    "32b": ("qwen2", _dense(5120, 27648, 64, 40, 8)),
    "72b": ("qwen2", _dense(8192, 29568, 80, 64, 8)),
    "30b-a3b": ("qwen3_moe", _experts(768, 2048, 6144, 48, 32, 4)),
    "235b-a22b": ("qwen3_moe", _experts(1536, 4096, 12288, 94, 64, 4)),
    # DeepSeek-V3 and Kimi-K2.
    "671b": ("deepseek_v3", _latent(128, 256, 3, vocab_size=129280, n_group=8, topk_group=4)),
    "1t": ("deepseek_v3", _latent(64, 384, 1, vocab_size=163840, n_group=1, topk_group=1)),
    "qwen3.5-27b": ("qwen3_5_text", _dense(
        5120, 17408, 64, 24, 4, head_dim=256, vocab_size=248320, linear_num_value_heads=48,
        mamba_ssm_dtype="float32",
    )),
    "gpt-oss-120b": ("gpt_oss", dict(num_hidden_layers=36, num_local_experts=128)),
    "vl-7b": ("qwen2_5_vl", _with_images(_dense(3584, 18944, 28, 28, 4))),
    "vl-72b": ("qwen2_5_vl", _with_images(_dense(8192, 29568, 80, 64, 8))),
    "longvila-7b": ("vila", _with_frames(_dense(3584, 18944, 28, 28, 4, max_position_embeddings=1 << 20))),
    "tiny": ("qwen2", _dense(128, 256, 2, 4, 2, vocab_size=512)),
    "tiny-moe": ("qwen3_moe", _dense(
        128, 256, 2, 4, 2, head_dim=32, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, vocab_size=512,
    )),
    "tiny-latent": ("deepseek_v3", _latent(4, 8, 1, vocab_size=512, n_group=1, topk_group=1) | dict(
        hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2, q_lora_rank=64,
        kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, num_experts_per_tok=2,
    )),
    "tiny-vl": ("qwen2_5_vl", dict(
        text_config=_dense(128, 256, 2, 4, 2, vocab_size=512) | dict(
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6])
        ),
        vision_config=dict(
            depth=2, num_heads=4, hidden_size=64, intermediate_size=128, out_hidden_size=128, patch_size=14,
            window_size=56, fullatt_block_indexes=[1], tokens_per_second=2,
        ),
        tie_word_embeddings=False, image_token_id=500, video_token_id=501, vision_start_token_id=502,
        vision_end_token_id=503,
    )),
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """One rank's options and rows."""

    rank: int = 0
    ulysses: int = 1
    ring: int = 1
    fsdp_size: int = -1
    expert_parallel: int = 1
    tensor_parallel: int = 1
    optimizer: str = "adamw"
    dtype: str | None = None  # of the stored weights, `fsdp.torch_dtype`
    lora_rank: int = 0
    offload: bool = False  # weights and moments between uses
    files: str | None = None  # that weights are read from, as stored: "bf16" or "fp8"; None makes them
    own_engine: bool = False  # in another process, which takes the weights over a link
    cpu_offload: bool = False  # `fsdp.enable_cpu_offload` of the actor
    reference: bool = False
    critic: bool = False
    prime: bool = False
    reward_model: bool = False
    fine_tuning: bool = False  # the worker of supervised fine-tuning instead
    prompts: int = 2  # on this rank
    responses: int = 2  # to each prompt
    prompt_length: int = 512
    response_lengths: tuple[int, ...] = (512,)  # of the rows in turn
    response_width: int = 512  # padded
    images: tuple[int, ...] = (0,)  # of the prompts in turn, 28 x 28 pixels for each token
    image_size: tuple[int, int] = (448, 448)
    frames: int = 0  # of a video in each prompt
    freeze_tower: bool = False
    rows_at_once: int = 2  # micro batch size, in rows
    dynamic: bool = True  # micro batches are filled with tokens
    checkpointing: float = True  # share of the blocks
    share_prompt: bool = True
    always_shards: bool = True  # under sequence parallelism, short sequences too
    updates: int = 2  # the first one makes the moments
    override: dict[str, Any] = field(default_factory=dict)  # of the model's config


@dataclass(frozen=True)
class PictureSetup:
    """One rank's options and trajectories in a diffusion run."""

    rank: int = 0
    lora_rank: int = 0
    dtype: str | None = None
    optimizer: str = "adamw"
    offload: bool = False
    checkpointing: bool = True
    reference: bool = False
    size: tuple[int, int] = (512, 512)  # height and width in pixels
    frames: int = 1
    prompt_length: int = 256
    guidance: float = 4.5
    steps: int = 4
    prompts: int = 1  # on this rank
    responses: int = 2
    at_once: int = 2  # pictures that are sampled at once
    rows_at_once: int = 1  # of an update's micro batch
    updates: int = 2  # the first one makes the moments
    layers: int | None = None  # of the transformer; None are all


def video(frames: int) -> dict[str, Any]:
    """Options of a video's prompt and its responses, which eight ranks share; the tower is frozen."""
    return dict(
        prompts=1, responses=8, rows_at_once=8, dynamic=False, ulysses=4, ring=2, freeze_tower=True,
        frames=frames, prompt_length=frames * (FRAME_TOKENS + 1) + 64,
    )  # fmt: skip
