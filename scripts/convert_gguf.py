# SPDX-License-Identifier: Apache-2.0
"""Turn a GGUF file into a model folder that can be trained: weights, config, tokenizer and chat template.

    python3 scripts/convert_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2

Quantized weights become `--dtype` numbers of the same values. transformers reads the file: it knows the
architectures that it has converters for, and not their vision towers. Needs the package `gguf`, which the
extra of the same name brings.
"""

import argparse
import importlib.util
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a clone without installing

from verl.config.files.paths import writable_folder
from verl.utils.cuda_builds import repair_cuda_builds

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAGIC = b"GGUF"
# Entries of a model card, and the file's fields that have them.
FACTS = {"model_name": "general.name", "license": "general.license", "url": "general.base_model.0.repo_url"}
HUB_NAME = re.compile(r"https://huggingface\.co/([^/]+/[^/]+)/?")
DTYPES = ("float32", "bfloat16", "float16")


def input_problem(file: Path, folder: Path) -> str | None:
    """Say why the file cannot be converted to the folder, or None."""
    if not file.is_file():
        return f"no file {file}"
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            return f"{file} is no GGUF file: it does not begin with {MAGIC.decode()}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return f"{folder} exists and is not an empty folder: name another one, or delete it"
    if importlib.util.find_spec("gguf") is None:
        return "the package `gguf` is not installed: pip install -e '.[gguf]', or pip install gguf"
    try:
        writable_folder(str(folder.parent))
    except ValueError as error:
        return f"the parent of {folder} {error}"
    return None


def read_facts(file: Path) -> dict[str, Any]:
    """Return the model's name, license and origin from a file, as a model card has them; reads no weights.

    Raises:
        ValueError: The file ends before its last tensor.
    """
    import gguf  # noqa: PLC0415 - optional

    try:
        fields = gguf.GGUFReader(file).fields
    except Exception as error:  # of many types: it reads past the end
        raise ValueError(
            f"transformers cannot read {file}: it is cut short or damaged, download it again ({error})"
        ) from error
    facts = {name: fields[key].contents() for name, key in FACTS.items() if key in fields}
    hub = HUB_NAME.fullmatch(str(facts.pop("url", "")))
    return facts | ({"base_model": hub[1]} if hub else {})


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Write the model of a GGUF file to a folder, which appears whole or not at all.

    Raises:
        ValueError: transformers cannot read the file, it lacks weights or a tokenizer, or the folder cannot
            be written.
    """
    repair_cuda_builds()  # before transformers is imported
    import torch  # noqa: PLC0415 - seconds, after the arguments were checked
    from safetensors import SafetensorError  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    from verl.utils.quiet import no_weight_bars  # noqa: PLC0415

    facts = read_facts(file)
    print(f"reading {file}", flush=True)
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        with no_weight_bars():
            tokenizer = AutoTokenizer.from_pretrained(**source)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **source, dtype=getattr(torch, dtype), output_loading_info=True
            )
    except Exception as error:
        raise ValueError(f"transformers cannot read {file}: {error}") from error
    model, found = loaded
    if lacking := sorted([*found["missing_keys"], *map(str, found["mismatched_keys"])]):
        raise ValueError(
            f"{file} lacks {len(lacking)} weights of its model, such as {lacking[0]}: transformers would fill"
            " them with random numbers"
        )
    # Its numbers are not quantized any more; with these, `save_pretrained` would refuse to write them.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    try:
        write(model, tokenizer, {"model_name": file.stem} | facts, folder)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder} cannot be written, is there room for it? {error}") from error


def write(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", facts: dict[str, Any], folder: Path
) -> None:
    from verl.utils.quiet import no_weight_bars  # noqa: PLC0415 - imports torch
    from verl.utils.weight_files import share_weights  # noqa: PLC0415

    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        with no_weight_bars():
            model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        share_weights(unfinished)
        # the cards of what is trained from it take these from here
        (unfinished / "README.md").write_text(f"---\n{yaml.safe_dump(facts)}---\n\n# {facts['model_name']}\n")
        unfinished.replace(folder)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, help="folder to write, new or empty")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights; %(default)s")
    given = parser.parse_args(arguments)
    folder = given.folder.resolve()  # `.` has no name
    problem = input_problem(given.file, folder)
    if problem is None:
        try:
            convert(given.file, folder, given.dtype)
        except ValueError as error:
            problem = str(error)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    print(f"wrote {given.folder}; train it with worker.actor.model.model_path={given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
