# SPDX-License-Identifier: Apache-2.0
"""Offloading changes no number, and copies no byte that it need not; host and device are CPU memory."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from tests.helpers.checkpoints import save_shards
from tests.helpers.offloading import counted_copies, size_of, size_of_state
from tests.helpers.optimizers import (
    IN_BF16,
    MARKED_STRATEGIES,
    Parameters,
    needs_torchao,
    shard,
    update,
    whole_values,
)
from verl.checkpoint.sharded import load_shards
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig, OffloadConfig, OptimConfig
from verl.distributed.fsdp import make_mesh, sharded_parameters
from verl.distributed.offload import HostMemory, Offloader
from verl.models.monkey_patch import plain_attention
from verl.models.tiny import save_tiny_model
from verl.optim.build import build_optimizer
from verl.workers import trained_model
from verl.workers.sharded_model import ModelSetup, ShardedModel


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("one") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")  # its head is tied


def make_parts(strategy: str = "adamw", *, sharded: bool = True, frozen: tuple[str, ...] = ()) -> tuple:
    model = Parameters(torch.bfloat16 if strategy in IN_BF16 else torch.float32)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if sharded:
        shard(model, make_mesh(1, -1, "cpu"))
    return model, build_optimizer(model, OptimConfig(lr=1e-2, strategy=strategy)), None


def offloader_of(parts: tuple, *, weights: bool = True, state: bool = True, device: str = "cpu") -> Offloader:
    offloader = Offloader(
        parts[0], device, optimizer=parts[1], offloads_weights=weights, offloads_state=state
    )
    if device == "cpu":
        with offloader.loaded():
            pass
    return offloader


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if value.dim()]


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("strategy", MARKED_STRATEGIES)
def test_updates_are_those_of_weights_and_moments_that_stay_bit_for_bit(strategy, sharded):
    staying, moved = make_parts(strategy, sharded=sharded), make_parts(strategy, sharded=sharded)
    offloader = offloader_of(moved)
    before = whole_values(staying[0])

    for step in range(3):
        update(*staying, range(step, step + 1))
        with offloader.loaded():
            assert whole_values(moved[0]) == before
        with offloader.loaded(with_optimizer=True):
            update(*moved, range(step, step + 1))
        before = whole_values(staying[0])
        assert whole_values(moved[0]) == before

    for one, other in zip(moments(staying[1]), moments(moved[1]), strict=True):
        assert torch.equal(one, other)


def test_only_an_update_copies_to_the_host_and_only_what_it_trains():
    parts = make_parts(frozen=("experts", "norm"))
    offloader = offloader_of(parts)
    with offloader.loaded(with_optimizer=True):
        update(*parts, range(1))  # allocates the state
    weights, state = size_of(parts[0]), size_of_state(parts[1])
    trained = size_of(parts[0], trained_only=True)
    assert trained < weights

    with counted_copies(offloader) as reading, offloader.loaded():
        pass
    with counted_copies(offloader) as updating, offloader.loaded(with_optimizer=True):
        update(*parts, range(1, 2))

    assert (reading.to_device, reading.to_host) == (weights, 0)
    assert (updating.to_device, updating.to_host) == (weights + state, trained + state)


def test_each_tensor_keeps_one_place_in_host_memory():
    parts = make_parts()
    offloader = offloader_of(parts)
    seen = []
    for step in range(3):
        with offloader.loaded(with_optimizer=True):
            update(*parts, range(step, step + 1))
            inside = {param.to_local().data_ptr() for param in parts[0].parameters()}
        at_rest = {param.to_local().data_ptr() for param in parts[0].parameters()}
        seen.append((at_rest, {moment.to_local().data_ptr() for moment in moments(parts[1])}))
        assert not inside & at_rest

    assert seen[0] == seen[1] == seen[2]


def test_copies_to_the_host_are_complete_before_fsdp_pads_uneven_shards(monkeypatch):
    parts, seen = make_parts(), []
    offloader = offloader_of(parts)
    reset, offload = FSDPParam.reset_sharded_param, HostMemory.offload
    monkeypatch.setattr(FSDPParam, "reset_sharded_param", lambda one: (seen.append("pad"), reset(one)))
    monkeypatch.setattr("verl.distributed.offload.synchronize", lambda _: seen.append("wait"))
    monkeypatch.setattr(
        HostMemory, "offload", lambda *args, **names: (seen.append("copy"), offload(*args, **names))[1]
    )

    with offloader.loaded(with_optimizer=True):
        seen.clear()

    padded = [number for number, what in enumerate(seen) if what == "pad"]
    assert seen.index("copy") < seen.index("wait") < padded[0]
    assert "copy" not in seen[padded[0] : padded[-1]]


def test_an_empty_shard_has_a_place_of_its_own():
    memory, empty = HostMemory("cpu"), torch.empty(0, 4)

    place = memory.offload(("a",), empty, has_changed=True)

    assert place.shape == memory.load(("a",), place).shape == empty.shape


def test_the_device_copies_are_freed_after_the_block():
    parts = make_parts()
    offloader = offloader_of(parts)

    with offloader.loaded(with_optimizer=True):
        update(*parts, range(1))
        tensors = [*(param.to_local() for param in parts[0].parameters())]
        held = {tensor.untyped_storage()._cdata for tensor in tensors}
        del tensors
    gc.collect()

    # Other tests may leave sparse tensors, which have no storage.
    left = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.layout == torch.strided]
    assert not held & {one.untyped_storage()._cdata for one in left}


@pytest.mark.parametrize("strategy", MARKED_STRATEGIES)
def test_a_checkpoint_is_saved_and_loaded_while_everything_is_offloaded(strategy, tmp_path):
    unbroken, resumed = make_parts(strategy), make_parts(strategy)
    offloader = offloader_of(unbroken)
    for step in range(3):
        if step == 2:
            save_shards(tmp_path / "at_two", *unbroken)
        with offloader.loaded(with_optimizer=True):
            update(*unbroken, range(step, step + 1))

    other = offloader_of(resumed)
    with other.loaded(with_optimizer=True):
        update(*resumed, range(7, 8))  # weights and moments that the checkpoint replaces
    load_shards(tmp_path / "at_two", *resumed)
    other.settle()
    with other.loaded():
        pass
    with other.loaded(with_optimizer=True):
        update(*resumed, range(2, 3))

    assert whole_values(resumed[0]) == whole_values(unbroken[0])


def test_a_tensor_that_is_replaced_while_it_is_offloaded_is_the_one_that_is_loaded():
    parts = make_parts(sharded=False)
    offloader = offloader_of(parts)
    with offloader.loaded(with_optimizer=True):
        update(*parts, range(1))
    state = parts[1].state[parts[0].norm]
    new = state["exp_avg"] = torch.full_like(state["exp_avg"], 7.0)

    for _ in range(2):
        with offloader.loaded(with_optimizer=True):
            assert torch.equal(state["exp_avg"], new)


def test_loaded_moments_that_are_not_offloaded_follow_the_weights_to_the_device(tmp_path):
    parts = make_parts(sharded=False)
    update(*parts, range(1))
    offloader = offloader_of(parts, state=False, device="meta")

    offloader.settle()

    assert {moment.device.type for moment in moments(parts[1])} == {"meta"}
    assert {param.device.type for param in parts[0].parameters()} == {"cpu"}


def test_a_block_that_fails_still_leaves_the_device():
    parts = make_parts()
    offloader = offloader_of(parts)
    at_rest = {param.to_local().data_ptr() for param in parts[0].parameters()}

    with pytest.raises(ValueError, match="stop"), offloader.loaded(with_optimizer=True):
        raise ValueError("stop")

    assert at_rest == {param.to_local().data_ptr() for param in parts[0].parameters()}


@needs_torchao
def test_state_of_several_tensors_is_moved_tensor_by_tensor():
    from torchao.optim.subclass_8bit import OptimState8bit, get_qmap_signed

    numbers = torch.arange(512, dtype=torch.uint8).view(2, 256)
    table = torch.tensor(get_qmap_signed())
    model = nn.Linear(256, 2)
    optimizer = torch.optim.SGD(model.parameters())
    moment = OptimState8bit(numbers, torch.tensor([2.0, 3.0]), table, True, dtype=torch.float32)
    before, places = moment.dequantize(), []
    optimizer.state[model.weight] = {"moment": moment, "name": "not a tensor"}
    offloader = offloader_of((model, optimizer))

    for _ in range(2):
        with offloader.loaded(with_optimizer=True):
            moment = optimizer.state[model.weight]["moment"]
            assert moment.codes.data_ptr() not in places
            assert torch.equal(moment.dequantize(), before)
            moment.scale.mul_(2)
            before = before * 2
        moment = optimizer.state[model.weight]["moment"]
        places += [moment.codes.data_ptr()]
        assert torch.equal(moment.dequantize(), before)

    assert places[0] == places[1]


def sharded(folder, offload: OffloadConfig, fsdp: FSDPConfig | None = None, **options) -> ShardedModel:
    fsdp = fsdp or FSDPConfig(mp_param_dtype="fp32", torch_dtype="fp32")
    model = ModelConfig(model_path=str(folder), **options)
    setup = ModelSetup(torch.device("cpu"), 1, None)
    torch.manual_seed(0)  # of adapters
    return ShardedModel("actor", model, fsdp, offload, setup, optim=OptimConfig(lr=1e-2), training_steps=10)


def trained(model: ShardedModel, steps: int = 3) -> dict[str, torch.Tensor]:
    optimizer, ids = model.training[0], torch.arange(10, 30)[None]
    for _ in range(steps):
        with model.loaded(), torch.no_grad(), plain_attention(model.model):
            model.model(input_ids=ids, use_cache=False)
        with model.loaded(with_optimizer=True), plain_attention(model.model):
            logits = model.model(input_ids=ids, use_cache=False).logits
            logits.float().log_softmax(-1)[..., 7].mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return {name: param.full_tensor() for name, param in sharded_parameters(model.model).items()}


EVERYTHING = OffloadConfig(offload_params=True, offload_optimizer=True)


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4)], ids=["whole", "adapters"])
def test_a_tied_model_trains_alike_whether_it_is_offloaded_or_not(folder, monkeypatch, lora):
    staying = trained(sharded(folder, OffloadConfig(), lora=lora))
    monkeypatch.setattr(trained_model, "is_gpu", lambda device: True)
    model = sharded(folder, EVERYTHING, lora=lora)

    moved = trained(model)

    assert model.offloader.offloads_weights and model.offloader.offloads_state
    assert model.model.lm_head.weight is model.model.model.embed_tokens.weight
    assert moved.keys() == staying.keys()
    assert all(torch.equal(moved[name], staying[name]) for name in staying)


def test_on_cpu_nothing_is_moved_whatever_the_options_say(folder):
    model = sharded(folder, EVERYTHING)

    with counted_copies(model.offloader) as copied:
        trained(model, 1)

    assert (copied.to_device, copied.to_host) == (0, 0)
    assert not model.offloader.offloads_weights and not model.offloader.offloads_state


def test_moments_stay_with_weights_that_fsdp_keeps_in_host_memory(folder, monkeypatch):
    monkeypatch.setattr(trained_model, "is_gpu", lambda device: True)
    fsdp = FSDPConfig(mp_param_dtype="fp32", enable_cpu_offload=True)
    model = sharded(folder, EVERYTHING, fsdp)

    trained(model, 1)
    with counted_copies(model.offloader) as copied:
        trained(model, 1)

    assert (copied.to_device, copied.to_host) == (0, 0)


def test_no_weight_stays_gathered_after_a_pass_without_gradients(folder):
    model = sharded(folder, OffloadConfig())

    with model.loaded(), torch.no_grad(), plain_attention(model.model):
        model.model(input_ids=torch.arange(10, 30)[None], use_cache=False)
        inside = [isinstance(param, DTensor) for param in model.model.parameters()]

    assert not all(inside), "FSDP leaves the root's weights gathered"
    assert all(isinstance(param, DTensor) for param in model.model.parameters())


def test_host_memory_is_locked_page_by_page_and_takes_no_more_than_its_tensors(monkeypatch):
    locked: dict[int, int] = {}

    def register(start: int, size: int, flags: int) -> int:
        locked[start] = size
        return 0

    def unregister(start: int) -> int:
        del locked[start]
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = HostMemory("cuda")

    memory.reserve({("a",): torch.ones(5000), ("b",): torch.ones(3, dtype=torch.bfloat16)})
    ((start, size),) = locked.items()
    place = memory.offload(("a",), torch.ones(5000), has_changed=True)

    assert start % 4096 == 0 and size == 20480, "20,032 and 64 bytes, in whole pages"
    assert start <= place.data_ptr() < start + size and place.tolist() == [1.0] * 5000
    del memory, place
    gc.collect()
    assert not locked


def test_memory_that_cuda_cannot_lock_is_an_error_that_names_the_options(monkeypatch):
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    with pytest.raises(RuntimeError, match=r"cannot lock 0.0 GiB .* \(error 2\).*offload_params=false"):
        HostMemory("cuda").reserve({("a",): torch.ones(5)})
