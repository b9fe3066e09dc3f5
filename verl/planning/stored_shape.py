# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model that is on this disk, from its config and the headers of its weight files.

Takes milliseconds, where building an empty model imports torch and transformers for seconds. It knows the
common dense models, trained whole; for the others `verl.planning.model_sizes` builds an empty one.
"""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.config.files.model_files import CONFIG, read_json, stored_tensors
from verl.config.model import FSDPConfig, ModelConfig
from verl.planning.layer_sizes import LayerCache, Stack
from verl.planning.memory_model import NUMBER_BYTES, ModelShape

TOWER_BLOCK = re.compile(r"visual\.blocks\.(\d+)\.")
TEXT_BLOCK = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# The weights of a dense model whose layers are all alike; any other name is left to torch.
KNOWN = re.compile(
    r"(?:^|\.)(?:visual\..*|embed_tokens\.weight|norm\.weight|lm_head\.weight|layers\.\d+\.(?:self_attn\."
    r"(?:[qkvo]_proj|[qk]_norm)\.(?:weight|bias)|mlp\.(?:gate|up|down)_proj\.weight"
    r"|(?:input|post_attention)_layernorm\.weight))$"
)
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"

Sizes = dict[str, tuple[int, ...]]  # shapes of tensors by name


def stored_shape(model: ModelConfig, fsdp: FSDPConfig, *, is_trained: bool, head: str) -> ModelShape | None:
    """Return what `read_shape` does, or None for a model that only it knows."""
    folder = Path(model.model_path or "")
    changes: list[Any] = [model.override_config, model.train_modules, model.freeze_modules, model.family]
    changes += [model.freeze_vision_tower, model.freeze_audio_tower, model.freeze_router, model.lora.is_used]
    changes += [model.router_aux_loss_coef, fsdp.expert_parallel_size > 1]
    number = NUMBER_BYTES.get(fsdp.torch_dtype or ("fp32" if is_trained else "bf16"))
    config = read_json(folder / CONFIG)
    if any(changes) or head != "causal" or number is None or config is None:
        return None
    try:
        sizes = {name: size for name, size, *_ in stored_tensors(folder)}
        text = config.get("text_config", config)
        has_windows = text.get("sliding_window") and text.get("use_sliding_window", True)  # as Qwen's do not
        if has_windows or not all(map(KNOWN.search, sizes)):
            return None
        return _shape(config, sizes, number, is_trained, model.runs_tiles(is_trained=is_trained))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # what is wrong with it, `read_shape` says better


def _shape(config: dict[str, Any], sizes: Sizes, number: int, is_trained: bool, is_tiled: bool) -> ModelShape:
    text = config.get("text_config", config)
    is_tied = text["tie_word_embeddings"] if "tie_word_embeddings" in text else config["tie_word_embeddings"]
    if is_tied:
        sizes.pop(HEAD, None)
    tower_blocks = _blocks(sizes, TOWER_BLOCK)
    text_blocks = _blocks({name: size for name, size in sizes.items() if "visual." not in name}, TEXT_BLOCK)
    params = sum(map(math.prod, sizes.values()))
    root = params - sum(tower_blocks.values()) - sum(text_blocks.values())
    heads, layers = text["num_key_value_heads"], text["num_hidden_layers"]
    keys = next(size[0] for name, size in sizes.items() if name.endswith("k_proj.weight"))
    vocab = next(size[0] for name, size in sizes.items() if name.endswith(EMBEDDING if is_tied else HEAD))
    tower = None
    if tower_blocks:
        vision = SimpleNamespace(**config["vision_config"])
        tower = tower_stack(vision, len(tower_blocks), max(tower_blocks.values()), is_tiled=is_tiled)
    return ModelShape(
        params=params,
        stored=number * params,
        trained=params if is_trained else 0,
        trained_stored=number * params if is_trained else 0,
        root=root,
        trained_root=root if is_trained else 0,
        largest_stored=number * max(map(math.prod, sizes.values())),
        largest_row=4 * max(math.prod(size[1:]) for size in sizes.values()),
        vocab=vocab,
        is_tied=is_tied,
        text=Stack(
            layers=layers,
            hidden=text["hidden_size"],
            intermediate=text["intermediate_size"],
            heads=text["num_attention_heads"],
            kv_heads=heads,
            head_dim=keys // heads,
            params=max(text_blocks.values()),
            has_head_norms=any(name.endswith("q_norm.weight") for name in sizes),
            is_tiled=is_tiled,
            caches=(LayerCache(2 * layers * keys, heads),),
            undivided=max(text_blocks.values()),
        ),
        tower=tower,
    )


def _blocks(sizes: Sizes, pattern: re.Pattern[str]) -> dict[int, int]:
    # weights of each block
    counts: dict[int, int] = {}
    for name, size in sizes.items():
        if found := pattern.search(name):
            counts[int(found[1])] = counts.get(int(found[1]), 0) + math.prod(size)
    return counts


def tower_stack(config: Any, layers: int, params: int, *, is_tiled: bool) -> Stack:
    """Return the layers of a tower by its config, `params` weights in the largest one."""
    # Some call the width `embed_dim`, and give the MLP's as a ratio.
    hidden = getattr(config, "embed_dim", None) or config.hidden_size
    heads = getattr(config, "num_heads", None) or config.num_attention_heads
    return Stack(
        layers=layers,
        hidden=hidden,
        intermediate=getattr(config, "intermediate_size", None) or int(hidden * config.mlp_ratio),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        params=params,
        is_tiled=is_tiled,
    )
