# SPDX-License-Identifier: Apache-2.0
"""A Wan under FSDP: float32 where diffusers computes in float32, and exports that draw the trained videos."""

import copy

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from examples.quickstart.tiny_pipelines import save_tiny_wan
from tests.diffusion.training import KINDS, TIMES, build, save
from tests.helpers.distributed import run_distributed
from verl.checkpoint.merger import merge_checkpoint
from verl.diffusion.families.interface import Size
from verl.diffusion.sampler import NoiseSchedule, sample

pytestmark = [pytest.mark.heavy, pytest.mark.slow]  # the same of Stable Diffusion 3 in every suite
STORED = {"full": "fp32", "lora": "bf16"}  # data types of the weights
SIZE, SHAPE, PROMPTS, STEPS, LENGTH = Size(16, 16, 5), (2, 4, 2, 4, 4), ["all red", "a blue wall"], 3, 16


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def run(model, dtype):
    """Return velocities of noise, and the gradients of their size."""
    (found,) = model(
        hidden_states=drawn(*SHAPE).to(dtype), timestep=torch.tensor(TIMES),
        encoder_hidden_states=drawn(2, 6, 64).to(dtype), return_dict=False,
    )  # fmt: skip
    found.float().square().mean().backward()
    return found.detach(), {name: param.grad for name, param in model.named_parameters()}


def compute_in_bfloat16(folder, kind, world_size):
    policy = build(folder, KINDS[kind], world_size, torch_dtype=STORED[kind], computes_in="bf16")
    found, grads = run(policy.model, torch.float32)  # the policy casts it
    trained = {name: grad for name, grad in grads.items() if grad is not None}
    return {
        "velocities": found.float().numpy(),
        "types": (str(found.dtype), str(policy.model.rope.freqs_cos.dtype)),
        "gradients": {name: grad.full_tensor().float().numpy() for name, grad in trained.items()},
    }


def train_and_save(folder, kind, world_size, target, is_first):
    """Pull velocities to zero, save a checkpoint, and return the videos of the trained model."""
    policy = build(folder, KINDS[kind], world_size)
    with torch.no_grad():
        conditions = policy.family.encode(policy.parts, PROMPTS, LENGTH)

    def velocity(latents, times):
        return policy.family.predict(policy.model, latents, times, conditions)

    for _ in range(3):
        velocity(drawn(*SHAPE), torch.tensor(TIMES)).square().mean().backward()
        policy.optimizer.step()
        policy.optimizer.zero_grad()
    save(policy, target / kind, is_first=is_first)
    schedule = NoiseSchedule(*policy.family.times(policy.parts, STEPS, SIZE), 0.7, "sde", noisy=())
    generators = [torch.Generator() for _ in PROMPTS]
    return policy.decode(sample(velocity, drawn(*SHAPE), schedule, generators).latents[:, -1]).numpy()


def run_rank(rank, world_size, folder, target):
    return {
        kind: (
            compute_in_bfloat16(folder, kind, world_size),
            train_and_save(folder, kind, world_size, target, rank == 0),
        )
        for kind in STORED
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Wan with Euler's scheduler, whose steps are those of validations."""
    folder = save_tiny_wan(tmp_path_factory.mktemp("wan"))
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"))
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def found(folder, target):
    return run_distributed(run_rank, 2, folder, target)


@pytest.fixture(params=STORED)
def kind(request):
    return request.param


def test_predictions_in_bfloat16_are_those_of_diffusers_bit_for_bit(found, folder, kind):
    reference = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer", dtype=torch.bfloat16)
    expected, gradients = run(reference, torch.bfloat16)
    rounded, _ = run(copy.deepcopy(reference).to(torch.bfloat16), torch.bfloat16)
    assert (rounded - expected).abs().max() > 1e-3, "what diffusers keeps in float32 matters"

    for rank in found:
        shown, _ = rank[kind]
        assert torch.equal(torch.from_numpy(shown["velocities"]), expected.float())
        assert shown["types"] == ("torch.bfloat16", "torch.float32")
        if kind == "lora":
            assert shown["gradients"] and all("lora_" in name for name in shown["gradients"])
            continue
        assert shown["gradients"].keys() == gradients.keys()
        for name, grad in gradients.items():
            torch.testing.assert_close(
                torch.from_numpy(shown["gradients"][name]), grad.float(), rtol=2e-2, atol=2e-4, msg=name
            )


def test_an_exported_pipeline_draws_the_videos_of_the_trained_model(found, folder, target, kind):
    exported = merge_checkpoint(target / kind / "actor")

    def draw(path):
        pipeline = WanPipeline.from_pretrained(path)
        pipeline.set_progress_bar_config(disable=True)
        videos = pipeline(
            PROMPTS, height=SIZE.height, width=SIZE.width, num_frames=SIZE.frames, guidance_scale=1.0,
            num_inference_steps=STEPS, latents=drawn(*SHAPE), max_sequence_length=LENGTH, output_type="pt",
        )  # fmt: skip
        return videos.frames

    _, videos = found[0][kind]
    assert videos.shape == (2, 5, 3, 16, 16)
    torch.testing.assert_close(draw(exported), torch.from_numpy(videos), atol=1e-5, rtol=0)
    assert (draw(folder) - torch.from_numpy(videos)).abs().max() > 0.05
