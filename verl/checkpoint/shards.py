# SPDX-License-Identifier: Apache-2.0
"""Full tensors of a checkpoint, read without a process group from any of the supported formats."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedConfig

from verl.checkpoint.legacy_shards import find_shard_files, join_shards, load_shard_file
from verl.checkpoint.manifest import MANIFEST, check_digests, read_manifest, remedy
from verl.checkpoint.sharded import LORA_ADAPTER, cause
from verl.checkpoint.storage import ShardReader, read_tensors
from verl.models.fp8_weights import weights_in_fp8
from verl.models.hub_names import auto_class, meta_model
from verl.models.lora import adapted_parameters, attach_adapters
from verl.models.lora_weights import (
    BASE,
    CONFIG,
    PREFIX,
    AdaptedParameter,
    AdapterConfig,
    adapter_names,
    fold,
    is_adapter,
    plain_name,
    read_adapter_config,
)
from verl.utils.quiet import no_weight_bars


@contextmanager
def reading(what: object, remedy: str) -> Iterator[None]:
    """Turn what damaged or unfitting content raises, which is almost anything, into a ValueError."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise ValueError(f"{what} cannot be read ({cause(error)}): {remedy}") from error


def open_shards(local_dir: Path) -> "Shards":
    """Open the shards of a checkpoint folder, whichever format it has."""
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
    """Checkpoints of this project."""

    is_hub_layout_likely = False

    def __init__(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        check_digests(folder, manifest, manifest["files"])
        self._folder, self._reader = folder, ShardReader(folder)
        saved = self._reader.tensors()
        self._entries = {key.removeprefix("model."): saved[key] for key in saved if key.startswith("model.")}

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> torch.Size:
        return self._entries[name].size

    def read(self, name: str) -> Tensor:
        entry = self._entries[name]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        with reading(f"{name} in the shards of {self._folder}", remedy(self._folder)):
            read_tensors(self._reader, {f"model.{name}": whole}, is_alone=True)
        return whole


class RankFiles:
    """Checkpoints of EasyR1 and verl: one file for each rank."""

    is_hub_layout_likely = True  # checkpoints of transformers 4 may use the hub's layout

    def __init__(self, files: list[Path]) -> None:
        self._first, self._ranks = files[0], [load_shard_file(file) for file in files]

    def names(self) -> list[str]:
        return list(self._ranks[0])

    def shape(self, name: str) -> torch.Size:
        return self._ranks[0][name].shape

    def read(self, name: str) -> Tensor:
        try:
            return join_shards(name, [rank[name] for rank in self._ranks])
        except (ValueError, NotImplementedError):
            raise
        except Exception as error:  # files of other saves raise almost anything
            raise ValueError(
                f"{name} cannot be joined from {self._first} and the other ranks' files ({cause(error)}):"
                " they must be of one save: copy them again from their source"
            ) from error


class FoldedShards:
    """Weights of the plain model with LoRA folded in; the base model has the tensors that `source` lacks."""

    is_hub_layout_likely = False

    def __init__(
        self,
        source: "Shards",
        folder: Path,  # contains `adapter_config.json`
        base: Mapping[str, Tensor],
        parameters: Iterable[AdaptedParameter] = (),  # outside of linear modules
    ) -> None:
        self._source, self._folder, self._base = source, folder, base
        self._adapter = read_adapter_config(folder, str(folder))
        self._saved = {name.removeprefix(PREFIX): name for name in source.names()}
        self._own = {plain_name(name): name for name in self._saved if not is_adapter(name)}
        self._parameters = {each.name: each for each in parameters}
        fitting = {part for name in self.names() for part in adapter_names(self._layer(name))}
        unused = [name for name in self._saved if is_adapter(name) and name not in fitting]
        if unused:
            raise ValueError(
                f"{folder.parent}: {len(unused)} adapters fit no weight of the base model"
                f" ({sorted(unused)[0]}): give the base that they were trained on as `--base_model`"
            )

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self._base, *self._own]))

    def shape(self, name: str) -> torch.Size:
        own = self._own.get(name)
        return self._base[name].shape if own is None else self._source.shape(self._saved[own])

    def read(self, name: str) -> Tensor:
        """Return a full tensor, in float32 if it is adapted."""
        weight = self._read(self._own[name]) if name in self._own else self._base[name]
        module = self._layer(name)
        adapter = [part for part in adapter_names(module) if part in self._saved]
        if not adapter:
            return weight
        own = name if name in self._parameters else f"{module}{BASE}weight"
        tensors = [(own, weight), *((part, self._read(part)) for part in adapter)]
        with reading(f"the adapter of {module}", f"it must fit its base model and {self._folder / CONFIG}"):
            [(_, folded)] = fold(tensors, self._adapter, self._parameters.values())
        return folded

    def _layer(self, name: str) -> str:
        adapted = self._parameters.get(name)
        return name.removesuffix(".weight") if adapted is None else adapted.layer

    def _read(self, name: str) -> Tensor:
        return self._source.read(self._saved[name])


Shards = DistributedShards | RankFiles | FoldedShards  # sources of full tensors, by name


class AdaptedShards(FoldedShards):
    """Weights of a transformers model, whose base is read from its files if the shards omit it."""

    def __init__(
        self,
        source: Shards,
        local_dir: Path,  # contains `lora_adapter/adapter_config.json`
        base: str | None,  # folder or hub name; None takes the one in the adapter's config
        config: PreTrainedConfig,
        trust_remote_code: bool,
    ) -> None:
        folder = local_dir / LORA_ADAPTER
        adapter = read_adapter_config(folder, str(folder))
        names = [name.removeprefix(PREFIX) for name in source.names()]
        tensors: dict[str, Tensor] = {}
        if not any(name.endswith(f"{BASE}weight") for name in names):
            own = {plain_name(name) for name in names if not is_adapter(name)}
            tensors = _read_base(base or adapter.base, folder, config, trust_remote_code, own)
        first = next(iter(tensors.values()), None)
        self.base_dtype = first.dtype if first is not None else torch.bfloat16
        super().__init__(source, folder, tensors, _parameters(adapter, config, trust_remote_code))


def _parameters(
    adapter: AdapterConfig, config: PreTrainedConfig, trust_remote_code: bool
) -> list[AdaptedParameter]:
    """Return which tensors outside of linear modules an adapter changes, and how peft names its layers."""
    if not adapter.target_parameters:
        return []
    model = meta_model(config, trust_remote_code=trust_remote_code)
    attach_adapters(model, adapter, CONFIG)
    return adapted_parameters(model)


def _read_base(
    path: str | None, folder: Path, config: PreTrainedConfig, trust_remote_code: bool, own: set[str]
) -> dict[str, Tensor]:
    if path is None:
        raise FileNotFoundError(f"{folder / CONFIG} names no base model: give it as `--base_model`")
    hint = "give it as `--base_model`"
    with reading(f"the base model of {folder}, {path},", hint), no_weight_bars(), weights_in_fp8(path):
        loaded: Any = auto_class(config).from_pretrained(
            path, config=config, dtype="auto", trust_remote_code=trust_remote_code, output_loading_info=True
        )
        model, info = loaded
        missing = sorted(set(info["missing_keys"]) - own)
        if missing:  # transformers has filled them with random numbers
            raise ValueError(f"it lacks {len(missing)} weights, such as {missing[0]}")
    return model.state_dict()
