# SPDX-License-Identifier: Apache-2.0
"""Files of models with weights in FP8, and a scale for each block of a matrix.

As DeepSeek-V3 and Qwen3 are released: `NAME` is float8_e4m3fn, `NAME_scale_inv` has one number for each
block, by which its weights are multiplied, and `quantization_config` in config.json gives the rows and
columns of a block. Importing this module imports no torch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from verl.config.files.model_files import CONFIG, local_folder, read_json, read_model_config, stored_tensors

KEY, METHOD = "quantization_config", "fp8"
SCALES = "_scale_inv"  # the end of their names
FORMAT = "F8_E4M3"  # names of data types in headers of safetensors files
SCALE_FORMATS = ("F32", "BF16")
REMEDY = "use a release of the model in bfloat16"
INCOMPLETE = f"download the model again, or {REMEDY}"
ENDLESS = 1 << 62


class Block(NamedTuple):
    """Size of the parts of a matrix that have a scale each; the last ones may be smaller."""

    rows: int
    columns: int

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight."""
        return tuple(-(-size // block) for size, block in zip(shape, self, strict=True))


WHOLE = Block(ENDLESS, ENDLESS)  # one scale for a matrix


def block_of(config: Mapping[str, Any]) -> Block | None:
    """Return the size of blocks by a model's config.json; None for weights that are not quantized.

    Raises:
        ValueError: The weights are quantized in another way.
    """
    text = config.get("text_config")
    found = config.get(KEY) or (text.get(KEY) if isinstance(text, Mapping) else None)
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise ValueError(f"`{KEY}` in {CONFIG} is {found!r}, and must be a mapping: {INCOMPLETE}")
    method, size, kind = found.get("quant_method"), found.get("weight_block_size"), found.get("fmt", "e4m3")
    if method != METHOD:
        raise ValueError(
            f"`{KEY}` in {CONFIG} has `quant_method` {method!r}, and only {METHOD!r} can be read: {REMEDY}"
        )
    is_size = isinstance(size, list) and [type(each) for each in size] == [int, int] and min(size) > 0
    if kind != "e4m3" or not (size is None or is_size):
        raise ValueError(
            f"`{KEY}` in {CONFIG} has `fmt` {kind!r} and `weight_block_size` {size!r}, and only 'e4m3' and"
            f" two positive numbers, or null for one scale per weight, can be read: {REMEDY}"
        )
    return WHOLE if size is None else Block(*size)


def is_in_fp8(model: str) -> bool:
    """Return whether a model's files on this machine have weights in FP8."""
    return block_of(read_model_config(model) or {}) is not None


def fp8_problem(model: str) -> str | None:
    """Say what is wrong with quantized weights in a folder, from its config and the headers of its files."""
    folder = local_folder(model)
    config = None if folder is None else read_json(folder / CONFIG)
    if folder is None or config is None:
        return None
    try:
        block = block_of(config)
        tensors = {name: (size, kind, file) for name, size, kind, file in stored_tensors(folder)}
    except ValueError as error:
        return f"({folder}): {error}"
    except OSError:
        return None  # without weights, or in another format
    for name, (size, kind, file) in tensors.items():
        problem = None
        if name.endswith(SCALES):
            weight = name.removesuffix(SCALES)
            if not tensors.get(weight, ((), "", ""))[1].startswith("F8"):
                problem = f"{name} is there, and no {weight} in FP8"
        elif kind.startswith("F8"):
            scales = tensors.get(name + SCALES)
            problem = scale_problem(name, size, kind, None if scales is None else scales[:2], block)
        if problem is not None:
            return f"({folder}): {file}: {problem}: {INCOMPLETE}"
    return None


def scale_problem(
    name: str,
    shape: tuple[int, ...],
    kind: str,
    scales: tuple[tuple[int, ...], str] | None,  # their shape and data type
    block: Block | None,
) -> str | None:
    """Say why a weight in FP8 cannot be read, or None if it can. Data types are named as in headers."""
    if kind != FORMAT or len(shape) != 2:
        return f"{name} is {kind} with shape {shape}, and only matrices in {FORMAT} can be read"
    if block is None:
        return f"{name} is {kind}, and {CONFIG} has no `{KEY}`, which gives the size of a block"
    if scales is None:
        return f"{name} is {kind}, and its scales {name}{SCALES} are missing"
    found, scale_kind = scales
    expected = block.grid(shape)
    if found != expected and not (block == WHOLE and found in ((), (1,))):
        reason = f"{expected}, as {name} has {shape} in blocks of {block.rows} x {block.columns}"
        if block == WHOLE:
            reason = f"one number, as `{KEY}` in {CONFIG} has no `weight_block_size`"
        return f"{name}{SCALES} has shape {found}, and must have {reason}"
    if scale_kind not in SCALE_FORMATS:
        return f"{name}{SCALES} is {scale_kind}, and must be {' or '.join(SCALE_FORMATS)}"
    return None
