# SPDX-License-Identifier: Apache-2.0
"""Export of a sharded checkpoint to a folder that `from_pretrained` and vLLM load.

Works without a process group; host memory holds about one output file at a time.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from verl.checkpoint.export_files import (
    MAX_FILE_BYTES,
    cast,
    copy_unread_files,
    unread_tensors,
    write_files,
    writing,
)
from verl.checkpoint.manifest import check_role_folder
from verl.checkpoint.pipelines import merge_pipeline
from verl.checkpoint.sharded import HUGGINGFACE
from verl.checkpoint.shards import AdaptedShards, Shards, open_shards, reading
from verl.config.files.model_files import PIPELINE
from verl.models.families.registry import family_of, load_config, whole_config
from verl.models.hub_names import HubNames
from verl.models.lora_weights import is_adapter
from verl.utils.weight_files import by_folder


def merge_checkpoint(
    local_dir: Path | str,  # a role's folder: …/global_step_N/actor
    *,
    dtype: torch.dtype | None = None,  # None keeps the checkpoint's, or for adapters the base model's
    base_model: str | None = None,  # folder or hub name; None takes the one that the checkpoint names
    trust_remote_code: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write the weights of a checkpoint as safetensors under hub names; return the folder `huggingface`.

    A value model becomes a sequence-classification model with one label, or a token-classification model if
    its score has a bias. LoRA adapters are folded into the weights of their base, which is then held in
    memory. Tensors that training does not load, such as Qwen3.5's `mtp.*`, are those of the base model, in
    its type unless `dtype` asks for another. A diffusion model becomes a folder of diffusers, see
    `merge_pipeline`.
    """
    local_dir = Path(local_dir)
    check_role_folder(local_dir)
    folder = local_dir / HUGGINGFACE
    if (folder / PIPELINE).is_file():
        return merge_pipeline(local_dir, dtype=dtype, base_model=base_model, max_file_bytes=max_file_bytes)
    with reading(
        folder / "config.json", "it must be the config of the saved model, as its checkpoint has it"
    ):
        config = load_config(folder, trust_remote_code=trust_remote_code)
        names = HubNames(config, trust_remote_code)
    family, shards, trained_dtype = family_of(config), open_shards(local_dir), dtype
    if any(map(is_adapter, shards.names())):
        shards = AdaptedShards(shards, local_dir, base_model, config, trust_remote_code)
        trained_dtype = dtype or shards.base_dtype
    trained = cast(_hub_tensors(shards, names, local_dir), trained_dtype)
    unread = cast(unread_tensors(local_dir, family.unread, base_model), dtype)
    with writing([folder, *(folder / name for name in family.folders)]):
        parts = by_folder(itertools.chain(trained, unread), family.folders)
        dtypes = [write_files(folder / name, part, max_file_bytes) for name, part in parts]
        for one in (config, *(getattr(config, name) for name in config.sub_configs)):
            one.dtype = dtypes[0]  # engines choose theirs by it
        whole_config(config, folder).save_pretrained(folder)
        copy_unread_files(local_dir, family.unread_files, folder, base_model)
    return folder


def _hub_tensors(shards: Shards, names: HubNames, local_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor under its hub name, after checking that all are present."""
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
            f" {len(wrong)} do not belong there {sorted(wrong)[:3]}"
        )
    yield from ((name, shards.read(name)) for name in as_on_hub)
    yield from names.convert((name, shards.read(name)) for name in in_memory)


def upload(folder: Path, repository: str) -> str:
    """Upload a merged folder to the hub repository `OWNER/NAME`, new ones private, and return its address."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - only uploads need the client

    api = HfApi()
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # of several HTTP libraries
        raise OSError(
            f"{folder} was written but not uploaded to {repository} ({' '.join(str(error).split())}): check"
            " the name, the network and `hf auth login`"
        ) from error
    return str(address)
