# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM on CPU, next to those of weights in `cpu_weights`."""

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.workers.rollout.vllm import cpu_weights
from verl.workers.rollout.vllm.drafts import expand_to_tokens
from verl.workers.rollout.vllm.image_blocks import with_image_rows
from verl.workers.rollout.vllm.patches import replaceable

SHARED_MEMORY = Path("/dev/shm")


def apply_cpu_patches() -> None:
    """Apply all patches for CPUs, before an engine is built; safe to call again."""
    cpu_weights.keep_linear_weights()
    cpu_weights.read_plain_convolution_weights()
    cpu_weights.keep_expert_weights()
    name_shared_memory_per_run()
    skip_token_ranks()
    see_images_whole()
    find_kernels_despite_numba()
    sample_from_drafts()


def skip_token_ranks() -> None:
    """Stop vLLM from ranking each sampled token, which is unused."""
    # 4 % of the time on CPU with a vocabulary of 32,000
    sampler = replaceable("vllm.v1.sample.sampler", "batched_count_greater_than")
    sampler.batched_count_greater_than = lambda values, sampled: torch.zeros(len(values), dtype=torch.int64)


def see_images_whole() -> None:
    """Let tokens of an image attend to its later ones (Gemma 3), which vLLM does on GPUs only."""
    # log-probs of tiny models would differ from the trainer's by 0.1
    builder = replaceable("vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder", "build")
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
    dispatcher = replaceable("vllm.triton_utils.dispatcher", "_rebind_kernels")
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


def sample_from_drafts() -> None:
    """Give each token of a draft the temperature, top-p and top-k of its request, and allow no drafts."""
    # vLLM 0.32's kernel for CPUs writes into a copy and rounds to integers: drafts are accepted by logits
    # divided by whatever the memory held. Its top-k fails on steps in which no request has a draft.
    sampler = replaceable(
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
    communicator = replaceable(
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
