# SPDX-License-Identifier: Apache-2.0
"""Write a small model with random weights that transformers and vLLM load, without a network.

    verl-tiny-model tiny-model --kind qwen2_5_vl
    verl-tiny-model tiny-model --words-from train.jsonl:answer
    verl-tiny-model --like Qwen3-VL-4B-Instruct --set num_hidden_layers=2 --out small

It knows nothing and runs in seconds where a real model takes hours: use it to try data, rewards and options.
`--kind` has a tokenizer of 512 tokens, and with `--words-from` one whose tokens are the answers and words of
your rows, and single bytes for all other text; `--like` copies tokenizer and processor of a local model.

Exit status: 0; 1 if the model cannot be made.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.utils.cuda_builds import repair_cuda_builds
from verl.utils.typed_command import command_parser

KINDS = (  # the families of `verl/models/tiny.py`, which imports torch
    "deepseek", "gemma2", "gemma3", "gemma3_vl", "gemma4", "gemma4_moe", "glm46v", "glm4v", "glm4v_moe",
    "internvl", "llama", "llava_onevision", "minicpmv4_6", "minicpmv4_7", "ministral3", "mistral",
    "mistral3", "qwen2", "qwen2_5_omni", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe",
    "vila",
)  # fmt: skip
WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("verl-tiny-model", __doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--kind", choices=KINDS, default="qwen2_5_vl", help="default: qwen2_5_vl")
    source.add_argument(
        "--like", type=Path, metavar="FOLDER", help="a model's folder; its weights are not read"
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", metavar="OUT", help="folder to write; made if missing"
    )
    parser.add_argument("--out", type=Path, metavar="OUT", help="the same")
    parser.add_argument(
        "--words-from", type=read_words_from, action="append", default=[], metavar="FILE[:COLUMN]",
        help="give each word and short text of a data file, or of one of its columns, a token of its own; may"
        " be repeated; not with `--like`",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument(
        "--set", dest="changes", type=read_change, action="append", default=[], metavar="KEY=VALUE",
        help="change a config value, given as JSON; may be repeated",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if (options.folder is None) == (options.out is None):
        parser.error("name one folder to write: OUT")
    if options.like and options.words_from:
        parser.error("`--words-from` makes a tokenizer, and `--like` copies one: leave out one of the two")
    out = options.folder or options.out
    repair_cuda_builds()
    # Imported here so that `--help` answers before torch loads.
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415

    from verl.models.tiny import save_tiny_model  # noqa: PLC0415

    try:
        if options.like:
            save_random_model(out, options.like, seed=options.seed, changes=dict(options.changes))
        else:
            words = words_of_rows(options.words_from)
            save_tiny_model(out, options.kind, seed=options.seed, words=words, **dict(options.changes))
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:  # the last for a value's type
        sys.stderr.write(f"make_tiny_model: {error}\n")
        return 1
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    sys.stdout.write(f"{out}: {size / 1e6:.1f} MB of random weights\n")
    return 0


def read_change(text: str) -> tuple[str, Any]:
    """Split `KEY=VALUE`; a value that is not JSON is text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"must look like KEY=VALUE, got {text!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def read_words_from(text: str) -> tuple[str, str]:
    """Split `FILE[:COLUMN]`; the column is empty if there is none."""
    file, _, column = text.rpartition(":")
    is_column = file != "" and "/" not in column and not Path(text).exists()
    return (file, column) if is_column else (text, "")


def words_of_rows(sources: Sequence[tuple[str, str]]) -> list[str]:
    """Return the words of data files, given by name and column; without a column those of all columns.

    Raises:
        ValueError: A file has no such column, or no word.
        FileNotFoundError: There is no such file.
    """
    from verl.data.files import load_rows  # noqa: PLC0415
    from verl.models.tiny import find_words, texts_of  # noqa: PLC0415

    texts = []
    for file, column in sources:
        rows = load_rows(file, "--words-from")
        columns = rows.sources[0].columns
        if column and column not in columns:
            raise ValueError(f"`--words-from {file}:{column}`: no such column, the file has {columns}")
        cells = (
            rows[index].get(name) for index in range(len(rows)) for name in ([column] if column else columns)
        )
        found = [text for cell in cells for text in texts_of(cell)]
        if not any(text.strip() for text in found):
            raise ValueError(f"`--words-from {file}`: no text to take words from")
        texts += found
    return find_words(texts)


def save_random_model(directory: Path, like: Path, *, seed: int = 0, changes: dict[str, Any]) -> None:
    """Write a model with random weights and the architecture and dtype of the model in the folder `like`.

    All files of `like` except its weights are copied; `changes` are values of its config.
    """
    import torch  # noqa: PLC0415
    from transformers import AutoConfig  # noqa: PLC0415

    from verl.models.families.registry import trained_part  # noqa: PLC0415
    from verl.models.hub_names import auto_class  # noqa: PLC0415
    from verl.models.tiny import write_model  # noqa: PLC0415

    if not (like / "config.json").is_file():
        raise FileNotFoundError(f"`--like`: {like} must be a folder with a model's config.json")
    if directory.resolve() == like.resolve():
        raise ValueError(f"`--out` must be another folder than `--like`, got {directory} for both")
    config = AutoConfig.from_pretrained(like)
    for key, value in changes.items():
        _change(trained_part(config), key, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        part = trained_part(config)
        model = auto_class(part).from_config(part)
    directory.mkdir(parents=True, exist_ok=True)
    for file in like.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS):
            shutil.copy(file, directory)
    write_model(model, config, directory)


def _change(config: Any, key: str, value: Any) -> None:
    """Change a value, preferably of the language model; remaining layers keep their types."""
    text = config.get_text_config()
    target = text if hasattr(text, key) else config
    if not hasattr(target, key):
        raise ValueError(f"`--set {key}`: the config of {config.model_type} has no such value")
    kinds = getattr(target, "layer_types", None)
    if key == "num_hidden_layers" and kinds:
        target.layer_types = kinds[:value]
    setattr(target, key, value)
