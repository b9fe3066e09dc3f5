# SPDX-License-Identifier: Apache-2.0
"""The trained transformer on two ranks: what is trained, the reference without adapters, exact resumes."""

import copy
import json

import peft
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

from tests.diffusion.models import LENGTH, PROMPTS, noise
from tests.diffusion.training import KINDS, TIMES, build, save, update, velocities
from tests.helpers.distributed import run_distributed
from verl.checkpoint.storage import ShardReader
from verl.config.model import LoraConfig
from verl.diffusion.families.registry import family_of
from verl.distributed.fsdp import local_part, sharded_parameters
from verl.distributed.weights.gathering import full_named_tensors

pytestmark = pytest.mark.heavy
LEARNED = 2  # updates before a checkpoint


def tensors_of(policy):
    return dict(full_named_tensors(policy.model))


def state_of(policy):
    """Return the full weights, and this rank's moments."""
    names = {param: name for name, param in sharded_parameters(policy.model).items()}
    moments = {
        f"{names[param]}.{key}": local_part(value).clone()
        for param, state in policy.optimizer.state.items()
        for key, value in state.items()
    }
    return {name: tensor.clone() for name, tensor in tensors_of(policy).items()}, moments


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def resume(rank, world_size, base, target):
    """Return by kind which laws hold for a checkpoint that is loaded into a new model."""
    found = {}
    for kind, lora in KINDS.items():
        policy = build(base, lora, world_size)
        for seed in range(LEARNED):
            update(policy, seed)
        save(policy, target / kind, is_first=rank == 0, extra={"calls": 7 + rank})
        saved = state_of(policy)
        update(policy, LEARNED)
        continued = state_of(policy)

        other = build(base, lora, world_size, seed=1)
        extra = other.load(target / kind)
        loaded = state_of(other)
        update(other, LEARNED)
        again = state_of(other)

        found[kind] = {
            "weights": are_equal(loaded[0], saved[0]),
            "moments": are_equal(loaded[1], saved[1]) and bool(saved[1]),
            "weights after an update": are_equal(again[0], continued[0]),
            "moments after an update": are_equal(again[1], continued[1]),
            "an update changes weights": not are_equal(continued[0], saved[0]),
            "extra state": extra == {"calls": 7 + rank},
            "learning rate": other.optimizer.param_groups[0]["lr"] == policy.optimizer.param_groups[0]["lr"],
        }
    return found


def compare_with_base(base, world_size, saved):
    """Return velocities with and without adapters, and what is trained; `saved` are adapters."""
    policy = build(base, KINDS["lora"], world_size)
    down = next(name for name in tensors_of(policy) if "lora_A" in name)
    initial = tensors_of(policy)[down].clone()
    with torch.no_grad(), policy.reference():
        start = velocities(policy, 0)
    update(policy, 0)
    with torch.no_grad():
        trained = velocities(policy, 0)
        with policy.reference():
            without = velocities(policy, 0)
        trained_again = velocities(policy, 0)
    selected = {name: param.dtype for name, param in policy.model.named_parameters() if param.requires_grad}
    plain = build(base, LoraConfig(), world_size)
    with torch.no_grad():
        whole = velocities(plain, 0)

    partial = build(base, KINDS["lora"], world_size, seed=1, train_modules=["proj_out"])
    from_path = tensors_of(build(base, LoraConfig(path=str(saved)), world_size))
    rounded = build(base, KINDS["lora"], world_size, torch_dtype="bf16", computes_in="bf16")
    seen = []
    rounded.model.time_text_embed.register_forward_pre_hook(lambda _, given: seen.append(given))
    with torch.no_grad():
        half = velocities(rounded, 0)
    return {
        "times": seen[0][0].tolist(),
        "half": half.float().numpy(),
        "images": [tensor.numpy() for tensor in (start, without, whole, trained, trained_again)],
        "selected": {name: str(dtype) for name, dtype in selected.items()},
        "initial": (down, initial.numpy(), tensors_of(partial)[down].numpy()),
        "partial": [name for name, param in partial.model.named_parameters() if param.requires_grad],
        "path": {name: tensor.numpy() for name, tensor in from_path.items() if "lora_" in name},
        "dtypes": {str(param.dtype): param.requires_grad for param in rounded.model.parameters()},
    }


def resume_and_compare(rank, world_size, base, target):
    torch.manual_seed(rank)  # as in workers
    resumed = resume(rank, world_size, base, target)
    return resumed, compare_with_base(base, world_size, target / "lora" / "actor" / "lora_adapter")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def found(sd3_folder, target):
    """What `resume` and `compare_with_base` return, by rank."""
    return run_distributed(resume_and_compare, 2, sd3_folder, target)


@pytest.fixture
def resumed(found):
    return [rank[0] for rank in found]


@pytest.fixture
def adapted(found):
    return [rank[1] for rank in found]


@pytest.mark.nightly("verl/checkpoint")
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_loaded_and_continued_exactly(resumed, kind):
    for rank in resumed:
        assert all(rank[kind].values()), rank[kind]


def test_a_checkpoint_of_adapters_omits_the_base(resumed, target):
    saved = ShardReader(target / "lora" / "actor").tensors()

    weights = [name for name in saved if name.startswith("model.")]
    assert weights and all("lora_" in name for name in weights)
    assert any("attn.to_out.0" in name for name in weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_names_its_base_and_what_it_is_of(resumed, sd3_folder, target, kind):
    actor = target / kind / "actor"

    assert json.loads((actor / "manifest.json").read_text())["base_model"] == str(sd3_folder)
    for name in ("model_index.json", "transformer/config.json"):
        assert (actor / "huggingface" / name).read_text() == (sd3_folder / name).read_text()


def test_the_reference_is_the_base_model_bit_for_bit(adapted):
    start, without, whole, trained, trained_again = (torch.from_numpy(each) for each in adapted[0]["images"])

    assert torch.equal(start, whole) and torch.equal(without, whole)
    assert (trained - whole).abs().max() > 1e-3
    assert torch.equal(trained, trained_again)


def test_all_linear_adapts_the_modules_that_the_family_names_in_float32(adapted, sd3_folder):
    transformer = DiffusionPipeline.from_pretrained(sd3_folder).transformer
    adapted_ends = tuple(f".{end}" for end in family_of(sd3_folder).adapted)
    modules = {name for name, _ in transformer.named_modules() if name.endswith(adapted_ends)}

    selected = adapted[0]["selected"]

    assert {name.partition(".lora_")[0] for name in selected} == modules and modules
    assert set(selected.values()) == {"torch.float32"}


def test_adapters_start_as_in_one_process_with_the_seed(adapted, sd3):
    family, pipeline = sd3
    transformer = copy.deepcopy(pipeline.transformer)
    name, found, other = adapted[0]["initial"]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer.add_adapter(peft.LoraConfig(r=4, lora_alpha=6, target_modules=list(family.adapted)))

    assert torch.equal(torch.from_numpy(found), transformer.get_parameter(name))
    assert not torch.equal(torch.from_numpy(other), transformer.get_parameter(name))


def test_train_modules_trains_whole_weights_next_to_adapters(adapted):
    names = adapted[0]["partial"]

    assert {"proj_out.weight", "proj_out.bias"} <= set(names)
    assert any("lora_A" in name for name in names)


def test_a_run_starts_from_a_saved_adapter(adapted, target):
    saved = load_file(target / "lora" / "actor" / "lora_adapter" / "adapter_model.safetensors")

    found = adapted[0]["path"]

    assert len(found) == len(saved)
    for name, tensor in saved.items():
        own = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(torch.from_numpy(found[own]), tensor)


def test_a_base_in_bfloat16_has_adapters_in_float32(adapted):
    assert adapted[0]["dtypes"] == {"torch.bfloat16": False, "torch.float32": True}


@torch.no_grad()
def test_computation_in_bfloat16_is_that_of_diffusers_with_exact_times(adapted, sd3, sd3_folder):
    family, _ = sd3
    half = DiffusionPipeline.from_pretrained(sd3_folder, dtype=torch.bfloat16)
    conditions = family.encode(half, PROMPTS, LENGTH)
    latents = noise(sd3, 0).bfloat16()

    expected = family.predict(half.transformer, latents, torch.tensor(TIMES), conditions)

    assert adapted[0]["times"] == pytest.approx(TIMES)
    assert torch.equal(torch.from_numpy(adapted[0]["half"]), expected.float())
