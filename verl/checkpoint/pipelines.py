# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of diffusion models as folders that a pipeline of diffusers loads.

A checkpoint has the transformer alone. An export adds the other parts of the pipeline from the base model:

```
huggingface/model_index.json     names the parts; with the transformer's config it is in every checkpoint
huggingface/transformer/         trained, adapters folded in
huggingface/vae/ ...             copied from the base model
```

Files are read and written without diffusers.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from verl.checkpoint.export_files import MAX_FILE_BYTES, base_of, cast, folder_of, write_files, writing
from verl.checkpoint.manifest import MANIFEST
from verl.checkpoint.sharded import HUGGINGFACE, LORA_ADAPTER
from verl.checkpoint.shards import FoldedShards, Shards, open_shards, reading
from verl.checkpoint.tracker import PARTIAL, replace_folder
from verl.config.files.model_files import PIPELINE
from verl.models.lora_weights import PREFIX, AdapterFiles, is_adapter, peft_config, peft_name
from verl.utils.weight_files import save_weights

TRANSFORMER = "transformer"  # the part that is trained
CONFIG = f"{TRANSFORMER}/config.json"
WEIGHTS = "diffusion_pytorch_model"  # start of the names of diffusers' files
ADAPTER_WEIGHTS = "pytorch_lora_weights.safetensors"
ADAPTER_METADATA = "lora_adapter_metadata"  # key of diffusers in the file's header
ENTRY = 2  # library and class of a part in the index
REMEDY = "save the base model again with `save_pretrained`, or give another one as `--base_model`"


class PipelineConfigs(NamedTuple):
    """The files of a pipeline that describe a transformer's weights, for `huggingface/`."""

    texts: Mapping[str, str]  # by path in the folder

    @classmethod
    def of(cls, model: str) -> "PipelineConfigs":
        """Read the files of a folder or of a downloaded hub model."""
        folder = folder_of(model, PIPELINE, CONFIG)
        assert folder is not None, "the pipeline was loaded from it"
        return cls({name: (folder / name).read_text(encoding="utf-8") for name in (PIPELINE, CONFIG)})

    def save_pretrained(self, save_directory: str | Path) -> None:
        for name, text in self.texts.items():
            file = Path(save_directory) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


class PipelineAdapter(NamedTuple):
    """Adapters of a transformer in the formats of peft and of diffusers, for `lora_adapter/`."""

    files: AdapterFiles

    def save_pretrained(self, save_directory: str | Path) -> None:
        self.files.save_pretrained(save_directory)
        start = f"{TRANSFORMER}."
        tensors = {
            start + peft_name(name).removeprefix(PREFIX): tensor.contiguous()
            for name, tensor in self.files.tensors.items()
        }
        # Without it diffusers would take the rank for alpha.
        config = peft_config(self.files.config, self.files.modules, self.files.parameters)
        metadata = json.dumps({start + key: value for key, value in config.items()})
        save_weights(tensors, Path(save_directory) / ADAPTER_WEIGHTS, {ADAPTER_METADATA: metadata})


def merge_pipeline(
    local_dir: Path,
    *,
    dtype: torch.dtype | None = None,  # of the transformer; as for `merge_checkpoint`
    base_model: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write a folder for `DiffusionPipeline.from_pretrained`; return it.

    Raises:
        FileNotFoundError: The base model, or a part of it, is not there.
        ValueError: The base model is another pipeline, or the adapters do not fit it.
    """
    folder = local_dir / HUGGINGFACE
    base = _base_folder(local_dir, base_model)
    index = _read_index(base)
    expected, found = _read_index(folder)["_class_name"], index["_class_name"]
    if found != expected:
        raise ValueError(
            f"the base model of {local_dir}, {base}, is a {found}, the checkpoint is of a {expected}: give"
            " the base that it was trained from as `--base_model`"
        )
    parts = _other_parts(base, index)
    tensors = _trained(local_dir, base, dtype)
    with writing([folder / TRANSFORMER]):
        for part in parts:
            # Not by hard links: what writes into the export later would change the base model.
            partial = folder / f"{part.name}{PARTIAL}"
            shutil.rmtree(partial, ignore_errors=True)  # of an interrupted export
            shutil.copytree(part, partial, copy_function=shutil.copyfile)  # permissions: the umask's
            replace_folder(partial, folder / part.name)
        for file in [base / PIPELINE, *base.glob("LICENSE*")]:
            shutil.copyfile(file, folder / file.name)
        write_files(folder / TRANSFORMER, tensors, max_file_bytes, WEIGHTS)
    return folder


def _base_folder(local_dir: Path, base_model: str | None) -> Path:
    base, folder = base_of(local_dir, base_model, "*")
    if folder is None or not (folder / PIPELINE).is_file():
        where = (
            f"`--base_model` ({base})" if base_model else f"the base model in {local_dir / MANIFEST} ({base})"
        )
        raise FileNotFoundError(
            f"{where} has no {PIPELINE} on this machine: give the folder of the pipeline that training"
            " started from as `--base_model`"
        )
    return folder


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / PIPELINE
    try:
        index = json.loads(path.read_bytes())
        return index | {"_class_name": str(index["_class_name"])}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}): it must be that of a pipeline of"
            " diffusers"
        ) from error


def _other_parts(base: Path, index: Mapping[str, Any]) -> list[Path]:
    if wrong := [name for name in index if Path(name).name != name or name in ("", "..")]:
        raise ValueError(f"{base / PIPELINE} names the part {wrong[0]!r}, which must be a folder next to it")
    named = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == ENTRY}
    folders = [base / name for name, entry in named.items() if entry[0] is not None and name != TRANSFORMER]
    missing = [folder for folder in folders if not folder.is_dir()]
    if missing:
        raise FileNotFoundError(
            f"{missing[0]} is missing, which {base / PIPELINE} names: give a complete base model as"
            " `--base_model`"
        )
    return folders


def _trained(local_dir: Path, base: Path, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Return the transformer's tensors under their names in diffusers, which are those in memory."""
    shards = open_shards(local_dir)
    if not any(map(is_adapter, shards.names())):
        return cast(_all_of(shards), dtype)
    stored = stored_weights(base / TRANSFORMER)
    folded = FoldedShards(shards, local_dir / LORA_ADAPTER, stored)
    return _as_stored(folded, stored) if dtype is None else cast(_all_of(folded), dtype)


def _all_of(shards: Shards) -> Iterator[tuple[str, Tensor]]:
    return ((name, shards.read(name)) for name in shards.names())


def _as_stored(folded: Shards, stored: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in _all_of(folded):
        yield name, tensor.to(stored[name].dtype) if name in stored else tensor


def stored_weights(folder: Path, remedy: str = REMEDY) -> dict[str, Tensor]:
    """Map the tensors in the safetensors files of a part of a pipeline into memory."""
    index, whole = folder / f"{WEIGHTS}.safetensors.index.json", folder / f"{WEIGHTS}.safetensors"
    if not (index.is_file() or whole.is_file()):
        raise FileNotFoundError(f"{whole} is missing: {remedy}")
    with reading(f"the base weights in {folder}", remedy):
        files = [whole]
        if index.is_file():
            names = set(json.loads(index.read_bytes())["weight_map"].values())
            files = [folder / name for name in sorted(names)]
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
