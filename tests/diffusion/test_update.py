# SPDX-License-Identifier: Apache-2.0
"""Updates of a diffusion policy: the first ratio is 1, and rows and steps may be divided in any way."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from tests.helpers.distributed import run_distributed
from verl.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig, TrainedModelConfig
from verl.config.worker import ActorConfig
from verl.diffusion.engine import DiffusionEngine
from verl.diffusion.families.interface import Size
from verl.diffusion.families.registry import family_of
from verl.diffusion.model import DiffusionModel
from verl.diffusion.prompts import PromptEncoder
from verl.diffusion.sampler import NoiseSchedule
from verl.diffusion.step_forward import StepForward
from verl.protocol import DataProto, objects
from verl.workers.roles.actor import ActorTraining, DataParallelPPOActor, KLLoss

PROMPTS, N, STEPS = 2, 2, 4
SIZE, NOISY = Size(16, 16), (0, 2)
CPU = torch.device("cpu")


class Case(NamedTuple):
    """A way to divide and compute the same update."""

    micro: int  # rows of a micro batch
    at_once: int | None = None
    lora: int = 0
    checkpointing: bool = False
    loss: str = "default"
    sampled: int = 2  # pictures of a call in sampling


def policy_of(folder, world_size, *, rank=0, checkpointing=False, at_once=None, sampled=2):
    """Return a policy, its forward pass and its engine."""
    family = family_of(Path(folder))
    options = ModelConfig(
        model_path=folder, lora=LoraConfig(rank=rank), enable_gradient_checkpointing=checkpointing
    )
    config = TrainedModelConfig(model=options, fsdp=FSDPConfig(mp_param_dtype="fp32"))
    policy = DiffusionModel(family, config, device=CPU, world_size=world_size, training_steps=1)
    schedule = NoiseSchedule(*family.times(policy.parts, STEPS, SIZE), 0.7, "sde", NOISY)
    prompts = PromptEncoder(family, policy.parts, CPU, 16)
    reference = policy.reference if rank else None
    forward = StepForward(
        family, policy.model, schedule, prompts, guidance=3.0, reference=reference, at_once=at_once
    )
    return policy, forward, DiffusionEngine(policy, forward, SIZE, at_once=sampled, seed=0)


def batch_of(engine, schedule):
    """Sample two pictures for each of two prompts, and give them advantages."""
    prompts = DataProto.from_dict(
        {"row": torch.arange(PROMPTS)},
        {"uid": ["a", "b"], "prompt_text": ["a red picture", "the color blue"]},
    )
    found = [one for part in engine.generate(prompts, N, schedule) for one in part]
    log_probs = torch.tensor([one.log_probs for one in found])
    mask = torch.zeros(len(found), STEPS, dtype=torch.int64)
    mask[:, NOISY] = 1
    mask[0, NOISY[0]] = mask[3] = 0  # a step and a picture that are not trained
    tensors = {
        "latents": torch.stack([one.latents for one in found]), "old_log_probs": log_probs,
        "responses": torch.arange(STEPS).expand(len(found), -1), "loss_mask": mask,
        "attention_mask": torch.ones(len(found), 3 + STEPS, dtype=torch.int64),
        "advantages": torch.tensor([1.0, -0.5, 0.3, -2.0])[:, None].expand(-1, STEPS),
        "row_ids": torch.arange(len(found)),
    }  # fmt: skip
    texts = [text for text in ("a red picture", "the color blue") for _ in range(N)]
    return DataProto.from_dict(
        tensors, {"uid": objects([one.uid for one in found]), "prompt_text": objects(texts)}
    )


def updates_on_rank(rank, world_size, folder, cases):
    return [update_on_rank(rank, world_size, folder, case) for case in cases]


def update_on_rank(rank, world_size, folder, case):
    torch.manual_seed(0)
    policy, forward, _ = policy_of(
        folder, world_size, rank=case.lora, checkpointing=case.checkpointing, at_once=case.at_once
    )
    _, _, own = policy_of(
        folder, world_size, sampled=case.sampled
    )  # of the same weights, for rows that all ranks know
    batch = batch_of(own, forward.schedule)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            whole = 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter.data.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
    config = ActorConfig(
        global_batch_size=PROMPTS, micro_batch_size_per_device_for_update=case.micro,
        dynamic_batching=False, loss_avg_mode="token", loss_type=case.loss,
    )  # fmt: skip
    kl = KLLoss("flow_grpo", 0.5) if case.lora else None
    training = ActorTraining(
        policy.optimizer, policy.scheduler, N, STEPS, kl_loss=kl, reference=forward if kl else None
    )
    actor, gradients = DataParallelPPOActor(config, forward, training), {}

    def keep():
        for name, parameter in policy.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.full_tensor().numpy().copy()
        actor.updater.grad_norms.append(1.0)

    actor.updater.step = keep
    share = len(batch) // world_size
    metrics = actor.update(batch[list(range(rank * share, (rank + 1) * share))], 1.0).metrics
    return {"gradients": gradients, "metrics": metrics}


def assert_same(one, other):
    assert one["gradients"].keys() == other["gradients"].keys() and one["gradients"]
    for name, expected in one["gradients"].items():
        difference = np.abs(other["gradients"][name] - expected).max()
        assert difference <= 1e-4 * np.abs(expected).max() + 1e-7, name


@pytest.fixture(scope="module")
def updates(sd3_folder):
    """Updates by case, on one rank and on two."""
    cases = {
        1: [Case(4), Case(4, 1, checkpointing=True), Case(2, 3), Case(4, lora=4), Case(4, loss="gspo")],
        2: [Case(1), Case(2, 1), Case(2, 1, lora=4), Case(1, loss="gspo")],
    }
    return {
        (ranks, case): update
        for ranks, some in cases.items()
        for case, update in zip(
            some, run_distributed(updates_on_rank, ranks, str(sd3_folder), some)[0], strict=True
        )
    }


@pytest.mark.heavy
def test_the_first_ratio_is_one(updates):
    assert updates[1, Case(4)]["metrics"]["actor/ppo_kl"] == 0.0
    assert updates[1, Case(4)]["metrics"]["actor/pg_loss"] != 0.0


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("model_folder", ["flux", "qwen_image"], indirect=True)
def test_other_families_have_a_first_ratio_of_one_and_gradients_of_any_division(model_folder):
    one_by_one, divided = Case(4, 1, sampled=1), Case(2, 2, checkpointing=True)

    (whole,) = run_distributed(updates_on_rank, 1, str(model_folder), [one_by_one])[0]
    (other,) = run_distributed(updates_on_rank, 2, str(model_folder), [divided])[0]

    assert whole["metrics"]["actor/ppo_kl"] == 0.0 and whole["metrics"]["actor/pg_loss"] != 0.0
    assert_same(whole, other)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("ranks", "case"),
    [(1, Case(4, 1, checkpointing=True)), (1, Case(2, 3)), (2, Case(1)), (2, Case(2, 1))],
    ids=["steps one by one, checkpointed", "three steps of two rows", "ranks", "steps of two ranks"],
)
def test_gradients_do_not_depend_on_the_division(updates, ranks, case):
    assert_same(updates[1, Case(4)], updates[ranks, case])


@pytest.mark.heavy
def test_adapters_have_a_reference_without_them(updates):
    whole = updates[1, Case(4, lora=4)]

    assert whole["metrics"]["actor/kl_loss"] > 0
    assert all("lora_" in name for name in whole["gradients"])
    assert_same(whole, updates[2, Case(2, 1, lora=4)])


@pytest.mark.heavy
def test_a_ratio_of_whole_trajectories_has_the_same_gradient_on_two_ranks(updates):
    assert_same(updates[1, Case(4, loss="gspo")], updates[2, Case(1, loss="gspo")])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_losses_whose_places_depend_on_others_of_their_row_keep_the_steps_of_a_row_together(name):
    old, both = torch.zeros(1, 2), torch.ones(1, 2)
    options = {"dro_beta": 0.1} if name == "dro" else {}

    def first(log_prob_of_other, mask):
        log_probs = torch.tensor([[0.1, log_prob_of_other]])
        inputs = PolicyLossInputs(log_probs, old, both, mask, both.bool(), **options)
        return POLICY_LOSSES[name](inputs).per_token[0, 0].item()

    alone = first(0.1, torch.tensor([[1.0, 0.0]]))
    assert ActorConfig(loss_type=name).reads_whole_rows == (
        not alone == first(0.1, both) == first(0.05, both)
    )
    assert ActorConfig(loss_type="loss.py:mine").reads_whole_rows
