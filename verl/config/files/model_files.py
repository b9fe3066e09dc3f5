# SPDX-License-Identifier: Apache-2.0
"""Facts about a model from its files as JSON: what takes seconds to find out with transformers or vLLM.

Only certain mistakes are reported; models whose files say less are left to the checks that load them.
"""

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

CONFIG, ADAPTER = "config.json", "adapter_config.json"
POLICY = "actor"  # the folder of the policy in a checkpoint
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
LAST_WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json", "mm_projector/model.safetensors"),
    "transformer/diffusion_pytorch_model.safetensors",
    "transformer/diffusion_pytorch_model.safetensors.index.json",
)
PIPELINE = "model_index.json"  # of a diffusers folder
TOKENIZERS = ("tokenizer_3", "tokenizer_2", "tokenizer")  # the one of the longest prompts first
EMBEDDINGS = ("embed_tokens.weight", "wte.weight")  # the ends of their names
HUB_TIMEOUT_S = 3.0
HUB_REPOSITORY = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]*\w)?/\w([\w.-]{0,94}\w)?")  # as on the hub
LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
FIXED_ROPES = {"su", "longrope", "llama3", "default", "mrope"}  # `factor` does not lengthen them


def read_model_config(model: str) -> dict[str, Any] | None:
    """Return the config of a folder, or of a hub name that was downloaded before; None without one."""
    folder = local_folder(model)
    return None if folder is None else read_json(folder / CONFIG)


def local_folder(model: str | None) -> Path | None:
    """Return a folder, or where a hub name was downloaded to; None for what is not on this machine."""
    if not model:
        return None
    return Path(model) if os.path.isdir(model) else downloaded(model)


def downloaded(name: str) -> Path | None:
    """Return the folder of a hub name in the cache of huggingface_hub, without network access."""
    environ = os.environ
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    folder = Path(os.path.expanduser(cache), "models--" + name.replace("/", "--"))
    try:
        return folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None


class LengthLimit(NamedTuple):
    """A number of tokens, and the key of a model's config that gives it."""

    tokens: int
    key: str


def length_limit(config: dict[str, Any], overrides: dict[str, Any]) -> LengthLimit | None:
    """Return the length above which vLLM refuses to start with this model.

    Where versions of vLLM differ, as for YaRN, it is the longer one.
    """
    nested = config.get("text_config", config.get("llm_cfg"))  # the second of VILA
    ours = overrides.get("text_config")
    text = {**(nested if isinstance(nested, dict) else config), **overrides}
    text |= ours if isinstance(ours, dict) else {}
    found = {key: text[key] for key in LENGTHS if isinstance(text.get(key), int)}
    if not found or text.get("model_max_length") is not None:
        return None
    key = min(found, key=found.__getitem__)
    return LengthLimit(int(found[key] * _rope_factor(text)), key)


def context_problem(key: str, tokens: int, model: str, overrides: dict[str, Any]) -> Iterator[str]:
    """Yield that a length, the value of `key`, is beyond the model's: vLLM refuses to start with it."""
    config = read_model_config(model)
    limit = None if config is None else length_limit(config, overrides)
    if limit is not None and tokens > limit.tokens:
        yield f"{key} must be at most {limit.tokens}, the model's `{limit.key}` in its config.json ({model})"


def _rope_factor(text: dict[str, Any]) -> float:
    ropes = [text.get("rope_scaling"), text.get("rope_parameters")]
    ropes += [each for rope in ropes if isinstance(rope, dict) for each in rope.values()]
    factors = [
        rope.get("factor", 1.0)
        for rope in ropes
        if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) not in FIXED_ROPES
    ]
    return max([1.0, *(float(factor) for factor in factors if isinstance(factor, int | float))])


def pipeline_folder(model: str | None) -> Path | None:
    """Return the folder of a diffusion model, local or downloaded from the hub; None for other models."""
    folder = local_folder(model)
    return folder if folder is not None and (folder / PIPELINE).is_file() else None


def tokenizer_of(model: str | None) -> str | None:
    """Return the folder or hub name of a model's tokenizer: the model's, or a part of a diffusion model."""
    folder = pipeline_folder(model)
    if folder is None:
        return model
    return next((str(folder / name) for name in TOKENIZERS if (folder / name).is_dir()), model)


def folder_problem(model: str, option: str, *, has_lora: bool = True) -> str | None:
    """Say why a folder holds no model, or None if it may be one. A problem completes "`OPTION` ...".

    Args:
        option: Key of the model's section, for remedies.
        has_lora: The section has options of adapters.
    """
    folder = Path(model)
    if (config := read_json(folder / CONFIG)) is not None:
        text = config.get("text_config") or config
        wrong = [f"`{key}` {text[key]}" for key in SIZES if isinstance(text.get(key), int) and text[key] <= 0]
        return f"({folder}): {CONFIG} says {wrong[0]}: no model has it, correct the file" if wrong else None
    if not folder.is_dir() or any((folder / name).exists() for name in (CONFIG, POLICY, PIPELINE)):
        return None  # a checkpoint has its config deeper
    adapter = read_json(folder / ADAPTER)
    if adapter is not None:
        base = adapter.get("base_model_name_or_path") or "its base model"
        remedy = f"set `{option}.model_path={base}` and `{option}.lora.path={folder}`"
        if not has_lora:
            remedy = f"set it to a folder with the adapter merged into {base}"
        return f"({folder}) is a LoRA adapter, not a model: {remedy}"
    names = sorted(path.name for path in folder.iterdir())
    inside = [name for name in names if (folder / name / CONFIG).is_file()]
    if len(inside) == 1:
        return f"({folder}) has no {CONFIG}; did you mean {folder / inside[0]}?"
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return f"({folder}) is no model yet: python3 scripts/convert_gguf.py {folder / ggufs[0]} FOLDER"
    found = f"; it has {', '.join(inside or names)}" if len(inside or names) <= 8 else ""
    return f"({folder}) is no model: it has no {CONFIG}{found if names else ' and is empty'}"


def processor_files(folder: Path) -> list[Path]:
    """Return the configs of a model's processor; none for a text model."""
    names = ("*processor_config.json", "vision_tower/*processor_config.json")  # the second of VILA
    return [file for name in names for file in sorted(folder.glob(name))]


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights of a whole model; an export writes the named files last."""
    return any((folder / name).is_file() for name in LAST_WEIGHTS)


def weights_problem(model: str, overrides: Mapping[str, Any] | None = None) -> str | None:
    """Say that a folder's weights are missing, cut short, or not of its config with `overrides`.

    A checkpoint's are exported later.
    """
    folder = Path(model)
    if not (folder / CONFIG).is_file() or folder.name == "huggingface":
        return None
    names = [path.name for path in folder.iterdir()]
    if not has_weights(folder) and not any(name.endswith(WEIGHTS) for name in names):
        return f"({folder}) has no weights such as model.safetensors; it has {', '.join(sorted(names)[:8])}"
    if not any((folder / name).is_file() for name in LAST_WEIGHTS[:2]):
        return None
    try:
        sizes = {name: size for name, size, *_ in stored_tensors(folder)}
        return _shape_problem(folder, sizes, overrides or {})
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"({folder}): {error}: download or export the model again"


def _shape_problem(
    folder: Path, sizes: Mapping[str, tuple[int, ...]], overrides: Mapping[str, Any]
) -> str | None:
    config = read_json(folder / CONFIG) or {}
    text = {**(config.get("text_config") or config), **overrides}
    found = [(name, size) for name, size in sizes.items() if name.endswith(EMBEDDINGS) and len(size) == 2]
    if len(found) != 1:
        return None
    name, size = found[0]
    for key, number in zip(("vocab_size", "hidden_size"), size, strict=True):
        if text.get(key, number) != number:
            shape = f"{size[0]} x {size[1]} for {name}"
            return f"({folder}): {CONFIG} says {key} {text[key]}, and the weights have {shape}"
    return None


def stored_tensors(folder: Path) -> Iterator[tuple[str, tuple[int, ...], str, str]]:
    """Yield name, shape, data type and file of a model's tensors, from the headers of its safetensors files.

    Raises:
        OSError: A file that the index names is missing.
        ValueError: A file is cut short, or none of safetensors.
    """
    index = folder / "model.safetensors.index.json"
    files = (
        {*json.loads(index.read_text())["weight_map"].values()} if index.is_file() else {"model.safetensors"}
    )
    for file in sorted(files):
        about = (folder / file).stat()
        yield from _tensors_in(folder / file, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=1024)
def _tensors_in(path: Path, size: int, _changed: int) -> list[tuple[str, tuple[int, ...], str, str]]:
    # Several checks and the memory plan ask for each header, which may be on a slow disk.
    with path.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length)) if 8 + length <= size else {}
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 8 + length + max([0, *(entry["data_offsets"][1] for entry in tensors.values())])
    if size < end:
        raise ValueError(f"{path.name} has {size} bytes, and its header says {end}: it is cut short")
    return [(name, tuple(entry["shape"]), entry["dtype"], path.name) for name, entry in tensors.items()]


def hub_problem(model: str) -> str | None:
    """Say that a model is not a folder and cannot be downloaded: the hub's client tries for a minute."""
    if local_folder(model) is not None or (reason := hub_unreachable()) is None:
        return None
    return (
        f"({model}) is not a folder here, was not downloaded, and {reason}: run `hf download {model}` first"
    )


def hub_unreachable() -> str | None:
    """Say why the hub cannot be reached; None if it can be, or if only its client can find out."""
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    reason = f"{hub.hostname} cannot be reached"
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        reason = "`HF_HUB_OFFLINE` is set"
    elif getproxies() or os.environ.get("USE_MODELSCOPE_HUB", "0") != "0":
        return None
    else:
        with suppress(OSError):
            socket.create_connection((hub.hostname, hub.port or 443), timeout=HUB_TIMEOUT_S).close()
            return None
    return reason


def check_upload(repository: str, given_as: str) -> None:
    """Raise a ValueError with the remedy if nothing can be uploaded to a hub repository."""
    from huggingface_hub import get_token  # noqa: PLC0415 - only uploads need it

    if HUB_REPOSITORY.fullmatch(repository) is None:
        raise ValueError(f"`{given_as}` must name a hub repository as `OWNER/NAME`, got {repository!r}")
    if get_token() is None:
        raise ValueError(f"`{given_as}` needs a token of the hub: run `hf auth login`, or set `HF_TOKEN`")
    if (reason := hub_unreachable()) is not None:
        raise ValueError(
            f"`{given_as}` ({repository}): {reason}: allow network access, or leave the upload out"
        )


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file is missing or holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
