# SPDX-License-Identifier: Apache-2.0
"""Frozen models stay in their files, and each model is moved once in a phase.

On the CPU, as if it were a GPU: tensors of files go through the staging buffer into memory of their own.
"""

import re
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

from tests.diffusion.models import LENGTH, PROMPTS
from tests.diffusion.test_update import CPU, policy_of
from tests.helpers.distributed import run_distributed
from tests.helpers.picture_memory import MIB, measure_picture_starts, save_larger_sd3
from verl.config.model import LoraConfig
from verl.diffusion import frozen_parts
from verl.diffusion.frozen_parts import FrozenParts, StagingBuffer
from verl.diffusion.prompts import PromptEncoder
from verl.diffusion.stored_parts import open_pipeline, stored_part
from verl.diffusion.worker import DiffusionWorker
from verl.protocol import DataProto, objects
from verl.utils.weight_files import save_weights

TEXTS = ["a red picture", "the color blue", "a dark wall"]


def encoders_of(pipeline):
    names = [name for name in pipeline.components if name.startswith("text_encoder")]
    return [getattr(pipeline, name) for name in names if getattr(pipeline, name) is not None]


def files_of_mapped_memory(tensors):
    """Return the file that each tensor is mapped from, None if it is from none."""
    maps = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, last = line.split(maxsplit=5)
        maps.append((*(int(end, 16) for end in span.split("-")), last))
    places = [tensor.data_ptr() for tensor in tensors]
    found = [next((last for start, stop, last in maps if start <= at < stop), "") for at in places]
    return [file if file.endswith(".safetensors") else None for file in found]


@pytest.fixture
def as_gpu(monkeypatch):
    monkeypatch.setattr(frozen_parts, "is_gpu", lambda device: True)


@pytest.fixture
def half_folder(model_folder, tmp_path):
    """The same pipeline whose models are stored in float16."""
    DiffusionPipeline.from_pretrained(model_folder, dtype=torch.float16).save_pretrained(tmp_path)
    return tmp_path


def test_frozen_models_have_the_values_of_from_pretrained_while_they_are_loaded(half_folder, as_gpu):
    expected = DiffusionPipeline.from_pretrained(
        half_folder, dtype={"vae": torch.float32, "default": torch.bfloat16}
    )
    pipeline = open_pipeline(half_folder, torch.bfloat16, torch.bfloat16)
    pairs = [
        (FrozenParts(encoders_of(pipeline), torch.bfloat16, CPU), encoders_of(expected)),
        (FrozenParts([pipeline.vae], torch.float32, CPU), [expected.vae]),
    ]

    for parts, others in pairs:
        with parts.loaded():
            for model, other in zip(parts.models, others, strict=True):
                found, wanted = model.state_dict(), other.state_dict()
                assert found.keys() == wanted.keys()
                for name, tensor in found.items():
                    assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name
        weights = [param for model in parts.models for param in model.parameters()]
        assert torch.float16 in {param.dtype for param in weights}
        assert all(files_of_mapped_memory(weights))


def test_on_the_cpu_only_weights_of_another_data_type_leave_their_files(sd3_folder):
    same, other = (open_pipeline(sd3_folder, torch.float32, torch.float32) for _ in range(2))

    FrozenParts(encoders_of(same), torch.float32, CPU)
    FrozenParts(encoders_of(other), torch.bfloat16, CPU)

    assert all(files_of_mapped_memory(weight for each in encoders_of(same) for weight in each.parameters()))
    weights = [weight for each in encoders_of(other) for weight in each.parameters()]
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    assert not any(files_of_mapped_memory(weights))


def test_tied_weights_stay_tied_and_are_copied_once(as_gpu):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self._keep_in_fp32_modules = None

    model = Tied()
    before = model.first.weight

    with FrozenParts([model], torch.bfloat16, CPU).loaded():
        assert model.first.weight is model.second.weight is not before
        assert model.first.weight.dtype == torch.bfloat16
    assert model.first.weight is model.second.weight is before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 96), (1000,)])
def test_tensors_of_any_size_pass_through_a_small_buffer(shape, dtype):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    buffer = StagingBuffer(CPU, size=256)

    found = [buffer.copy(tensor, dtype) for _ in range(3)]

    assert all(each.dtype == dtype and torch.equal(each, tensor.to(dtype)) for each in found)


def test_files_that_lack_weights_or_have_others_are_named(sd3_folder, tmp_path):
    config = (sd3_folder / "vae" / "config.json").read_text()
    for name, channels in (("few", 16), ("wide", 32)):
        (tmp_path / name).mkdir()
        new = re.sub(r"(\"block_out_channels\": \[)\s*16,\s*16", rf"\1 {channels}, {channels}", config)
        (tmp_path / name / "config.json").write_text(new)
    tensors = dict(stored_part(sd3_folder / "vae", torch.float32).state_dict())
    save_weights(tensors, tmp_path / "wide" / "diffusion_pytorch_model.safetensors")
    tensors.pop("decoder.conv_out.bias")
    save_weights(tensors, tmp_path / "few" / "diffusion_pytorch_model.safetensors")

    with pytest.raises(FileNotFoundError, match=r"lacks 1 weights, for example .'decoder.conv_out.bias"):
        stored_part(tmp_path / "few", torch.float32)
    with pytest.raises(ValueError, match="do not fit its config"):
        stored_part(tmp_path / "wide", torch.float32)


def moves_on_rank(rank, world_size, folder):
    """Count how often each model is loaded, by phase; the first rank has more prompts than the second."""
    policy, forward, engine = policy_of(folder, world_size, rank=4, sampled=1)
    counts = Counter()

    def counted(name, loaded):
        @contextmanager
        def count(*args, **kwargs):
            counts[name] += 1
            with loaded(*args, **kwargs):
                yield

        return count

    forward.prompts.loaded = counted("text encoders", policy.text_encoders.loaded)
    policy.vae.loaded = counted("vae", policy.vae.loaded)
    policy.loaded = counted("policy", policy.loaded)
    texts = TEXTS[rank:]
    prompts = DataProto.from_dict({"row": torch.arange(len(texts))}, {"uid": texts, "prompt_text": texts})
    calls = len(list(engine.generate(prompts, 2, forward.schedule)))
    sampling, _ = dict(counts), counts.clear()

    worker = object.__new__(DiffusionWorker)
    worker.policy, worker.forward = policy, forward
    worker.options = type("Options", (), {"device": "cpu"})

    class Actor:
        def update(self, batch, *_, **__):
            for text in batch.non_tensor_batch["prompt_text"]:
                forward.conditions([text])
            return type("Updated", (), {"metrics": {}})

    worker.actor = Actor()
    others = DataProto.from_dict({"row": torch.arange(3)}, {"prompt_text": objects(["red", "blue", "green"])})
    worker.update_actor(others, 0.0, 0)
    return calls, sampling, dict(counts)


@pytest.mark.heavy
def test_each_model_is_loaded_once_in_a_phase_of_many_micro_batches(sd3_folder):
    once = {"text encoders": 1, "vae": 1, "policy": 1}

    for calls, sampling, update in run_distributed(moves_on_rank, 2, sd3_folder):
        assert calls == 3 * 2
        assert sampling == once
        assert update == {"text encoders": 1, "policy": 1}


def test_conditions_of_a_phase_are_kept_until_the_next_whatever_their_size(sd3, monkeypatch):
    monkeypatch.setattr("verl.diffusion.prompts.MAX_BYTES", 0)
    encoder = PromptEncoder(*sd3, CPU, LENGTH)

    encoder.prepare(TEXTS)
    for text in TEXTS:
        encoder.encode([text])
    assert encoder.num_encoded == 3

    encoder.prepare(PROMPTS)  # the first two
    assert encoder.num_encoded == 3
    encoder.prepare(TEXTS)
    assert encoder.num_encoded == 4


@pytest.mark.heavy
def test_a_start_takes_the_memory_of_a_shard_whether_weights_or_adapters_are_trained(sd3_folder, tmp_path):
    folder = save_larger_sd3(tmp_path, torch.float16)  # 280 MiB, nothing of which is used in its data type

    for starts in measure_picture_starts(folder, sd3_folder, [LoraConfig(), LoraConfig(rank=4)]):
        for start in starts:
            assert start.shard > 65 * MIB
            assert start.peak < 32 * MIB
            assert start.held < 20 * MIB and start.used < 20 * MIB
