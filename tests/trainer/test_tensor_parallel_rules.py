# SPDX-License-Identifier: Apache-2.0
"""Runs whose layers cannot be divided over ranks are refused before anything starts."""

import pytest

from tests.helpers.training import QUICKSTART
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, load_config
from verl.models.tiny import save_tiny_model
from verl.planning.planned_run import planned_ppo
from verl.planning.report import dry_run_memory
from verl.trainer.model_checks import check_models

SIZE, REF_SIZE = (f"worker.{role}.fsdp.tensor_parallel_size" for role in ("actor", "ref"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    (root / "rows.jsonl").write_text('{"problem": "What?", "answer": "This."}\n')
    return {
        "rows": root / "rows.jsonl",
        "qwen3": save_tiny_model(root / "qwen3", "qwen3"),
        "six heads": save_tiny_model(root / "six", "qwen3", num_attention_heads=6),
        "odd": save_tiny_model(root / "odd", "qwen2", vocab_size=511),
        "mixture": save_tiny_model(root / "mixture", "qwen3_moe"),
        "media": save_tiny_model(root / "media", "qwen2_5_vl"),
        "gemma2": save_tiny_model(root / "gemma2", "gemma2"),
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
            *options,
        ],
    )


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)


def test_ranks_that_share_layers_and_heads_of_sequences_divide_the_heads(folders):
    sizes = [f"{SIZE}=2", "worker.actor.ulysses_size=2"]

    check_models(planned_ppo(load(folders, "qwen3", *sizes)))
    with pytest.raises(
        ValueError, match=rf"`{SIZE}` \(2\) x `worker.actor.ulysses_size` \(2\) must divide the 6"
    ):
        check_models(planned_ppo(load(folders, "six heads", *sizes)))


def test_layers_that_the_ranks_share_evenly_are_accepted(folders):
    config = load(folders, "qwen3", f"{SIZE}=2", f"{REF_SIZE}=2", "algorithm.disable_kl=false")

    check_models(planned_ppo(config))
    assert (config.dp_size, config.world_size) == (2, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([f"{SIZE}=3"], r"`trainer.n_gpus_per_node` \(4\) must be divisible by `{}` \(3\)"),
        (
            [f"{SIZE}=4", "worker.actor.fsdp.fsdp_size=2"],
            r"`worker.actor.fsdp.fsdp_size` \(2\) must be divisible by `{}` \(4\)",
        ),
        ([f"{REF_SIZE}=2", "algorithm.disable_kl=false"], rf"`{REF_SIZE}` \(2\) must be 1 or `{{}}` \(1\)"),
        (
            [f"{SIZE}=2", "worker.actor.ulysses_size=2", "worker.actor.ring_size=2"],
            r"must be divisible by `{}` x `worker.actor.ulysses_size` x `worker.actor.ring_size` \(8\)",
        ),
        (
            [f"{SIZE}=2", "worker.actor.fsdp.expert_parallel_size=2"],
            r"must be 1 with `worker.actor.fsdp.expert_parallel_size=2`",
        ),
        (
            [f"{SIZE}=2", "worker.actor.fsdp.enable_cpu_offload=true"],
            r"must be 1 with `worker.actor.fsdp.enable_cpu_offload=true`: it needs false",
        ),
        (
            [f"{SIZE}=2", "worker.actor.model.compile_blocks=true"],
            r"must be 1 with `worker.actor.model.compile_blocks=true`",
        ),
        (
            [f"{SIZE}=2", "worker.actor.model.lora.rank=4", "worker.actor.model.lora.use_dora=true"],
            r"must be 1 with `worker.actor.model.lora.use_dora=true`: it needs false",
        ),
        (
            [f"{SIZE}=2", "worker.actor.optim.strategy=muon"],
            r"must be 1 with `worker.actor.optim.strategy=muon`, .* use one of adamw",
        ),
        (
            [f"{SIZE}=2", "distillation.enabled=true", "distillation.teacher_models.big.model_path=x/y"],
            r"must be 1 with `distillation.enabled=true`",
        ),
    ],
)
def test_options_that_do_not_go_together_are_named(folders, options, message):
    with pytest.raises(ConfigError, match=message.format(SIZE)):
        load(folders, "qwen3", *options)


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        ("qwen3", 4, r"must divide the 2 heads of keys and values of Qwen3ForCausalLM: set it to 2"),
        ("odd", 2, r"must divide the 511 tokens of the vocabulary of Qwen2ForCausalLM: set it to 1"),
        (
            "mixture",
            2,
            r"must be 1 for Qwen3MoeForCausalLM \(qwen3_moe\): layers of arcee, .*, starcoder2 can",
        ),
        ("media", 2, r"must be 1 for Qwen2_5_VLForConditionalGeneration \(qwen2_5_vl\)"),
        ("gemma2", 2, r"must be 1 for Gemma2ForCausalLM \(gemma2\)"),
    ],
)
def test_models_whose_layers_cannot_be_divided_are_named(folders, model, size, message):
    with pytest.raises(ValueError, match=rf"`{SIZE}` \({size}\) {message}"):
        check_models(planned_ppo(load(folders, model, f"{SIZE}={size}")))


def test_a_dry_run_ends_with_what_a_run_would(folders):
    dry = dry_run_memory(load(folders, "mixture", f"{SIZE}=2"), planned_ppo)

    assert dry.problem is not None and dry.problem.startswith(f"`{SIZE}` (2) must be 1 for Qwen3Moe")
    assert dry_run_memory(load(folders, "qwen3", f"{SIZE}=2"), planned_ppo).problem is None
