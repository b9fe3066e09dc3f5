# SPDX-License-Identifier: Apache-2.0
"""Runs whose teachers are served learn what runs learn that load them."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.quickstart import make_folder
from tests.helpers.training import quickstart_arguments, train
from tests.helpers.vllm_server import vllm_server
from verl.config.distillation import DistillationLossConfig
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto
from verl.trainer.served_teachers import ServedTeachers, TeacherModel

pytestmark = [pytest.mark.heavy, pytest.mark.slow]  # test_stage.py is in every suite

TEACHERS, LOSS, SERVER = "distillation.teacher_models", "distillation.distillation_loss", "reward_servers"
TOLERANCE, K = 1e-4, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("served_teachers"))
    save_tiny_model(folder / "teacher", "qwen2", seed=7, num_hidden_layers=3)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    named = (row | {"data_source": ("one", "two")[number % 2]} for number, row in enumerate(rows))
    (folder / "named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    return folder


@pytest.fixture(scope="module")
def url(folder):
    options = ["--served-model-name", "big", "--dtype", "float32", "--max-logprobs", "-1"]
    with vllm_server(folder / "teacher", folder / "log.txt", *options) as url:
        yield url


def padded_batch():
    """Two sequences of random tokens, of prompts (B, 6) and responses (B, 5)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 60, (2, 11), generator=generator)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0], [1] * 11])
    return DataProto.from_dict({"input_ids": ids * mask, "attention_mask": mask, "responses": ids[:, 6:]})


def test_a_server_gives_the_log_probs_of_the_model(folder, url):
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    batch = padded_batch()

    def asked(mode):
        loss = DistillationLossConfig(mode, topk=K)
        return ServedTeachers({0: TeacherModel(url, "big", "math")}, loss).add_to(batch).batch

    sampled, top = asked("low_var_kl"), asked("forward_kl_topk")
    for row, (start, end, num) in enumerate(((2, 9, 3), (0, 11, 5))):
        ids = batch.batch["input_ids"][row, start:end]
        with torch.no_grad():
            expected = model(ids[None]).logits[0].log_softmax(-1)[-num - 1 : -1]  # (num, V)
        own = expected.gather(-1, ids[-num:, None])[:, 0]
        torch.testing.assert_close(sampled["teacher_log_probs"][row, :num], own, rtol=0, atol=TOLERANCE)
        given = top["teacher_top_log_probs"][row, :num]
        torch.testing.assert_close(given, expected.topk(K).values, rtol=0, atol=TOLERANCE)
        at_ids = expected.gather(-1, top["teacher_top_ids"][row, :num].long())
        torch.testing.assert_close(given, at_ids, rtol=0, atol=TOLERANCE)
    assert not sampled["teacher_log_probs"][0, 3:].any()


def arguments(folder, *overrides):
    return quickstart_arguments(
        folder, folder / "model", "distillation.enabled=true", f"{LOSS}.use_task_rewards=false",
        f"data.train_files={folder / 'named.jsonl'}", "worker.actor.entropy_coef=0", "trainer.debug=true",
        "worker.rollout.name=hf", "trainer.n_gpus_per_node=1", "trainer.max_steps=2",
        "trainer.val_before_train=false", "trainer.val_freq=-1", "trainer.save_freq=-1", *overrides,
    )  # fmt: skip


def served(folder, name, server, *options):
    """Options of a teacher behind a server."""
    return [
        f"{TEACHERS}.{name}.server={server}", f"{TEACHERS}.{name}.tokenizer_path={folder / 'teacher'}",
        f"{SERVER}.{server}.kind=teacher", *(f"{SERVER}.{server}.{option}" for option in options),
    ]  # fmt: skip


def assert_equal(metrics, expected):
    for step, values in expected.items():
        same = [name for name in values if name.startswith("distillation/")] + ["actor/grad_norm"]
        assert len(same) > 1
        for name in same:
            assert metrics[step][name] == pytest.approx(values[name], abs=TOLERANCE, rel=TOLERANCE), name


def test_a_served_teachers_top_tokens_train_like_a_loaded_ones(folder, url):
    common = arguments(folder, f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk={K}")

    loaded = train(folder / "loaded", *common, f"{TEACHERS}.big.model_path={folder / 'teacher'}")
    asked = train(folder / "asked", *common, *served(folder, "big", "big", f"url={url}"))

    assert loaded[1]["distillation/kl"] > 0.01
    assert_equal(asked, loaded)


def test_a_teacher_that_the_run_serves_works_next_to_one_that_it_loads(folder):
    common = arguments(
        folder, f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=true",
        f"{TEACHERS}.one.model_path={folder / 'model'}",
    )  # fmt: skip
    own = ["colocate=false", "dtype=fp32", "max_model_len=256", f"model_path={folder / 'teacher'}"]

    loaded = train(folder / "two", *common, f"{TEACHERS}.two.model_path={folder / 'teacher'}")
    asked = train(folder / "mixed", *common, *served(folder, "two", "own", *own))

    assert_equal(asked, loaded)
    assert asked[1]["reward_servers/own/restarts"] == 0
