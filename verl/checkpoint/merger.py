# SPDX-License-Identifier: Apache-2.0
"""From a sharded checkpoint to a folder that `from_pretrained` and vLLM load.

Reads this project's checkpoints and the `model_world_size_W_rank_R.pt` files of EasyR1 and verl, without a
process group. Host memory holds about one output file at a time, whatever the size of the model.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from verl.checkpoint.adapted_shards import AdaptedShards
from verl.checkpoint.legacy_shards import find_shard_files, join_shards, load_shard_file
from verl.checkpoint.manifest import MANIFEST, check_digests, read_manifest
from verl.checkpoint.sharded import HUGGINGFACE
from verl.checkpoint.storage import ShardReader, read_tensors
from verl.models.hub_names import HubNames
from verl.models.lora_weights import is_adapter

MAX_FILE_BYTES = 5 * 1024**3  # as hub checkpoints are cut


class Shards(Protocol):
    """Where whole tensors come from."""

    is_hub_layout_likely: (
        bool  # True for checkpoints of transformers 4: tensors lie as on the hub where it differs
    )

    def names(self) -> list[str]:
        """The name of every weight."""
        ...

    def shape(self, name: str) -> torch.Size:
        """Size of the whole tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        ...


def merge_checkpoint(
    local_dir: Path | str,
    *,
    dtype: torch.dtype | None = None,
    base_model: str | None = None,
    trust_remote_code: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write the weights of a checkpoint as safetensors under hub key names, beside its config and tokenizer.

    A value model becomes a sequence-classification model with one label, as its config says; a token-
    classification model if its score has a bias. transformers has such classes for text models; a vision-
    language one can be loaded here, as a critic or reward model. Adapters are folded into the weights of
    their base, which is then held in memory.

    Args:
        local_dir: A role's folder: `…/global_step_N/actor`.
        dtype: Of the written weights; None keeps the checkpoint's, so that log-probs are the trainer's own;
            or for a checkpoint of adapters the base's.
        base_model: Folder or hub name of the model that adapters are for; None takes the one that they name.
        trust_remote_code: Whether Python code that came with the model may run.
        max_file_bytes: Where the weights are cut into several files.

    Returns:
        `local_dir/huggingface`.

    Raises:
        FileNotFoundError: Not a checkpoint folder, or one of its files is missing.
        ValueError: A file is damaged, or the weights do not fit the config.
    """
    local_dir = Path(local_dir)
    folder = local_dir / HUGGINGFACE
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder / 'config.json'} is missing: `--local_dir` must be a role's folder of a checkpoint,"
            " for example checkpoints/project/experiment/global_step_8/actor"
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    names = HubNames(config, trust_remote_code)
    shards = open_shards(local_dir)
    if any(map(is_adapter, shards.names())):
        shards = AdaptedShards(shards, local_dir, base_model, config, trust_remote_code)
        dtype = dtype or shards.dtype
    tensors = _hub_tensors(shards, names, local_dir)
    written = _write_files(folder, _cast(tensors, dtype), max_file_bytes)
    _set_dtype(folder, config, written)
    return folder


def open_shards(local_dir: Path) -> Shards:
    """The shards of a folder, of whichever kind it holds."""
    if (local_dir / MANIFEST).is_file():
        return DistributedShards(local_dir)
    files = find_shard_files(local_dir)
    if files:
        return RankFiles(files)
    raise FileNotFoundError(
        f"{local_dir} holds neither {MANIFEST} nor model_world_size_W_rank_R.pt files:"
        " `--local_dir` must be a complete checkpoint's folder, for example …/global_step_8/actor"
    )


class DistributedShards:
    """The checkpoints of this project."""

    is_hub_layout_likely = False

    def __init__(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        check_digests(folder, manifest, manifest["files"])
        self._reader = ShardReader(folder)
        saved = self._reader.tensors()
        self._entries = {key.removeprefix("model."): saved[key] for key in saved if key.startswith("model.")}

    def names(self) -> list[str]:
        """The name of every weight."""
        return list(self._entries)

    def shape(self, name: str) -> torch.Size:
        """Size of the whole tensor."""
        return self._entries[name].size

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        entry = self._entries[name]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        read_tensors(self._reader, {f"model.{name}": whole}, is_alone=True)
        return whole


class RankFiles:
    """The checkpoints of EasyR1 and verl: one file for each rank."""

    is_hub_layout_likely = True

    def __init__(self, files: list[Path]) -> None:
        self._ranks = [load_shard_file(file) for file in files]

    def names(self) -> list[str]:
        """The name of every weight."""
        return list(self._ranks[0])

    def shape(self, name: str) -> torch.Size:
        """Size of the whole tensor."""
        return self._ranks[0][name].shape

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        return join_shards(name, [rank[name] for rank in self._ranks])


def _hub_tensors(shards: Shards, names: HubNames, local_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its hub name, after checking that all are there."""
    in_memory, as_on_hub, wrong = [], [], []
    for name in shards.names():
        if name in names.tied:
            continue
        shape = shards.shape(name)
        fits_memory, fits_hub = names.memory_shapes.get(name) == shape, names.hub_shapes.get(name) == shape
        if fits_hub and (shards.is_hub_layout_likely or not fits_memory):
            as_on_hub.append(name)
        elif fits_memory:
            in_memory.append(name)
        else:
            wrong.append(f"{name} {tuple(shape)}")
    found = set(as_on_hub).union(*(names.of(name) for name in in_memory))
    missing = set().union(*(names.of(name) for name in names.memory_shapes if name not in names.tied)) - found
    if wrong or missing:
        raise ValueError(
            f"{local_dir}: the weights do not fit {HUGGINGFACE}/config.json:"
            f" {len(missing)} are missing {sorted(missing)[:3]},"
            f" {len(wrong)} have no place {sorted(wrong)[:3]}"
        )
    yield from ((name, shards.read(name)) for name in as_on_hub)
    yield from names.convert((name, shards.read(name)) for name in in_memory)


def _cast(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        is_cast = dtype is not None and tensor.is_floating_point()
        yield name, tensor.to(dtype) if is_cast else tensor


class _Written:
    """What was written: the file of each tensor, bytes, and the dtype of the first weight."""

    def __init__(self) -> None:
        self.files: list[list[str]] = []
        self.bytes = 0
        self.dtype: torch.dtype | None = None


def _write_files(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_file_bytes: int) -> _Written:
    """Write safetensors of bounded size, then the index; older weights in the folder are removed first."""
    for old in [
        *folder.glob("*.safetensors"),
        *folder.glob("*.safetensors.index.json"),
        *folder.glob("*.part"),
    ]:
        old.unlink()
    written, pending, pending_bytes = _Written(), {}, 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + size > max_file_bytes:
            _write_part(folder, pending, written)
            pending, pending_bytes = {}, 0
        # Parts of one large tensor share its memory, which safetensors refuses and would keep alive.
        pending[name] = tensor.clone(memory_format=torch.contiguous_format) if _is_view(tensor) else tensor
        pending_bytes += size
        written.dtype = written.dtype or (tensor.dtype if tensor.is_floating_point() else None)
    _write_part(folder, pending, written)
    _name_parts(folder, written)
    return written


def _is_view(tensor: Tensor) -> bool:
    return (
        not tensor.is_contiguous()
        or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    )


def _write_part(folder: Path, tensors: dict[str, Tensor], written: _Written) -> None:
    save_file(tensors, folder / f"{len(written.files)}.part", metadata={"format": "pt"})
    written.files.append(list(tensors))
    written.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _name_parts(folder: Path, written: _Written) -> None:
    """Give the files their final names once their number is known; one file has no index."""
    count = len(written.files)
    if count == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for index, names in enumerate(written.files):
        file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
        (folder / f"{index}.part").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": written.bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))


def _set_dtype(folder: Path, config: PreTrainedConfig, written: _Written) -> None:
    """Say in the config which dtype the weights have: engines choose theirs by it."""
    config.dtype = written.dtype
    for name in config.sub_configs:
        getattr(config, name).dtype = written.dtype
    config.save_pretrained(folder)


def upload(folder: Path, repository: str) -> str:
    """Put a merged folder on the Hugging Face hub and return its address.

    Args:
        folder: From `merge_checkpoint`.
        repository: `user/name`; made, private, if it does not exist.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415 - only uploads need the client

    api = HfApi()
    api.create_repo(repository, private=True, exist_ok=True)
    api.upload_folder(repo_id=repository, folder_path=folder)
    return f"https://huggingface.co/{repository}"
