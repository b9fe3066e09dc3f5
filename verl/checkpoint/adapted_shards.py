# SPDX-License-Identifier: Apache-2.0
"""The whole weights of a model whose checkpoint holds adapters: each with its adapter folded in."""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from verl.checkpoint.sharded import LORA_ADAPTER
from verl.models.adapter_files import CONFIG, PREFIX, read_adapter_config
from verl.models.hub_names import auto_class
from verl.models.lora_weights import BASE, fold, is_adapter, plain_name, split_name


class TensorSource(Protocol):
    """The tensors of a checkpoint, by their names in the model that was trained."""

    def names(self) -> list[str]:
        """The name of every tensor."""
        ...

    def shape(self, name: str) -> torch.Size:
        """Size of a whole tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        ...


class AdaptedShards:
    """The plain model's tensors; what the checkpoint has no weight for comes from the base model's files.

    Attributes:
        dtype: Of the base; the adapted weights come in float32.
    """

    is_hub_layout_likely = False

    def __init__(
        self,
        source: TensorSource,
        local_dir: Path,
        base: str | None,
        config: PreTrainedConfig,
        trust_remote_code: bool,
    ) -> None:
        """Read the adapters' config, and the base model if it is needed.

        Args:
            source: The checkpoint.
            local_dir: Its folder, with `lora_adapter/adapter_config.json`.
            base: Folder or hub name of the base model; None takes the one that the adapter names.
            config: Of the model that is exported.
            trust_remote_code: Whether the base model's own code may run.

        Raises:
            FileNotFoundError: The base model cannot be read.
            ValueError: The adapters' config cannot be read.
        """
        folder = local_dir / LORA_ADAPTER
        self._source = source
        self._adapter = read_adapter_config(folder, str(folder))
        self._saved = {name.removeprefix(PREFIX): name for name in source.names()}
        self._adapters: dict[str, list[str]] = {}  # tensors of each adapted module
        for name in filter(is_adapter, self._saved):
            self._adapters.setdefault(split_name(name)[0], []).append(name)
        self._own = {plain_name(name): name for name in self._saved if not is_adapter(name)}
        self._base: dict[str, Tensor] = {}
        if not any(BASE in name for name in self._saved):
            self._base = _read_base(base or self._adapter.base, folder, config, trust_remote_code)
        first = next(iter(self._base.values()), None)
        self.dtype = first.dtype if first is not None else torch.bfloat16

    def names(self) -> list[str]:
        """The name of every weight of the plain model."""
        return list(self._base | self._own)

    def shape(self, name: str) -> torch.Size:
        """Size of the whole tensor."""
        return (
            self._source.shape(self._saved[self._own[name]]) if name in self._own else self._base[name].shape
        )

    def read(self, name: str) -> Tensor:
        """The whole tensor, with its adapter.

        Raises:
            ValueError: A part of its adapter is missing.
        """
        module, _, kind = name.rpartition(".")
        adapter = self._adapters.get(module, ()) if kind == "weight" else ()
        if not adapter:
            return self._unadapted(name)
        tensors = [(full, self._source.read(self._saved[full])) for full in adapter]
        tensors.append((f"{module}{BASE}weight", self._unadapted(name)))
        [(_, whole)] = fold(tensors, self._adapter.scale, has_magnitude=self._adapter.use_dora)
        return whole

    def _unadapted(self, name: str) -> Tensor:
        if name in self._own:
            return self._source.read(self._saved[self._own[name]])
        return self._base[name]


def _read_base(
    path: str | None, folder: Path, config: PreTrainedConfig, trust_remote_code: bool
) -> dict[str, Tensor]:
    """The base model's tensors by their names in memory."""
    if path is None:
        raise FileNotFoundError(f"{folder / CONFIG} names no base model: give it as `--base_model`")
    try:
        model: Any = auto_class(config).from_pretrained(
            path, config=config, dtype="auto", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"the base model of {folder} cannot be read from {path}: {error}: give it as `--base_model`"
        ) from error
    return model.state_dict()
