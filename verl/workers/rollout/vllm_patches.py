# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on vLLM's internals: its environment, and patches.

One function for each patch, with what breaks without it. Each asserts that what it replaces is there, so that
a new version of vLLM fails here and not later in the numbers. Checked with vLLM 0.26.0 and 0.32.0.
"""

import dataclasses
import functools
import importlib
import importlib.util
import os
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.distributed.device import is_gpu
from verl.models.families.audio.qwen3_omni import CHUNK_FRAMES, CHUNK_TOKENS
from verl.workers.rollout.generation_rng import preserved_rng
from verl.workers.rollout.vllm_drafts import expand_to_tokens
from verl.workers.rollout.vllm_image_blocks import with_image_rows
from verl.workers.rollout.vllm_omni import (
    positions_where_heard,
    positions_with_sound,
    tokens_with_sound,
    with_whole_chunk,
)

SUPPORTED = ((0, 26), (0, 33))  # from, and below
SHARED_MEMORY = Path("/dev/shm")
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where the trained weights are
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # processes share the cores as OMP_NUM_THREADS says
    "TORCH_COMPILE_DISABLE": "1",  # compiles small helpers for seconds at the first step otherwise
}
GPU_ENVIRONMENT = {
    # FlashInfer's wheels hold no compiled sampler: the first request with top-p or top-k would need nvcc, and
    # would draw from torch's CUDA generator. vLLM's own kernel takes a seed for each request instead.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # its all-reduce exchanges memory handles between processes, of which each sees one GPU only
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


def import_vllm(device: str) -> Any:
    set_environment(device)  # vLLM reads it on import
    with preserved_rng(device):  # packages draw random numbers when they are imported
        vllm = importlib.import_module("vllm")
        check_version(vllm.__version__)
        apply_patches(device)
    return vllm


def set_environment(device: str) -> None:
    """Set vLLM's environment variables, except for those set by the user."""
    # not the user's choice: with multiprocessing the engine would leave this process
    required = {"VLLM_ENABLE_V1_MULTIPROCESSING": ENVIRONMENT["VLLM_ENABLE_V1_MULTIPROCESSING"]}
    defaults = ENVIRONMENT | (GPU_ENVIRONMENT if is_gpu(device) else CPU_ENVIRONMENT)
    os.environ.update({name: os.environ.get(name, value) for name, value in defaults.items()} | required)
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in single.items():
        os.environ.setdefault(name, value)


def choose_device(device: str) -> None:
    """Have the next engine take this process's current GPU."""
    if is_gpu(device):
        os.environ["LOCAL_RANK"] = str(torch.get_device_module(device).current_device())


def check_version(found: str) -> None:
    """Raise `RuntimeError` if the version is outside of `SUPPORTED`."""
    lowest, above = SUPPORTED
    version = tuple(int(part) for part in found.split(".")[:2])
    if not lowest <= version < above:
        bounds = ">={}.{},<{}.{}".format(*lowest, *above)
        raise RuntimeError(f"vLLM {found} is not supported, {bounds} is: pip install 'vllm{bounds}'")


def apply_patches(device: str) -> None:
    """Patch vLLM before an engine is built; safe to call again."""
    inspect_models_here()
    keep_buffers_of_empty_models()
    keep_process_group()
    keep_classes_of_transformers()
    if is_gpu(device):
        return
    keep_linear_weights_on_cpu()
    read_plain_convolution_weights_on_cpu()
    keep_expert_weights_on_cpu()
    name_shared_memory_per_run()
    skip_token_ranks()
    see_images_whole_on_cpu()
    find_kernels_despite_numba()
    sample_from_drafts_on_cpu()


def _replaceable(module: str, *names: str) -> Any:
    """Import a module, or a class as `module:class`, and check that it has what is to be replaced."""
    path, _, class_name = module.partition(":")
    owner: Any = importlib.import_module(path)
    owner = getattr(owner, class_name) if class_name else owner
    missing = [name for name in names if not hasattr(owner, name)]
    assert not missing, f"vLLM's {module} has no {missing}, which must be replaced"
    return owner


def inspect_models_here() -> None:
    """Stop vLLM from inspecting new model classes in a subprocess, which takes 10 s."""
    # it does so to keep CUDA out of the calling process, which uses CUDA here and imports the class anyway
    registry = _replaceable("vllm.model_executor.models.registry", "_run_in_subprocess")
    registry._run_in_subprocess = lambda function: function()


def keep_buffers_of_empty_models() -> None:
    """Stop `load_format="dummy"` from overwriting buffers, which weight sync does not restore."""
    # vLLM 0.32 keeps mean and deviation of pixels as buffers of the vision tower: without them log-probs of
    # prompts with images are off by 3
    loader = _replaceable(
        "vllm.model_executor.model_loader.dummy_loader:DummyModelLoader",
        "load_weights", "_process_online_quant_layer",
    )  # fmt: skip
    fill: Any = importlib.import_module("vllm.model_executor.model_loader.weight_utils")
    layerwise: Any = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")

    def fill_parameters(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():  # to be quantized
                self._process_online_quant_layer(layer, info)
                continue
            for parameter in layer.parameters(recurse=False):
                fill.initialize_single_dummy_weight(parameter)

    loader.load_weights = fill_parameters


def keep_process_group() -> None:
    """Stop vLLM from destroying torch.distributed's default group when an engine or the process ends."""
    # training owns that group: it could not continue after `close`, and a process that has destroyed its
    # group itself would exit with a traceback
    core = _replaceable("vllm.v1.engine.core", "cleanup_dist_env_and_memory")
    core.cleanup_dist_env_and_memory = _end_model_parallel_groups


def _end_model_parallel_groups() -> None:
    if torch.distributed.is_initialized():
        importlib.import_module("vllm.distributed.parallel_state").destroy_model_parallel()


def keep_classes_of_transformers() -> None:
    """Stop vLLM from compiling models that it takes from transformers, for which it changes their classes."""
    # training uses the same classes: none of their models could be built, or would run, without vLLM's config
    backend = _replaceable(
        "vllm.model_executor.models.transformers.base:Base", "_decorate_cls_for_torch_compile"
    )
    backend._decorate_cls_for_torch_compile = _leave_class


def _leave_class(self: Any, *args: Any, **kwargs: Any) -> None:
    pass


def keep_times_of_frames() -> None:
    """Have vLLM write the times of a GLM-4.6V video's frames in tenths of a second, as its processor does."""
    # vLLM 0.32 rounds them down to seconds, so that the engine would read another prompt than training
    info = _replaceable(
        "vllm.model_executor.models.glm4_1v:Glm4vProcessingInfo", "_get_video_second_idx_glm46v"
    )
    info._get_video_second_idx_glm46v = _times_of_frames


def take_times_of_videos() -> None:
    """Have vLLM take the seconds of a temporal patch of Qwen2.5-Omni's videos from the prompt's options."""
    # its processor supposes two frames a second for all videos, whatever was sampled
    processor = _replaceable(
        "vllm.model_executor.models.qwen2_5_omni_thinker:Qwen2_5OmniThinkerMultiModalProcessor",
        "_postprocess_hf_mm_data",
    )
    theirs = processor._postprocess_hf_mm_data

    @functools.wraps(theirs)
    def with_times(self: Any, hf_data: Any, hf_kwargs: Any, processed_data: Any) -> Any:
        processed = theirs(self, hf_data, hf_kwargs, processed_data)
        if hf_kwargs.get("second_per_grid_ts"):
            processed["second_per_grid_ts"] = torch.tensor(hf_kwargs["second_per_grid_ts"])
        return processed

    if not hasattr(theirs, "__wrapped__"):
        processor._postprocess_hf_mm_data = with_times


def take_turns_of_videos_and_their_sound() -> None:
    """Have vLLM give Qwen2.5-Omni's videos with sound the tokens and positions that training has."""
    module = "vllm.model_executor.models.qwen2_5_omni_thinker"
    processor = _replaceable(
        f"{module}:Qwen2_5OmniThinkerMultiModalProcessor", "omni_get_updates_use_audio_in_video"
    )
    processor.omni_get_updates_use_audio_in_video = classmethod(tokens_with_sound)
    model = _replaceable(f"{module}:Qwen2_5OmniThinkerForConditionalGeneration", "get_mrope_input_positions")
    model.get_mrope_input_positions = positions_with_sound


def take_turns_of_qwen3_omni() -> None:
    """Have vLLM give Qwen3-Omni's videos with sound, and its audio, what training has."""
    module = "vllm.model_executor.models.qwen3_omni_moe_thinker"
    processor = _replaceable(
        f"{module}:Qwen3OmniMoeThinkerMultiModalProcessor", "get_updates_use_audio_in_video"
    )
    processor.get_updates_use_audio_in_video = tokens_with_sound
    model = _replaceable(f"{module}:Qwen3OmniMoeThinkerForConditionalGeneration", "get_mrope_input_positions")
    tower = _replaceable(f"{module}:Qwen3OmniMoeAudioEncoder", "forward")
    if not hasattr(tower.forward, "__wrapped__"):
        model.get_mrope_input_positions = positions_where_heard(model.get_mrope_input_positions)
        tower.forward = with_whole_chunk(tower.forward, CHUNK_FRAMES, CHUNK_TOKENS)


def size_frames_as_the_files_say() -> None:
    """Have the processors of omni models limit the pixels of frames as their video processors' files say."""
    # they have limits of their own for them, so that the engine would enlarge frames that training does not
    for name, kwargs in (
        ("qwen2_5_omni", "Qwen2_5OmniProcessorKwargs"),
        ("qwen3_omni_moe", "Qwen3OmniMoeProcessorKwargs"),
    ):
        module = importlib.import_module(f"transformers.models.{name}.processing_{name}")
        getattr(module, kwargs)._defaults["videos_kwargs"].pop("size", None)


def take_several_videos() -> None:
    """Have vLLM take prompts with several videos for GLM-4.xV, of which it allows one."""
    # its code for these models handles any number of them
    info = _replaceable("vllm.model_executor.models.glm4_1v:Glm4vProcessingInfo", "get_supported_mm_limits")
    info.get_supported_mm_limits = _any_number_of_media


def _any_number_of_media(self: Any) -> dict[str, int | None]:
    return {"image": None, "video": None}


def _times_of_frames(self: Any, metadata: dict[str, Any], total_frames: int) -> list[float]:
    """Return the time of the first frame of each temporal patch; frames were sampled before."""
    step = self.get_video_processor().temporal_patch_size
    return [index / metadata["fps"] for index in metadata["frames_indices"][::step]]


def slice_images_as_the_processor_does() -> None:
    """Have vLLM expand images of MiniCPM-V 4.7 by the largest number of slices that its processor makes."""
    # vLLM 0.32 takes that of the config, or 9, so that the engine would read another prompt than training
    info = _replaceable(
        "vllm.model_executor.models.minicpmv4_7:MiniCPMV4_7ProcessingInfo", "get_image_max_slice_num"
    )
    info.get_image_max_slice_num = _slices_of_processor


def _slices_of_processor(self: Any) -> int:
    return self.get_image_processor().max_slice_nums


def take_features_of_any_length(schema: str) -> None:
    """Let a schema `module:class` of vLLM hold features of images with different numbers of tokens."""
    hints = typing.get_type_hints(_replaceable(schema, "validate"), include_extras=True)
    (shape,) = hints["data"].__metadata__  # of (images, tokens, hidden size)
    shape.dynamic_dims.add(shape.dims[1])


def media_arguments() -> dict[str, Any]:
    """Arguments of `vllm.LLM` that leave the normalization of pixels to the processor, as in training."""
    # vLLM 0.32 normalizes videos with the mean and deviation of images: log-probs are off by 0.4 where the
    # two differ; vLLM 0.26 has no such argument
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    names = {entry.name for entry in dataclasses.fields(arguments)}
    return {"mm_device_do_normalize": False} if "mm_device_do_normalize" in names else {}


def keep_linear_weights_on_cpu() -> None:
    """Stop vLLM on CPU from repacking linear weights for oneDNN, which empties `layer.weight`."""
    # `load_weights` fails on emptied parameters, and vLLM's `reload_weights` is silently wrong with tied
    # embeddings; throughput is the same. Delete this when vLLM loads into repacked weights.
    utils = _replaceable("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm")
    utils.dispatch_cpu_unquantized_gemm = _use_plain_linear


def _use_plain_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = F.linear


def read_plain_convolution_weights_on_cpu() -> None:
    """Tell convolutions of linear attention that `keep_linear_weights_on_cpu` kept their weights."""
    # They expect the repacked weights of CPUs with AVX512-BF16: log-probs are off by 5.
    ops: Any = importlib.import_module("vllm._custom_ops")
    for name in ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"):
        function = getattr(ops, name, None)  # older versions have none
        if function is not None and getattr(function, "func", None) is not _convolve:
            setattr(ops, name, functools.partial(_convolve, function))


def _convolve(function: Callable[..., Tensor], *, weight: Tensor, **arguments: Any) -> Tensor:
    return function(weight=weight.flatten(1), **arguments | {"is_weight_packed": False})


def keep_expert_weights_on_cpu() -> None:
    """Stop vLLM on CPU from repacking experts' weights, which `load_weights` would overwrite."""
    # experts are computed one by one instead, slower than with vLLM's kernel
    experts = _replaceable(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts",
        "process_weights_after_loading",
        "apply",
    )
    experts.process_weights_after_loading = _keep_expert_weights
    experts.apply = _apply_experts


EXPERT_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}


def _keep_expert_weights(self: Any, layer: torch.nn.Module) -> None:
    self._use_zentorch = False


def _apply_experts(
    self: Any,
    output: Tensor,  # (N, hidden)
    hidden_states: Tensor,  # (N, hidden)
    w1: Tensor,  # gate and up projections, (experts, 2 * intermediate, hidden)
    w2: Tensor,  # down projections, (experts, hidden, intermediate)
    topk_weights: Tensor,  # (N, k)
    topk_ids: Tensor,  # (N, k)
    activation: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Write the weighted sum of the chosen experts' outputs."""
    activate = EXPERT_ACTIVATIONS.get(activation.value)
    if activate is None or self.w1_bias is not None:
        raise NotImplementedError(f"experts on CPU with activation {activation.value!r} or a bias")
    output.zero_()
    for expert in topk_ids.unique().tolist():
        rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
        part = F.linear(activate(gate) * up, w2[expert]) * topk_weights[rows, slots, None].to(output.dtype)
        output.index_add_(0, rows, part)


def see_images_whole_on_cpu() -> None:
    """Let tokens of an image attend to its later ones (Gemma 3), which vLLM does on GPUs only."""
    # log-probs of tiny models would differ from the trainer's by 0.1
    builder = _replaceable("vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder", "build")
    if hasattr(builder, "verl_original"):
        return
    build = builder.verl_original = builder.build

    @functools.wraps(build)
    def build_with_images(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, **options: Any
    ) -> Any:
        return build(self, common_prefix_len, with_image_rows(self, common_attn_metadata), **options)

    builder.build = build_with_images


def find_kernels_despite_numba() -> None:
    """Let vLLM on CPU replace its Triton kernels after numba, which finds drafts, was imported."""
    # vLLM 0.32 reads the attributes of every module, and llvmlite has an object that invents attributes
    if importlib.util.find_spec("vllm.triton_utils.dispatcher") is None:  # older versions replace none
        return
    dispatcher = _replaceable("vllm.triton_utils.dispatcher", "_rebind_kernels")
    theirs = dispatcher._rebind_kernels
    if hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def without_llvmlite(*arguments: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite.")}
        try:
            theirs(*arguments)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = without_llvmlite


def sample_from_drafts_on_cpu() -> None:
    """Give each token of a draft the temperature, top-p and top-k of its request, and allow no drafts."""
    # vLLM 0.32's kernel for CPUs writes into a copy and rounds to integers: drafts are accepted by logits
    # divided by whatever the memory held. Its top-k fails on steps in which no request has a draft.
    sampler = _replaceable(
        "vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens", "apply_sampling_constraints"
    )
    sampler.expand_batch_to_tokens = expand_to_tokens
    theirs = sampler.apply_sampling_constraints

    @functools.wraps(theirs)
    def of_some(logits: Tensor, *arguments: Any) -> Tensor:
        return theirs(logits, *arguments) if len(logits) else logits

    if not hasattr(theirs, "__wrapped__"):
        sampler.apply_sampling_constraints = of_some


def name_shared_memory_per_run() -> None:
    """Name vLLM's files in /dev/shm (tensor parallelism on CPU) by run, and unlink them once mapped."""
    # all runs would share the names of files that are left behind: the next run fails with "create shm in
    # SHMManager failed. errno: 17"
    communicator = _replaceable(
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed",
        "make_group_name",
        "_init_cpu_shm",
    )
    if not hasattr(communicator, "verl_originals"):
        communicator.verl_originals = (communicator.make_group_name, communicator._init_cpu_shm)
    make_group_name, init_cpu_shm = communicator.verl_originals

    def run_group_name(group: Any) -> str:
        return f"verl-{os.environ['MASTER_PORT']}-{make_group_name(group)}".replace("/", "")

    @functools.wraps(init_cpu_shm)
    def init_and_unlink(self: Any) -> int:
        if self.communicator.rank == 0:
            unlink_shared_memory(self.group_name)
        torch.distributed.barrier(self.communicator.device_group)
        handle = init_cpu_shm(self)  # ends with a barrier
        if self.communicator.rank == 0:
            unlink_shared_memory(self.group_name)
        return handle

    communicator.make_group_name = staticmethod(run_group_name)
    communicator._init_cpu_shm = init_and_unlink


def unlink_shared_memory(group_name: str) -> None:
    """Remove the files of a group; mapped memory stays."""
    for path in SHARED_MEMORY.iterdir():
        if path.name.startswith(f"{group_name}_"):
            path.unlink(missing_ok=True)


def skip_token_ranks() -> None:
    """Stop vLLM from ranking each sampled token, which is unused."""
    # 4 % of the time on CPU with a vocabulary of 32,000
    sampler = _replaceable("vllm.v1.sample.sampler", "batched_count_greater_than")
    sampler.batched_count_greater_than = _no_ranks


def _no_ranks(values: Tensor, sampled: Tensor) -> Tensor:
    return torch.zeros(len(values), dtype=torch.int64)


@contextmanager
def preserved_threads() -> Iterator[None]:
    """Restore `torch.set_num_threads`, which vLLM replaces by a no-op on CPU for the whole process."""
    function, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = function
        torch.set_num_threads(threads)


@dataclasses.dataclass
class LogitScale:
    """Sampling temperature of the running requests; all have the same."""

    temperature: float = 1.0


def scale_logits(model: Any) -> LogitScale:
    """Divide the logits of an engine's module by a temperature, read at every step from the result.

    vLLM reports log-probs either of the unscaled logits or after top-p, top-k and banned tokens, but training
    needs softmax(logits / temperature) over the whole vocabulary. So the engine samples at temperature 1 from
    scaled logits. Sampling is the same: top-p, top-k and min-p follow the temperature in vLLM as well.
    """
    scale = LogitScale()
    if getattr(model, "_suppress_token_ids", None):  # of the generation config; `banned` has them
        model._suppress_token_ids = None
    compute_logits: Callable[..., Tensor | None] = model.compute_logits

    @functools.wraps(compute_logits)
    def compute_scaled_logits(*args: Any, **kwargs: Any) -> Tensor | None:
        logits = compute_logits(*args, **kwargs)
        if logits is None:  # a rank that does not sample
            return None
        logits = logits.float()  # else the sampler does it, after a slower softmax in bfloat16
        return logits if scale.temperature == 1.0 else logits.div_(scale.temperature)

    model.compute_logits = compute_scaled_logits
    return scale


def check_sampling(vllm_config: Any) -> None:
    """Raise `RuntimeError` if vLLM would sample from other logits than those of `scale_logits`."""
    # vLLM 0.32 can give each tensor-parallel rank a part of the batch, by another method of the module
    if getattr(vllm_config.parallel_config, "enable_batch_sharded_sampling", False):
        raise RuntimeError(
            "vLLM's `enable_batch_sharded_sampling` is on: its log-probs would be those of unscaled logits"
        )


def drain(engine: Any) -> None:
    """Run the steps that vLLM's `LLMEngine` has still scheduled after all requests finished."""
    # on CUDA it schedules a step ahead of the results, and caches cannot be cleared until that one is done
    core = engine.engine_core.engine_core
    while core.batch_queue or core.scheduler.has_requests():
        engine.step()
