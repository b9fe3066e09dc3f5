# SPDX-License-Identifier: Apache-2.0
"""Whole runs that train adapters: the engine has them, and checkpoints hold nothing else."""

import peft
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.helpers.quickstart import make_folder
from tests.helpers.training import (
    learned,
    quickstart_arguments,
    read_metrics,
    start_training,
    train,
)
from verl.checkpoint.merger import merge_checkpoint
from verl.models.tiny import save_tiny_model

pytestmark = pytest.mark.heavy

ADAPTED = [
    "worker.actor.model.lora.rank=8",
    "worker.actor.optim.lr=1e-2",
    "worker.actor.fsdp.mp_param_dtype=fp32",
    "worker.actor.fsdp.torch_dtype=fp32",
    "worker.rollout.dtype=fp32",
    "worker.rollout.lora_sync=adapter",
    "algorithm.disable_kl=false",
    "algorithm.use_kl_loss=true",
    "trainer.max_steps=3",
    "trainer.save_freq=2",
]

ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("text"))


def run(folder, name, *overrides):
    return train(folder / name, *quickstart_arguments(folder, folder / "model", *ADAPTED, *overrides))


@pytest.fixture(scope="module")
def unbroken(folder):
    return run(folder, "unbroken")


def logits(model):
    return model(torch.arange(40)[None] + 10).logits


@pytest.mark.slow  # one more run; test_lora_sync.py compares engines in every suite
def test_the_engine_has_the_adapters_of_each_step_and_the_reference_is_the_base(unbroken):
    for step in (1, 2, 3):
        assert unbroken[step]["rollout/log_probs_diff_max"] < 1e-4
    assert unbroken[1]["actor/ppo_kl"] != unbroken[3]["actor/ppo_kl"]
    assert abs(unbroken[3]["actor/kl_loss"]) > 0.01, "the policy moved away from its base"


@pytest.mark.slow  # needs that run
def test_a_checkpoint_holds_adapters_only_and_its_export_is_base_and_adapter(unbroken, folder):
    actor = folder / "unbroken" / "global_step_3" / "actor"
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        plain = logits(base)

        merged = AutoModelForCausalLM.from_pretrained(merge_checkpoint(actor, dtype=torch.float32))
        adapted = peft.PeftModel.from_pretrained(base, actor / "lora_adapter")

        torch.testing.assert_close(logits(merged), logits(adapted), atol=1e-5, rtol=0)
        assert (logits(merged) - plain).abs().max() > 0.1
    base_bytes = (folder / "model" / "model.safetensors").stat().st_size
    saved_bytes = sum(file.stat().st_size for file in actor.glob("*.distcp"))
    assert saved_bytes < base_bytes / 2, "weights and two moments of the whole model are three times the base"


@pytest.mark.slow
def test_adapters_folded_into_the_engine_train_as_adapters_in_the_engine(unbroken, folder):
    merged = run(folder, "merged", "worker.rollout.lora_sync=merged")

    for step, metrics in unbroken.items():
        assert learned(merged[step]) == pytest.approx(learned(metrics), abs=1e-4), step


@pytest.mark.slow
def test_adapters_with_joint_experts_reach_the_engine_and_the_log_says_that_experts_have_none(folder):
    model = save_tiny_model(folder / "mixture", "qwen3_moe")
    arguments = quickstart_arguments(folder, model, *ADAPTED, "worker.rollout.lora_sync=auto")

    finished = start_training(*arguments, f"trainer.save_checkpoint_path={folder / 'experts'}")

    assert finished.returncode == 0, finished.stderr[-6000:]
    assert "; 4 joint tensors of experts are not, see `lora.target_parameters`" in finished.stderr
    metrics = read_metrics(folder / "experts")
    for step in (1, 2, 3):
        assert metrics[step]["rollout/log_probs_diff_max"] < 1e-4
    assert abs(metrics[3]["actor/kl_loss"]) > 0.01, "the policy moved away from its base"


@pytest.mark.slow
def test_adapters_of_experts_train_with_a_balanced_and_frozen_router(folder):
    model = save_tiny_model(folder / "experts", "qwen3_moe")
    section = "worker.actor.model"
    arguments = quickstart_arguments(
        folder, model, *ADAPTED, "worker.rollout.lora_sync=auto", "worker.actor.global_batch_size=4",
        f"{section}.lora.target_parameters=[experts.gate_up_proj,experts.down_proj]",
        f"{section}.router_aux_loss_coef=0.1", f"{section}.freeze_router=true",
    )  # fmt: skip

    finished = start_training(*arguments, f"trainer.save_checkpoint_path={folder / 'balanced'}")

    assert finished.returncode == 0, finished.stderr[-6000:]
    assert "joint tensors of experts are not" not in finished.stderr
    metrics = read_metrics(folder / "balanced")
    for step in (1, 2, 3):
        assert metrics[step]["rollout/log_probs_diff_max"] < 1e-4
    base = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        plain = logits(base)
        check_balance(metrics[1], base, folder / "balanced", 1)
        trained = peft.PeftModel.from_pretrained(base, folder / "balanced/global_step_2/actor/lora_adapter")
        check_balance(metrics[3], trained, folder / "balanced", 3)
        actor = folder / "balanced" / "global_step_3" / "actor"
        merged = AutoModelForCausalLM.from_pretrained(merge_checkpoint(actor, dtype=torch.float32))
        base = AutoModelForCausalLM.from_pretrained(model)  # the other has adapters in its layers now
        assert torch.equal(merged.state_dict()[ROUTER], base.state_dict()[ROUTER])
        adapted = peft.PeftModel.from_pretrained(base, actor / "lora_adapter")
        torch.testing.assert_close(logits(merged), logits(adapted), atol=1e-5, rtol=0)
    assert (logits(merged) - plain).abs().max() > 0.1


def check_balance(metrics, policy, output, step):
    """Compare a step of one update with transformers' loss on its rows, by the weights before the step."""
    rows = pq.read_table(output / "rollouts" / f"step_{step}.parquet").to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(output.parent / "experts")
    ids = [torch.tensor(tokenizer.encode(row["prompt"]) + row["token_ids"]) for row in rows]
    assert [len(each) for each in ids] == [row["prompt_length"] + row["response_length"] for row in rows]
    mask = pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
    padded = pad_sequence(ids, batch_first=True)
    routed = policy(input_ids=padded, attention_mask=mask, output_router_logits=True).router_logits
    experts, top_k = policy.config.num_experts, policy.config.num_experts_per_tok
    expected = load_balancing_loss_func(routed, experts, top_k, mask)
    assert metrics["actor/router_aux_loss"] == pytest.approx(float(expected), rel=1e-4)
    chosen = torch.stack([each.topk(top_k).indices[mask.flatten() == 1] for each in routed])  # (L, T, k)
    shares = functional.one_hot(chosen, experts).sum((1, 2)) / mask.sum()
    assert metrics["moe/load_max"] == pytest.approx(shares.max().item() * experts / top_k, rel=1e-4)


@pytest.mark.slow
def test_a_resumed_run_of_adapters_logs_what_the_unbroken_one_logs(unbroken, folder):
    checkpoint = folder / "unbroken" / "global_step_2"

    resumed = run(folder, "resumed", f"trainer.load_checkpoint_path={checkpoint}")

    assert learned(resumed[3]) == learned(unbroken[3])


@pytest.mark.slow
def test_one_process_resumes_from_adapters_that_two_saved(unbroken, folder):
    checkpoint = folder / "unbroken" / "global_step_2"

    alone = run(folder, "alone", f"trainer.load_checkpoint_path={checkpoint}", "trainer.n_gpus_per_node=1")

    assert 1 not in alone
    assert alone[3]["rollout/log_probs_diff_max"] < 1e-4
    assert abs(alone[3]["actor/kl_loss"]) > 0.01, "it did not start from the base"


@pytest.mark.slow  # one more run; test_lora_rules.py has its messages
def test_a_pattern_that_matches_nothing_ends_the_run_with_what_there_is(folder):
    lora = "worker.actor.model.lora"
    overrides = [f"{lora}.rank=8", f"{lora}.target_modules=qproj"]
    arguments = quickstart_arguments(folder, folder / "model", *overrides)

    finished = start_training(*arguments, f"trainer.save_checkpoint_path={folder / 'nothing'}")

    assert finished.returncode == 2, finished.stderr
    assert "`worker.actor.model.lora.target_modules` (qproj) matches no linear module" in finished.stderr
    assert "q_proj" in finished.stderr
