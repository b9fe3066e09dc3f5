# SPDX-License-Identifier: Apache-2.0
"""A model that no file describes is compared with its rollout engine before it is trained."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import ImageOps
from torch import nn

from tests.helpers.families import load_tiny
from tests.helpers.family_training import load_model
from tests.helpers.unnamed_families import UNNAMED
from tests.workers.rollout.reference import change_weights, hub_tensors, rollout_config, setup_of
from verl.config.rollout import RolloutConfig
from verl.data.media.decoded import DecodedMedia
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.models import tiny as tiny_models
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.engine_check import (
    Differences,
    check_engine,
    check_requests,
    differences,
    refusing_engine,
    sample,
)
from verl.workers.engine_host import EngineHost
from verl.workers.fsdp_worker import FSDPWorker
from verl.workers.rollout.engines import build_rollout_engine

ROOM = 1000
EXACT = Differences(1e-6, 1e-6)


@pytest.fixture(autouse=True, scope="module")
def recipes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "TINY_MODELS", tiny_models.TINY_MODELS | UNNAMED)
        yield


@pytest.fixture(scope="module", params=["llava_next", "idefics3"])
def tiny(request):
    return load_tiny(request.param)


@pytest.fixture(scope="module")
def media(tiny):
    return MediaLoader(tiny.processor, MediaOptions(0, 1 << 20), family=tiny.family)


@pytest.fixture(scope="module")
def requests(tiny, media):
    return check_requests(media, tiny.processor.tokenizer, ROOM, 0)


@pytest.fixture(scope="module")
def model(tiny):
    model = load_model(tiny, prepared=True)
    change_weights(model, seed=1)
    return model


@pytest.fixture(scope="module")
def engine(tiny, model):
    engine = build_rollout_engine(rollout_config(name="hf"), setup_of(tiny.folder))
    engine.sync_weights(hub_tensors(model))
    return engine


def test_an_engine_that_computes_the_same_passes(model, engine, requests, media):
    found = differences(model, sample(engine, requests, media), torch.device("cpu"))

    assert max(found) < 1e-5
    check_engine("hf", "llava", [torch.float32], found)


class Mirroring:
    """An engine that sees images from behind."""

    embeds_prompts = False

    def __init__(self, engine):
        self.engine = engine
        self.rng_state, self.set_rng_state = engine.rng_state, engine.set_rng_state

    def generate(self, requests, sampling):
        yield from self.engine.generate([self._mirrored(each) for each in requests], sampling)

    @staticmethod
    def _mirrored(request):
        if request.media is None:
            return request
        images = [ImageOps.mirror(image) for image in request.media.images]
        return replace(request, media=DecodedMedia(images))


def test_an_engine_that_reads_images_differently_is_refused_with_both_numbers(model, engine, requests, media):
    mirroring: Any = Mirroring(engine)
    found = differences(model, sample(mirroring, requests, media), torch.device("cpu"))

    assert found.with_images > 1e-3 > found.of_text
    with pytest.raises(
        NotImplementedError, match=r"differ by 0\.\d+ after images and by [\d.]+e-0\d in text, at most 0\.001"
    ):
        check_engine("vllm", "llava", [torch.float32], found)


def test_rounding_is_allowed_by_the_rougher_type():
    found = Differences(0.1, 0.05)

    check_engine("vllm", "llava", [torch.bfloat16, torch.float32], found)
    with pytest.raises(NotImplementedError):
        check_engine("vllm", "llava", [torch.float32, torch.float32], found)


@torch.no_grad()
def in_fp8(model):
    """A copy whose linear layers round weights and activations to FP8, with a scale for each row."""
    model = copy.deepcopy(model)
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            module.weight.copy_(rounded(module.weight))
            module.register_forward_pre_hook(lambda _module, given: (rounded(given[0]), *given[1:]))
    return model


def rounded(values):
    scales = values.abs().amax(-1, keepdim=True).clamp(min=1e-9) / torch.finfo(torch.float8_e4m3fn).max
    return (values / scales).to(torch.float8_e4m3fn).to(values.dtype) * scales


def test_a_quantized_engine_passes_that_reads_images_as_the_trainer_does(model, engine, requests, media):
    found = differences(in_fp8(model), sample(engine, requests, media), torch.device("cpu"))

    assert 0.02 < found.of_text < 0.25 and 0.02 < found.with_images < 0.25
    check_engine("vllm", "llava", [torch.bfloat16], found, is_quantized=True)


@pytest.mark.parametrize(
    ("found", "allowed"),
    [
        (Differences(0.3, 0.1), "at most 0.25 and 0.5 are allowed"),  # images cost 0.2 more than text
        (Differences(0.1, 0.6), "at most 0.75 and 0.5 are allowed"),
        (Differences(float("inf"), float("inf")), "at most inf and 0.5 are allowed"),
    ],
)
def test_of_a_quantized_engine_images_are_held_against_text(found, allowed):
    with pytest.raises(NotImplementedError, match=f"{allowed}.*quantization=null"):
        check_engine("vllm", "llava", [torch.bfloat16], found, is_quantized=True)
    check_engine("vllm", "llava", [torch.bfloat16], Differences(0.24, 0.1), is_quantized=True)
    with pytest.raises(NotImplementedError, match=r"at most 0\.15 and 0\.15 are allowed"):
        check_engine("vllm", "llava", [torch.bfloat16], Differences(0.24, 0.1))


def test_log_probs_that_are_no_numbers_are_refused(model, engine, requests, media):
    rows = sample(engine, requests, media)
    rows[0].response.log_probs[0] = float("nan")
    found = differences(model, rows, torch.device("cpu"))

    with pytest.raises(NotImplementedError, match="inf after images"):
        check_engine("hf", "llava", [torch.float32], found)


def test_the_random_numbers_of_the_engine_stay_those_of_the_run(engine, requests, media):
    before = engine.rng_state()
    sample(engine, requests, media)

    for name, state in engine.rng_state().items():
        assert torch.equal(torch.as_tensor(state), torch.as_tensor(before[name]))


def test_prompts_that_the_engine_cannot_take_are_left_out(tiny, media):
    def images(max_length, limit):
        found = check_requests(media, tiny.processor.tokenizer, max_length, limit)
        return [0 if each.media is None else len(each.media.images) for each in found]

    assert images(ROOM, 0) == [1, 1, 2, 0]
    assert images(ROOM, 1) == [1, 1, 0]
    assert images(len(tiny.processor.tokenizer.encode("What is in the picture?")) + 8, 0) == [0]


def test_an_engine_that_fails_on_images_is_refused_with_its_reason(requests, media):
    def fail(given, sampling):
        raise RuntimeError("no such image processor")
        yield

    engine: Any = SimpleNamespace(generate=fail, rng_state=dict, embeds_prompts=False)
    with pytest.raises(NotImplementedError, match=r"cannot sample .*no such image processor.*name=hf"):
        sample(engine, requests, media)


def test_an_engine_that_cannot_be_built_is_refused_if_the_model_is_only_tried():
    message = r"`vllm` cannot run this model \(no attribute\).*name=hf"
    with pytest.raises(NotImplementedError, match=message), refusing_engine("vllm", is_tried=True):
        raise AttributeError("no attribute")
    with pytest.raises(AttributeError), refusing_engine("vllm", is_tried=False):
        raise AttributeError("no attribute")


class CountingEngine:
    """Stands for the engine of a worker: records what it is told."""

    keeps_weights = takes_adapter = embeds_prompts = False
    dtype = torch.float32

    def __init__(self, engine):
        self.engine, self.calls = engine, []
        self.rng_state, self.set_rng_state = engine.rng_state, engine.set_rng_state

    def sync_weights(self, tensors):
        self.calls.append("sync")
        self.engine.sync_weights(tensors)

    def generate(self, requests, sampling):
        self.calls.append("generate")
        yield from self.engine.generate(requests, sampling)

    def wake(self):
        self.calls.append("wake")

    def sleep(self):
        self.calls.append("sleep")


@pytest.mark.parametrize("must_check", [True, False])
def test_the_first_sync_compares_and_syncs_again_and_later_ones_only_sync(
    must_check, tiny, model, engine, media
):
    worker: Any = FSDPWorker.__new__(FSDPWorker)
    worker.engine = counting = CountingEngine(engine)
    worker.policy = SimpleNamespace(
        model=model,
        tower=None,
        engine_tower=None,
        loaded=nullcontext,
        engine_tensors=lambda dtype, with_tower, stacks: hub_tensors(model),
    )
    worker.hub_names = SimpleNamespace(convert=lambda tensors: tensors, stacks={})
    worker.device = torch.device("cpu")
    host: Any = EngineHost.__new__(EngineHost)
    host.engine, host.media, host.tokenizer = counting, media, tiny.processor.tokenizer
    host.tower = None
    worker.host, host.continued = host, ContinuedSampling(counting)
    rollout = RolloutConfig(name="hf", dtype="fp32")
    worker.config = SimpleNamespace(
        rollout=rollout, actor=SimpleNamespace(fsdp=SimpleNamespace(mp_param_dtype="fp32"))
    )
    host.config, host.options = (
        worker.config,
        SimpleNamespace(max_prompt_length=ROOM - 1, max_response_length=1),
    )
    worker.must_check_engine, worker.tower_is_synced = must_check, False

    worker.sync_weights(0)
    worker.sync_weights(0)

    checked = ["sync", "wake", "generate", "sleep", "sync", "wake"] if must_check else ["sync", "wake"]
    assert counting.calls == [*checked, "sync", "wake"]
