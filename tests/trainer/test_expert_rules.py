# SPDX-License-Identifier: Apache-2.0
"""Experts that cannot be divided are refused before anything starts."""

import pytest

from tests.helpers.training import QUICKSTART
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, load_config
from verl.models.tiny import save_tiny_model
from verl.planning.planned_run import planned_ppo
from verl.planning.report import dry_run_memory
from verl.trainer.model_checks import check_models

SIZE = "worker.actor.fsdp.expert_parallel_size"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    (root / "rows.jsonl").write_text('{"problem": "What?", "answer": "This."}\n')
    return {
        "rows": root / "rows.jsonl",
        "dense": save_tiny_model(root / "dense", "qwen3"),
        "mixture": save_tiny_model(root / "mixture", "qwen3_moe"),
        "odd": save_tiny_model(root / "odd", "qwen3_moe", num_experts=6),
    }


def load(folders, model, *options):
    return load_config(
        PPOConfig,
        [
            f"config={QUICKSTART / 'demo.yaml'}",
            f"data.train_files={folders['rows']}",
            f"data.val_files={folders['rows']}",
            f"worker.actor.model.model_path={folders[model]}",
            f"worker.reward.reward_function={QUICKSTART / 'reward.py'}:compute_score",
            "trainer.n_gpus_per_node=4",
            "worker.actor.micro_batch_size_per_device_for_update=1",
            "worker.actor.micro_batch_size_per_device_for_experience=1",
            *options,
        ],
    )


def check(folders, model, *options):
    check_models(planned_ppo(load(folders, model, *options)))


def taught_by(folders, model, *options):
    teacher = "distillation.teacher_models.big"
    given = ["distillation.enabled=true", f"{teacher}.model_path={folders[model]}"]
    return [*given, *(f"{teacher}.fsdp.{each}" for each in options)]


def test_a_teachers_experts_have_the_rules_of_all_and_its_own_option_in_messages(folders, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    size = "`distillation.teacher_models.big.fsdp.expert_parallel_size`"

    check(folders, "dense", *taught_by(folders, "mixture", "expert_parallel_size=2"))
    with pytest.raises(ValueError, match=rf"{size} \(4\) must divide the 6 experts .* set it to 3"):
        check(folders, "dense", *taught_by(folders, "odd", "expert_parallel_size=4"))
    with pytest.raises(ConfigError, match=rf"must be divisible by {size} \(3\)"):
        load(folders, "dense", *taught_by(folders, "odd", "expert_parallel_size=3"))
    with pytest.raises(ConfigError, match=rf"big.fsdp.fsdp_size` \(1\) must be divisible by {size} \(2\)"):
        load(folders, "dense", *taught_by(folders, "odd", "fsdp_size=1", "expert_parallel_size=2"))


def test_experts_that_the_ranks_share_evenly_are_accepted(folders):
    check(folders, "mixture", f"{SIZE}=2", "worker.actor.model.lora.rank=4")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("dense", [f"{SIZE}=2"], rf"`{SIZE}` \(2\) must be 1 for Qwen3ForCausalLM, which has no experts"),
        (
            "odd",
            [f"{SIZE}=4"],
            rf"`{SIZE}` \(4\) must divide the 6 experts of a layer of Qwen3MoeForCausalLM: set it to 3",
        ),
        (
            "dense",
            ["worker.ref.fsdp.expert_parallel_size=2", "algorithm.disable_kl=false"],
            r"`worker.ref.fsdp.expert_parallel_size` \(2\) must be 1 for Qwen3ForCausalLM",
        ),
        (
            "mixture",
            [
                f"{SIZE}=2",
                "worker.actor.model.lora.rank=4",
                "worker.actor.model.lora.target_parameters=[experts.down_proj]",
            ],
            rf"`{SIZE}` \(2\) must be 1 with adapters on experts \(model.layers.0.mlp.experts.down_proj\)",
        ),
    ],
)
def test_what_cannot_be_divided_is_named_with_a_remedy(folders, model, options, message):
    with pytest.raises(ValueError, match=message):
        check(folders, model, *options)


@pytest.mark.parametrize(
    ("model", "message"), [("dense", "has no experts"), ("odd", "must divide the 6 experts")]
)
def test_a_dry_run_has_it_as_its_problem(folders, model, message):
    options = [f"{SIZE}=4", "worker.actor.micro_batch_size_per_device_for_update=auto"]

    assert message in dry_run_memory(load(folders, model, *options), planned_ppo).problem
