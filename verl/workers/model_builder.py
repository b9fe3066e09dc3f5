# SPDX-License-Identifier: Apache-2.0
"""Build a sharded model from a folder in Hugging Face format, ready for packed forward passes.

Every rank builds the model on the meta device, shards it, and allocates its shards only. Rank 0 reads and
broadcasts some rows of a tensor at a time, so host memory holds a few blocks, or an expert of a layer.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from verl.config.model import FSDPConfig, ModelConfig
from verl.distributed.fsdp import offload_policy, shard_model, sharded_parameters, torch_dtype
from verl.distributed.tensor_parallel import tensor_axis
from verl.models.divided_layers import divide_layers, tensor_option
from verl.models.families.registry import load_config, register_family
from verl.models.fp8_weights import drop_quantization, stored_block, weights_in_fp8
from verl.models.hub_names import HubNames, auto_class, meta_model
from verl.models.lora import set_adapter
from verl.models.lora_weights import AdapterConfig, read_adapter, read_adapter_config
from verl.models.mixture.experts import check_divisible, divide_over_ranks, expert_option
from verl.models.monkey_patch import compile_blocks, recompute_blocks
from verl.models.registry import prepare_model
from verl.models.scalar_head import (
    SCORE_BIAS,
    SCORE_WEIGHT,
    drop_score_bias,
    has_score_bias,
    is_scalar,
    make_scalar,
    start_score,
)
from verl.models.tiled_mlp import tile_mlps
from verl.models.trainable import select_trainable
from verl.utils.rank_logger import get_logger
from verl.workers.stored_weights import stored_rows, stored_value, weights_in_files

logger = get_logger(__name__)

BLOCK_BYTES = 1 << 26  # sent at once, if in float32

T = TypeVar("T")


def build_model(
    model: ModelConfig,
    fsdp: FSDPConfig,
    *,
    mesh: DeviceMesh,  # from `make_mesh`
    device: torch.device | str,  # where the forward passes run
    trainable: bool,
    head: str = "causal",
    option: str = "worker.actor.model",  # path of `model` in the config, for errors
) -> PreTrainedModel:
    """Build, shard and load a model; collective over all ranks.

    With `head="scalar"` for values or scores, a trainable model may be loaded from files of a causal or
    vision-language model: then the score starts at zero. Weights are kept in float32 unless
    `fsdp.torch_dtype` is set; in bfloat16 with adapters or if not trainable.

    Raises:
        FileNotFoundError: The folder has no config or no weights that can be read.
        ValueError: `override_config` names an unknown key, or the files are of a model with another head.
    """
    config = load_model_config(model, option)
    _check_head(config, head, trainable, f"`{option}.model_path` ({model.model_path})")
    if head == "scalar":
        make_scalar(config, has_bias=True)
    adapter = adapter_config(model, option) if trainable else None
    dtype = weights_dtype(fsdp, is_whole=trainable and adapter is None)
    empty = meta_model(config, dtype, model.trust_remote_code)
    assert model.model_path is not None, "required when the config was checked"
    empty.generation_config = load_generation_config(model.model_path, config)
    prepare_model(empty)
    source = on_rank0(lambda: _read_model(model, config, dtype, trainable, option))
    if head == "scalar":
        _agree_on_bias(empty, source)
    if trainable:
        select_trainable(empty, model, option, adapter)
        if adapter is not None:
            on_rank0(lambda: _adapt_source(source, model, adapter, option))
        if model.recomputed:
            recompute_blocks(empty, model.recomputed)
    else:
        empty.requires_grad_(False)
    if model.compile_blocks is True:
        compile_blocks(empty)
    if model.runs_tiles(is_trained=trainable):
        tile_mlps(empty)
    experts, expert_mesh = [], None
    if (axis := tensor_axis(mesh)) is not None:
        divide_layers(empty, axis, tensor_option(option))
    if fsdp.expert_parallel_size > 1:
        check_divisible(empty, fsdp.expert_parallel_size, expert_option(option))
        experts, expert_mesh = divide_over_ranks(empty, mesh, fsdp.expert_parallel_size)
    shard_model(empty, mesh, fsdp, experts=experts, expert_mesh=expert_mesh)
    fill_model(empty, source, fsdp, mesh, torch.device(device), torch_dtype(fsdp.mp_buffer_dtype))
    empty.train(trainable)
    return empty


def load_model_config(model: ModelConfig, option: str = "worker.actor.model") -> PreTrainedConfig:
    """Load the transformers config of the model's files, with `override_config` applied."""
    assert model.model_path is not None, "required when the config was checked"
    register_family(model.family)
    return read_config(
        model.model_path,
        trust_remote_code=model.trust_remote_code,
        overrides=model.override_config,
        option=option,
    )


def read_config(
    path: str, *, trust_remote_code: bool, overrides: Mapping[str, Any], option: str = "worker.actor.model"
) -> PreTrainedConfig:
    """Load the transformers config of a folder or hub model, with overrides applied.

    It describes whole weights, also if those in the files are in FP8.
    """
    try:
        config = load_config(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, StrictDataclassError) as error:  # the last for values that do not fit
        raise FileNotFoundError(
            f"`{option}.model_path` ({path}): no model config can be read there: {error}"
        ) from error
    try:
        stored_block(path)
    except ValueError as error:
        raise ValueError(f"`{option}.model_path` ({path}): {error}") from error
    drop_quantization(config)
    apply_overrides(config, overrides, f"{option}.override_config")
    return config


def _check_head(config: PreTrainedConfig, head: str, trainable: bool, where: str) -> None:
    # a reward model cannot be a policy, and must have a single score: a new head would score everything zero
    if not is_scalar(config):
        if head == "scalar" and not trainable:
            raise ValueError(
                f"{where} must be a sequence-classification model with one label, got"
                f" {config.architectures}: use a reward model"
            )
        return
    name = ", ".join(config.architectures or ())
    if head == "causal":
        raise ValueError(f"{where} is a {name}, which cannot generate text: use a language model")
    if config.num_labels != 1:
        raise ValueError(
            f"{where} is a {name} with {config.num_labels} labels, one is needed: use a model that gives a"
            " single score"
        )


def apply_overrides(
    config: PreTrainedConfig, overrides: Mapping[str, Any], path: str = "worker.actor.model.override_config"
) -> None:
    """Set options of a transformers config; a dictionary goes into the nested config of that name.

    Raises:
        ValueError: The config has no such option.
    """
    for key, value in overrides.items():
        if not hasattr(config, key):
            near = difflib.get_close_matches(key, list(config.to_dict()), n=1)
            hint = f"did you mean `{path}.{near[0]}`?" if near else f"known are {sorted(config.to_dict())}"
            if hasattr(config, "text_config") and hasattr(config.text_config, key):
                hint = f"the language model has it: set `{path}.text_config.{key}`"
            raise ValueError(f"`{path}.{key}` is no option of {type(config).__name__}: {hint}")
        if isinstance(value, dict) and isinstance(getattr(config, key), PreTrainedConfig):
            apply_overrides(getattr(config, key), value, f"{path}.{key}")
        else:
            setattr(config, key, value)


def load_generation_config(path: str, config: PreTrainedConfig) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_model_config(config)


def end_token_ids(tokenizer: Any, generation_config: Any) -> frozenset[int]:
    """Tokens that end a response: the tokenizer's and the generation config's, as in vLLM."""
    ends = generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return frozenset(end for end in [tokenizer.eos_token_id, *ends] if end is not None)


def adapter_config(model: ModelConfig, option: str) -> AdapterConfig | None:
    """The adapter of a trained model, from `lora` or from the adapter that it starts with; None without.

    Raises:
        ValueError: `lora.path` holds no adapter of a supported kind, or one of another rank than `lora.rank`.
    """
    lora = model.lora
    if not lora.is_used:
        return None
    if lora.path is None:
        assert model.model_path is not None, "required when the config was checked"
        if lora.use_dora and stored_block(model.model_path) is not None:
            raise ValueError(
                f"`{option}.lora.use_dora` must be false for weights in FP8, whose norms it needs at the"
                f" start: use a release of `{option}.model_path` ({model.model_path}) in bfloat16"
            )
        return AdapterConfig(
            rank=lora.rank,
            alpha=lora.alpha,
            target_modules=lora.target_modules or "",
            exclude_modules=lora.exclude_modules,
            use_rslora=lora.use_rslora,
            use_dora=lora.use_dora,
            base=model.model_path,
            target_parameters=tuple(lora.target_parameters),
        )
    saved = read_adapter_config(Path(lora.path), f"`{option}.lora.path` ({lora.path})")
    if lora.rank not in (0, saved.rank):
        raise ValueError(
            f"`{option}.lora.rank` ({lora.rank}) must be that of the adapter in `{option}.lora.path`,"
            f" {saved.rank}: leave it at 0"
        )
    return replace(saved, base=model.model_path)


def weights_dtype(fsdp: FSDPConfig, *, is_whole: bool) -> torch.dtype:
    """The dtype of stored weights; `is_whole` if the model is trained without adapters."""
    return torch_dtype(fsdp.torch_dtype or ("fp32" if is_whole else "bf16"))


def on_rank0(function: Callable[[], T]) -> T | None:
    """Call a function on rank 0 and return its result there; its error is raised on all ranks.

    Else the others would wait in the next collective.
    """
    result: T | None = None
    problems: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            result = function()
        except (FileNotFoundError, ValueError) as error:
            problems = [error]
    dist.broadcast_object_list(problems, src=0)
    if problems[0] is not None:
        raise problems[0]
    return result


def _adapt_source(
    source: PreTrainedModel | None, model: ModelConfig, adapter: AdapterConfig, option: str
) -> None:
    """Add adapters with their initial values to the source model."""
    assert source is not None, "rank 0 has read it"
    select_trainable(source, model, option, adapter)
    if model.lora.path is not None:
        where = f"`{option}.lora.path` ({model.lora.path})"
        hub = HubNames(source.config, model.trust_remote_code)
        set_adapter(source, read_adapter(Path(model.lora.path), where), hub.of_module, where)


def fill_model(
    model: nn.Module,
    source: nn.Module | None,
    fsdp: FSDPConfig,
    mesh: DeviceMesh,
    device: torch.device,
    buffer_dtype: torch.dtype | None = None,  # None keeps that of each buffer
) -> None:
    """Allocate a sharded model on the meta device and copy the values of rank 0's source model."""
    given = {} if source is None else dict(source.named_parameters()) | dict(source.named_buffers())
    stays_on_cpu = isinstance(offload_policy(fsdp, mesh), CPUOffloadPolicy)
    model.to_empty(device="cpu" if stays_on_cpu else device)
    for name, param in sharded_parameters(model).items():
        _fill_shard(given.get(name), param, device)
    for name, buffer in list(model.named_buffers()):  # non-persistent ones too
        value = given.get(name)
        read = None if value is None else partial(stored_value, value)
        whole = _from_rank0(read, buffer.shape, buffer.dtype, device)
        if whole.is_floating_point():
            whole = whole.to(buffer_dtype)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, whole)
    _check_nothing_is_empty(model)


def _read_model(
    model: ModelConfig, config: PreTrainedConfig, dtype: torch.dtype, trainable: bool, option: str
) -> PreTrainedModel:
    """Open the files of a model: its parameters have the values that `stored_rows` reads."""
    where = f"`{option}.model_path` ({model.model_path})"
    try:
        assert model.model_path is not None, "required when the config was checked"
        casts = trainable and model.lora.is_used  # adapters begin in their dtype
        with weights_in_files(casts=casts), weights_in_fp8(model.model_path):
            source, report = auto_class(config).from_pretrained(
                model.model_path,
                config=config,
                dtype=dtype,
                trust_remote_code=model.trust_remote_code,
                output_loading_info=True,
            )
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise FileNotFoundError(
            f"{where}: the weights cannot be read ({error}): download or export the model again"
        ) from error
    missing = set(report["missing_keys"])
    if is_scalar(config):
        _init_score(source, missing, trainable, where)
        missing -= {SCORE_WEIGHT, SCORE_BIAS}
    if missing:
        raise FileNotFoundError(
            f"{where}: {len(missing)} weights are missing, for example {sorted(missing)[:3]}: use a complete"
            " model"
        )
    if report["unexpected_keys"]:
        logger.warning(
            "weights that the model does not have are ignored: names=%s", sorted(report["unexpected_keys"])
        )
    return source


def _init_score(source: PreTrainedModel, missing: set[str], trainable: bool, where: str) -> None:
    """Start a missing score at zero and drop a missing bias."""
    if SCORE_WEIGHT in missing:
        if not trainable:
            raise FileNotFoundError(f"{where} holds no `{SCORE_WEIGHT}`: use a trained reward model")
        start_score(source)
        logger.info("the score starts at zero, the files have none: %s", where)
    elif SCORE_BIAS in missing:
        drop_score_bias(source)


def _agree_on_bias(model: PreTrainedModel, source: PreTrainedModel | None) -> None:
    # every rank drops the bias of its score if rank 0 found none in the files
    has_bias = [source is not None and has_score_bias(source)]
    dist.broadcast_object_list(has_bias, src=0)
    if not has_bias[0]:
        drop_score_bias(model)


@torch.no_grad()
def _fill_shard(source: Tensor | None, param: nn.Parameter, device: torch.device) -> None:
    """Send a weight from rank 0 in blocks of rows, of which each rank keeps its part."""
    assert isinstance(param, DTensor), "made by fully_shard"
    local, own, columns = param.to_local(), _own_places(param, 0, device), slice(None)
    if any(place.is_shard(1) for place in param.placements):
        columns = _own_places(param, 1, device)
    rows = max(1, BLOCK_BYTES * len(param) // (torch.float32.itemsize * param.numel()))
    for start in range(0, len(param), rows):
        size = torch.Size([min(rows, len(param) - start), *param.shape[1:]])
        read = None if source is None else partial(stored_rows, source, start, start + size[0])
        block = _from_rank0(read, size, param.dtype, device)
        [kept] = torch.where((own >= start) & (own < start + rows))
        part = block[own[kept] - start][..., columns]
        local.index_copy_(0, kept.to(local.device), part.to(local.device))
        del block, part  # before the next ones are made


def _from_rank0(
    read: Callable[[], Tensor] | None, size: torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    whole = torch.empty(size, dtype=dtype, device=device) if read is None else read().to(device).to(dtype)
    dist.broadcast(whole, src=0)
    return whole


def _own_places(param: DTensor, dim: int, device: torch.device) -> Tensor:
    """(rows or columns of this rank,) int64: their indices; shards of divided parts are not contiguous."""
    every = torch.arange(param.shape[dim], device=device)
    places = [place if _divides(place, dim) else Replicate() for place in param.placements]
    places = [Shard(0) if place.is_shard(dim) else place for place in places] if dim else places
    # without a source rank nothing is sent: each rank takes its own shard
    return distribute_tensor(every, param.device_mesh, places, src_data_rank=None).to_local()


def _divides(place: Placement, dim: int) -> bool:
    return getattr(place, "dim", None) == dim


def _check_nothing_is_empty(model: nn.Module) -> None:
    # a tensor that is neither parameter nor buffer stays on the meta device
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise NotImplementedError(
                    f"{type(model).__name__} keeps a tensor outside its parameters and buffers,"
                    f" `{name}.{key}`, which loading cannot fill"
                )
