# SPDX-License-Identifier: Apache-2.0
"""Observers see each row's own tokens, however rows are packed, shared and divided over ranks."""

from contextlib import contextmanager

import pytest
import torch

from tests.equivalence.test_router_replay import SIZES, Case, build
from tests.equivalence.test_shared_prompts import text_batch
from tests.helpers.distributed import run_distributed
from tests.workers.rollout.reference import load_model
from verl.models.tiny import save_tiny_model
from verl.workers.packing.observers import ForwardObserver

CASES = {
    1: [Case(), Case(shared=True), Case(checkpointing=True)],
    2: [Case(ulysses=2), Case(shared=True, ulysses=2), Case(ring=2)],
}


class LastHidden(ForwardObserver):
    """The sum of each token's last hidden state."""

    def __init__(self, model):
        model.get_decoder().norm.register_forward_hook(self.keep)

    def keep(self, module, arguments, result):
        self.hidden = result.detach()[0].sum(-1)  # (n,)

    @contextmanager
    def watching(self, tokens, inputs):
        columns = {}
        yield columns
        columns["padded"] = tokens.padded(self.hidden)
        columns["responses"] = tokens.of_responses(self.hidden)
        columns["sums"] = tokens.row_sums(self.hidden[:, None])


def observed(rank, world_size, cases, folder):
    found = []
    for case in cases:
        forward, _ = build(case, folder, rank, world_size)
        with forward.observed_by([LastHidden(forward.model)]) as columns:
            result = forward.log_probs(text_batch(SIZES), 1.0)
        result.log_probs.sum().backward()
        found.append({name: values.numpy() for name, values in columns.items()})
        with forward.observed_by([]) as columns:
            forward.log_probs(text_batch(SIZES), 1.0)
        assert not columns
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("ranks", CASES)
def test_columns_equal_those_of_each_row_alone(tmp_path, ranks):
    folder = str(save_tiny_model(tmp_path / "model", "qwen3_moe", num_experts=8))
    batch, model = text_batch(SIZES).batch, load_model(folder)
    expected = torch.zeros(batch["attention_mask"].shape)
    for row, mask in enumerate(batch["attention_mask"].bool()):
        with torch.no_grad():
            hidden = model.get_decoder()(input_ids=batch["input_ids"][row][mask][None]).last_hidden_state
        expected[row, mask] = hidden[0].sum(-1)

    for rank in run_distributed(observed, ranks, CASES[ranks], folder):
        for case, columns in zip(CASES[ranks], rank, strict=True):
            width = batch["responses"].shape[1]
            wanted = {"padded": expected, "responses": expected[:, -width:], "sums": expected.sum(1)[:, None]}
            for name, values in wanted.items():
                torch.testing.assert_close(
                    torch.tensor(columns[name]), values, rtol=1e-4, atol=1e-4, msg=f"{case} {name}"
                )
