# SPDX-License-Identifier: Apache-2.0
"""Runs of diffusion models in two processes, with the trainer's command."""

import json

import pytest

from tests.diffusion import models
from tests.diffusion.conftest import load
from tests.helpers.training import QUICKSTART, learned, train
from verl.cli.merge import main

PROMPTS = ["a red picture", "blue", "paint the dark wall green", "the color yellow"]
TRAINER = (
    "trainer.logger=[file]",
    "trainer.val_before_train=false",
    "trainer.save_freq=1",
    "trainer.val_freq=1",
)
GUIDANCE = {"flux": 3.5, "flux_schnell": 1.0, "qwen_image": 4.0}


def arguments_of(folder, name, *more):
    """Arguments of a run with adapters and a KL in the loss, on four prompts; writes its files."""
    model, rows = folder / "model", folder / "rows.jsonl"
    models.save(name, model)
    rows.write_text("".join(json.dumps({"prompt": text, "answer": "red"}) + "\n" for text in PROMPTS))
    return [
        f"config={QUICKSTART / 'diffusion.yaml'}", f"worker.actor.model.model_path={model}",
        f"data.train_files={rows}", f"data.val_files={rows}", "data.format_prompt=null",
        f"worker.reward.reward_function={QUICKSTART / 'painting_reward.py'}:compute_score",
        "data.rollout_batch_size=4", "worker.actor.global_batch_size=4", "worker.rollout.n=2",
        "worker.actor.model.lora.rank=4", "worker.actor.optim.lr=1e-2",
        "worker.actor.optim.lr_scheduler_type=constant",  # runs of different length are compared
        "algorithm.disable_kl=false", "algorithm.use_kl_loss=true", "algorithm.kl_penalty=flow_grpo",
        "worker.actor.micro_batch_size_per_device_for_update=4",
        "worker.actor.micro_batch_size_per_device_for_experience=4", "trainer.logger=[file]",
        "trainer.val_before_train=false", "trainer.save_freq=1", "trainer.val_freq=1", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The arguments of a run of two steps, its folder, and its metrics by step."""
    folder = tmp_path_factory.mktemp("sd3")
    options = "worker.rollout.train_timestep_fraction=0.7", "worker.rollout.val_num_steps=7"
    arguments = arguments_of(folder, "sd3", *options, "trainer.max_steps=2", "trainer.save_limit=-1")
    return arguments, folder / "unbroken", train(folder / "unbroken", *arguments)


@pytest.mark.heavy
def test_a_run_learns_measures_and_saves_in_each_step(unbroken):
    _, folder, metrics = unbroken

    for step in (1, 2):
        assert metrics[step]["actor/grad_norm"] > 0 and "val/reward_score" in metrics[step]
        assert (folder / f"global_step_{step}" / "actor").is_dir()
    assert metrics[2]["actor/kl_loss"] > 0


@pytest.mark.nightly("verl/diffusion", "verl/workers")
@pytest.mark.heavy
def test_a_run_that_is_resumed_learns_bit_for_bit_what_the_unbroken_one_does(unbroken, tmp_path):
    arguments, folder, metrics = unbroken
    checkpoint = f"trainer.load_checkpoint_path={folder / 'global_step_1'}"

    resumed = train(tmp_path / "resumed", *arguments, checkpoint, "trainer.val_before_train=true")

    assert learned(resumed[2]) == learned(metrics[2])


@pytest.mark.slow
@pytest.mark.heavy
def test_a_kl_in_the_rewards_is_measured_while_pictures_are_sampled(tmp_path):
    arguments = arguments_of(tmp_path, "sd3", "algorithm.use_kl_loss=false", "algorithm.kl_coef=0.1")

    metrics = train(tmp_path / "out", *arguments, "trainer.max_steps=2")

    assert metrics[1]["actor/kl_penalty"] == 0.0, "adapters begin at zero"
    assert metrics[2]["actor/kl_penalty"] > 0
    assert metrics[2]["critic/rewards/mean"] < metrics[2]["critic/score/mean"]


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("name", GUIDANCE)
def test_a_step_trains_adapters_and_its_checkpoint_is_a_pipeline(name, tmp_path):
    guidance = f"worker.rollout.guidance_scale={GUIDANCE[name]}"
    arguments = arguments_of(tmp_path, name, guidance, "worker.rollout.sde_window=[1,3]")

    metrics = train(tmp_path / "out", *arguments, "trainer.max_steps=1")

    assert metrics[1]["actor/grad_norm"] > 0
    assert abs(metrics[1]["actor/ppo_kl"]) < 1e-6, "the first ratio is 1"
    actor = tmp_path / "out" / "global_step_1" / "actor"
    assert main(["--local_dir", str(actor)]) == 0
    before, after = (models.draw(load(folder)) for folder in (tmp_path / "model", actor / "huggingface"))
    assert (after - before).abs().max() > 1e-4
