# SPDX-License-Identifier: Apache-2.0
"""Ulysses over the tokens of videos: what ranks share is what one rank computes."""

import numpy as np
import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from tests.helpers.distributed import run_distributed
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig, TrainedModelConfig
from verl.config.worker import ActorConfig
from verl.diffusion.engine import DiffusionEngine
from verl.diffusion.families.interface import Size
from verl.diffusion.families.registry import family_of
from verl.diffusion.model import DiffusionModel
from verl.diffusion.prompts import PromptEncoder
from verl.diffusion.sampler import NoiseSchedule
from verl.diffusion.step_forward import StepForward
from verl.distributed.sequence_parallel import SequenceParallel
from verl.protocol import DataProto, objects
from verl.workers.roles.actor import ActorTraining, DataParallelPPOActor, KLLoss

pytestmark = pytest.mark.heavy
TEXTS, N, STEPS, NOISY = ("a red picture", "the color blue"), 2, 3, (0, 1)
SIZE = Size(16, 24, 9)  # three latents of 4 x 6, 18 tokens
ODD = Size(24, 24, 9)  # 27 tokens: one rank has a token less
CPU = torch.device("cpu")


def policy_of(folder, world_size, sp, lora, size, checkpointing=False):
    family = family_of(folder)
    options = ModelConfig(
        model_path=str(folder), lora=LoraConfig(rank=lora), enable_gradient_checkpointing=checkpointing
    )
    config = TrainedModelConfig(model=options, fsdp=FSDPConfig(mp_param_dtype="fp32"))
    policy = DiffusionModel(family, config, device=CPU, world_size=world_size, training_steps=1, sp=sp)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            whole = 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter.data.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
    schedule = NoiseSchedule(*family.times(policy.parts, STEPS, size), 0.7, "sde", NOISY)
    forward = StepForward(
        family, policy.model, schedule, PromptEncoder(family, policy.parts, CPU, 16), guidance=3.0,
        reference=policy.reference if lora else None, sp=sp,
    )  # fmt: skip
    return policy, forward, DiffusionEngine(policy, forward, size, at_once=2, seed=0)


def rows_of(forward, engine, mine):
    """Sample two videos for each prompt of this rank, and give them advantages."""
    prompts = DataProto.from_dict(
        {"row": torch.tensor(mine)},
        {"uid": [str(number) for number in mine], "prompt_text": [TEXTS[number] for number in mine]},
    )
    found = [one for part in engine.generate(prompts, N, forward.schedule) for one in part]
    mask = torch.zeros(len(found), STEPS, dtype=torch.int64)
    mask[:, NOISY] = 1
    rows = [number * N + one for number in mine for one in range(N)]
    tensors = {
        "latents": torch.stack([one.latents for one in found]),
        "old_log_probs": torch.tensor([one.log_probs for one in found]),
        "responses": torch.arange(STEPS).expand(len(found), -1), "loss_mask": mask,
        "attention_mask": torch.ones(len(found), 3 + STEPS, dtype=torch.int64),
        "advantages": torch.tensor([1.0, -0.5, 0.3, -2.0])[rows, None].expand(-1, STEPS),
        "row_ids": torch.tensor(rows),
    }  # fmt: skip
    uids, texts = [one.uid for one in found], [TEXTS[number] for number in mine for _ in range(N)]
    batch = DataProto.from_dict(tensors, {"uid": objects(uids), "prompt_text": objects(texts)})
    return batch, np.stack([one.pixels for one in found])


def compute(rank, world_size, folder, cases):
    return [update(rank, world_size, folder, *case) for case in cases]


def update(rank, world_size, folder, ulysses, lora, size, checkpointing):
    sp = SequenceParallel.build(ulysses, 1)
    torch.manual_seed(rank)
    policy, forward, engine = policy_of(folder, world_size, sp, lora, size, checkpointing)
    share = len(TEXTS) // sp.dp_size
    mine = list(range(sp.dp_index * share, (sp.dp_index + 1) * share))
    batch, pixels = rows_of(forward, engine, mine)
    config = ActorConfig(
        global_batch_size=len(TEXTS), micro_batch_size_per_device_for_update=2, dynamic_batching=False,
        loss_avg_mode="token",
    )  # fmt: skip
    training = ActorTraining(
        policy.optimizer, policy.scheduler, N, STEPS,
        kl_loss=KLLoss("flow_grpo", 0.5) if lora else None, reference=forward if lora else None,
    )  # fmt: skip
    actor, gradients = DataParallelPPOActor(config, forward, training), {}

    def keep():
        for name, parameter in policy.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.full_tensor().numpy().copy()
        actor.updater.grad_norms.append(1.0)

    actor.updater.step = keep
    metrics = actor.update(batch, 1.0).metrics
    values = {name: batch.batch[name].numpy() for name in ("latents", "old_log_probs", "row_ids")}
    return {"gradients": gradients, "metrics": metrics, "pixels": pixels, "tokens": forward.sp.size, **values}


FULL, ADAPTED, ODD_TOKENS = (0, SIZE, False), (4, SIZE, True), (4, ODD, False)
KINDS = {"full": FULL, "adapters, checkpointing": ADAPTED, "tokens that 2 do not divide": ODD_TOKENS}


@pytest.fixture(scope="module")
def found(wan_folder):
    """Results of each kind: on one rank, and of each of two that share tokens."""
    one = run_distributed(compute, 1, wan_folder, [(1, *case) for case in KINDS.values()])[0]
    two = run_distributed(compute, 2, wan_folder, [(2, *case) for case in KINDS.values()])
    return {kind: (one[at], [rank[at] for rank in two]) for at, kind in enumerate(KINDS)}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_videos_and_log_probs_are_those_of_one_rank(found, kind):
    whole, ranks = found[kind]

    for shared in ranks:
        assert np.array_equal(shared["row_ids"], whole["row_ids"]), "both have all rows"
        assert np.abs(shared["latents"] - whole["latents"]).max() < 1e-5
        assert np.abs(shared["old_log_probs"] - whole["old_log_probs"]).max() < 1e-6
        assert np.abs(shared["pixels"].astype(int) - whole["pixels"]).max() <= 1
    assert np.array_equal(ranks[0]["latents"], ranks[1]["latents"])


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_loss_kl_and_gradients_are_those_of_one_rank(found, kind):
    whole, ranks = found[kind]
    names = ["actor/pg_loss", *(["actor/kl_loss"] if KINDS[kind][0] else [])]

    for shared in ranks:
        assert shared["metrics"]["actor/ppo_kl"] == 0.0, "the first ratio is 1"
        for name in names:
            assert shared["metrics"][name] == pytest.approx(whole["metrics"][name], rel=1e-5, abs=1e-7), name
        assert shared["gradients"].keys() == whole["gradients"].keys() and whole["gradients"]
        for name, expected in whole["gradients"].items():
            difference = np.abs(shared["gradients"][name] - expected).max()
            assert difference <= 1e-5 * np.abs(expected).max() + 1e-8, name


@pytest.mark.slow
def test_a_group_of_two_next_to_another_has_rows_of_its_own(found, wan_folder):
    whole, _ = found["adapters, checkpointing"]

    ranks = [rank[0] for rank in run_distributed(compute, 4, wan_folder, [(2, *ADAPTED)])]

    assert [rank["row_ids"].tolist() for rank in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for rank in ranks:
        assert rank["metrics"]["actor/kl_loss"] == pytest.approx(whole["metrics"]["actor/kl_loss"], rel=1e-5)
        for name, expected in whole["gradients"].items():
            difference = np.abs(rank["gradients"][name] - expected).max()
            assert difference <= 1e-5 * np.abs(expected).max() + 1e-8, name
