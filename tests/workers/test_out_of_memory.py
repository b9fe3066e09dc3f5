# SPDX-License-Identifier: Apache-2.0
"""An error of memory says in which phase it happened, and which option to set to what."""

import traceback
from dataclasses import replace

import pytest
import torch

from verl.config.ppo import PPOConfig
from verl.config.schema import list_options
from verl.config.sft import SFTConfig
from verl.config.worker import WorkerConfig
from verl.workers.base_worker import ModelWorker
from verl.workers.out_of_memory import MICRO_BATCH_OPTIONS, explained_out_of_memory

TORCH = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
CUMEM = RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62")
NCCL = RuntimeError("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'")
CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
HOST = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 bytes.")
START = ValueError("Free memory on device cuda:0 (20.0/79.1 GiB) on startup is less than desired GPU memory")
CACHE = ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`")

SHARE = "set `worker.rollout.gpu_memory_utilization` to"
WORKER = WorkerConfig()
NAMES = {entry.key for cls in (PPOConfig, SFTConfig) for entry in list_options(cls)}


def changed(section: str, **options) -> WorkerConfig:
    return replace(WORKER, **{section: replace(getattr(WORKER, section), **options)})


def message_of(error: Exception, phase: str, worker=WORKER) -> str:
    with pytest.raises(type(error)) as raised, explained_out_of_memory(phase, worker):
        raise type(error)(*error.args)
    return "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("phase", MICRO_BATCH_OPTIONS)
def test_a_pass_that_does_not_fit_names_its_micro_batch_size_and_half_of_it(phase):
    option = MICRO_BATCH_OPTIONS[phase]
    section, name = option.split(".")[1:]
    worker = changed(section, **{name: 6})

    assert f"{phase}: set `{option}` to 3 (now 6)" in message_of(TORCH, phase, worker)
    assert option in NAMES


@pytest.mark.parametrize("error", [TORCH, CUMEM, NCCL, CUBLAS, START], ids=lambda error: error.args[0][:12])
@pytest.mark.parametrize("phase", ["init_model", "sync_weights", "gen"])
def test_the_engine_gives_up_a_tenth_of_the_device_whoever_found_it_full(error, phase):
    worker = changed("rollout", gpu_memory_utilization=0.6)

    assert f"{phase}: {SHARE} 0.5 (now 0.6), or set `worker.actor.offload" in message_of(error, phase, worker)


def test_a_share_without_room_for_the_cache_is_raised():
    worker = changed("rollout", gpu_memory_utilization=0.6)

    assert f"init_model: {SHARE} 0.7 (now 0.6), or set" in message_of(CACHE, "init_model", worker)


def test_host_memory_of_a_pass_on_cpu_depends_on_the_same_option():
    worker = changed("actor", micro_batch_size_per_device_for_update=4)

    assert "micro_batch_size_per_device_for_update` to 2 (now 4)" in message_of(HOST, "update_actor", worker)


def test_options_that_are_set_already_are_not_advised_again():
    actor = replace(
        WORKER.actor,
        micro_batch_size_per_device_for_update=1,
        offload=replace(WORKER.actor.offload, offload_params=True, offload_optimizer=True),
        model=replace(WORKER.actor.model, enable_gradient_checkpointing=True),
    )

    message = message_of(TORCH, "update_actor", replace(WORKER, actor=actor))

    assert "update_actor: set `worker.critic.offload.offload_optimizer` to true (now false)" in message
    assert "`worker.actor" not in message


def test_fine_tuning_is_advised_options_that_it_has():
    message = message_of(TORCH, "load_checkpoint", SFTConfig().worker)

    assert "load_checkpoint: set `worker.actor.offload.offload_optimizer` to true" in message


def test_other_errors_are_unchanged():
    with pytest.raises(ValueError, match=r"^x$") as raised, explained_out_of_memory("old", WORKER):
        raise ValueError("x")
    assert not hasattr(raised.value, "__notes__")


class Failing(ModelWorker):
    """A worker whose calls run out of memory."""

    def __init__(self) -> None:
        self.config, self.device = WORKER, torch.device("cpu")

    def _show(self, phase: str) -> None: ...

    def sync(self) -> None:
        raise RuntimeError(*CUMEM.args)

    def sample(self):
        yield 1
        raise RuntimeError(*CUMEM.args)


def test_calls_and_streams_of_a_worker_are_explained():
    for call in (
        lambda: Failing().execute("sync", "sync_weights"),
        lambda: list(Failing().stream("sample", "gen")),
        lambda: Failing().drain("sample", "gen"),
    ):
        with pytest.raises(RuntimeError) as raised:
            call()
        assert any(SHARE in note for note in raised.value.__notes__)
