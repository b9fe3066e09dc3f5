# SPDX-License-Identifier: Apache-2.0
"""Metrics of speculative decoding, and whole runs whose drafts are accepted."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.quickstart import make_folder
from tests.helpers.training import ROOT, quickstart_arguments, train
from verl.trainer.metrics import draft_metrics

ENVIRONMENT = """
from verl.agents.interface import Observation


class Talk:
    def __init__(self):
        self.turns = 0

    def reset(self, row):
        return None

    def step(self, text, calls):
        self.turns += 1
        return Observation("Go on.", reward=1.0, done=self.turns == 3)

    def close(self):
        pass
"""
DRAFTS = (
    "worker.rollout.speculative.method=ngram",
    "worker.rollout.speculative.prompt_lookup_min=1",
    "trainer.max_steps=1",
    "trainer.val_freq=-1",
    "trainer.val_before_train=false",
)


def test_shares_of_drafts_are_of_all_tokens_of_the_batch():
    # 6 of 12 drafted tokens were accepted, of 24 that were sampled; the second response had no draft
    metrics = draft_metrics(torch.tensor([8, 0, 4]), torch.tensor([5, 0, 1]), 24)

    assert metrics == {"rollout/draft_acceptance": 0.5, "rollout/drafted_frac": 0.25}
    assert draft_metrics(torch.zeros(2), torch.zeros(2), 3) == dict.fromkeys(metrics, 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of which a token is followed by itself about every second time: its head is tied."""
    folder = make_folder(tmp_path_factory.mktemp("drafts"))
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith("embed_tokens.weight"):
            weight *= 3
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= 0.3
    save_file(weights, file, metadata={"format": "pt"})
    (folder / "talk.py").write_text(ENVIRONMENT)
    return folder


def check_drafts(metrics):
    assert 0.05 < metrics["rollout/draft_acceptance"] < 1
    assert 0.05 < metrics["rollout/drafted_frac"] < 1
    assert metrics["rollout/log_probs_diff_max"] < 1e-4


@pytest.mark.heavy
@pytest.mark.slow  # test_vllm_drafts.py keeps its promise in every suite
def test_a_run_says_which_part_of_its_drafts_was_accepted(folder):
    options = (*DRAFTS, "data.max_response_length=48", "worker.rollout.ignore_eos=true")

    metrics = train(folder / "run", *quickstart_arguments(folder, folder / "model", *options))[1]

    assert metrics["response_length/mean"] == 48
    check_drafts(metrics)


@pytest.mark.heavy
@pytest.mark.slow  # test_vllm_drafts.py keeps its promise in every suite
def test_a_run_of_conversations_counts_the_drafts_of_all_turns(folder):
    file = folder / "model" / "generation_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"eos_token_id": list(range(0, 300, 4))}))  # which end a turn
    options = (
        *DRAFTS,
        "data.max_response_length=192",
        f"data.override_chat_template={ROOT / 'examples/chat_template/tiny_tools.jinja'}",
        "worker.rollout.multi_turn.enable=true",
        f"worker.rollout.multi_turn.environment={folder / 'talk.py'}:Talk",
    )

    metrics = train(folder / "turns", *quickstart_arguments(folder, folder / "model", *options))[1]

    assert metrics["agent/turns_max"] > 1
    check_drafts(metrics)
