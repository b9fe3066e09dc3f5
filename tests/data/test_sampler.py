# SPDX-License-Identifier: Apache-2.0
"""Samplers of rows: what a loader asks of them, what they see, and how a resumed run continues."""

import io
import itertools
import math

import numpy as np
import pytest
import torch

from tests.data.test_loader import answers, make_config, make_files, readers_of, write
from tests.data.test_mixture import make_sources, open_mixture
from tests.helpers.nightly import by_day
from tests.helpers.training import SAMPLERS
from verl.data.loader import SampledLoader, make_loaders
from verl.data.messages import BadRowError
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto, objects

BY_PASS_RATE, STAGED = f"{SAMPLERS}/by_pass_rate.py:ByPassRate", f"{SAMPLERS}/staged.py:Staged"
STAGES = [{"prompts": 9, "weights": {"maths": 1}}, {"weights": {"maths": 1, "code": 3, "chat": 1}}]
IN_ORDER = """
from verl.data.order import RowSampler


class InOrder(RowSampler):
    \"\"\"Draws two rows at most, in order; `seen` has what it was shown.\"\"\"

    def __init__(self, sources, weights, seed, *, first=0):
        super().__init__(sources, weights, seed)
        self.next, self.seen = first, []

    def draw(self, count):
        size = sum(map(len, self.sources.values()))
        drawn = [(self.next + number) % size for number in range(min(count, 2))]
        self.next += len(drawn)
        return drawn

    def see(self, row, scores):
        self.seen.append((row, scores))

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture
def in_order(tmp_path):
    path = tmp_path / "in_order.py"
    path.write_text(IN_ORDER)
    return f"{path}:InOrder"


def open_train(model, folder, sampler, **options):
    options = {"train_files": make_files(folder)} | options
    config = make_config(model, sampler=sampler, **options)
    return make_loaders(config.data, readers_of(config), folder / "run").train


def stored(loader):
    """The state of a loader as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def taken(loader, count, score):
    """The answers of the next batches, whose two responses have been scored."""
    found = []
    for batch in itertools.islice(loader, count):
        [rows] = answers([batch])
        found.append(rows)
        loader.see(batch, {"overall": [score(row, sample) for row in rows for sample in range(2)]})
    return found


def odd_rows_pass_half(row, sample):
    return float(sample) if int(str(row).split()[-1]) % 2 else 0.0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_has_the_rows_that_the_sampler_draws_with_their_indices(
    num_workers, in_order, model, tmp_path
):
    loader = open_train(model, tmp_path, in_order, num_workers=num_workers, sampler_kwargs={"first": 19})

    batches = list(itertools.islice(loader, 3))

    assert answers(batches) == [[19, 20, 21, 0], [1, 2, 3, 4], [5, 6, 7, 8]]
    assert [batch.non_tensor_batch["sampled_row"].tolist() for batch in batches] == answers(batches)
    assert loader.epochs == 12 / 22


def test_a_sampler_sees_the_scores_of_the_responses_to_each_of_its_rows(in_order, model, tmp_path):
    loader = open_train(model, tmp_path, in_order)
    batch = next(iter(loader))

    loader.see(batch[[0, 1]], {"overall": [1.0, 0.0, 0.5, math.nan], "format": [1.0, 2.0, 3.0, 4.0]})
    loader.see(DataProto.from_dict(non_tensors={"uid": objects(["validation"])}), {"overall": [1.0]})

    (first, scores), (second, others) = loader.sampler.seen
    assert (first, scores) == (0, {"overall": [1.0, 0.0], "format": [1.0, 2.0]})
    assert second == 1 and others["format"] == [3.0, 4.0] and others["overall"][0] == 0.5
    assert math.isnan(others["overall"][1])


def test_other_rows_are_drawn_for_bad_ones(in_order, model, tmp_path):
    rows = [{"prompt": None if n in (1, 2) else f"number {n}", "answer": n} for n in range(9)]
    file = write(tmp_path / "some.jsonl", rows)
    loader = open_train(
        model, tmp_path, in_order, train_files=file, on_bad_row="skip", streaming=True, rollout_batch_size=3
    )

    assert answers(itertools.islice(loader, 3)) == [[0, 3, 4], [5, 6, 7], [8, 0, 3]]
    with pytest.raises(BadRowError, match=r"some.jsonl, row 1"):
        next(iter(open_train(model, tmp_path, in_order, train_files=file, streaming=True)))


def test_rows_of_which_none_can_be_used_end_the_run_with_the_first_of_them(in_order, model, tmp_path):
    file = write(tmp_path / "bad.jsonl", [{"prompt": None, "answer": n} for n in range(5)])
    loader = open_train(model, tmp_path, in_order, train_files=file, on_bad_row="skip", streaming=True)

    with pytest.raises(ValueError, match=r"no other row that `data.sampler` draws can be used: 5 of 5 rows"):
        next(iter(loader))


@pytest.mark.parametrize("drawn", [None, [], [0] * 5, [-1], [22], [0.0], ["0"], [torch.tensor(0)]], ids=repr)
def test_a_draw_that_is_not_of_one_to_so_many_rows_ends_the_run_with_the_name_of_the_sampler(
    drawn, in_order, model, tmp_path, monkeypatch
):
    loader = open_train(model, tmp_path, in_order)
    batches = iter(loader)
    next(batches)
    monkeypatch.setattr(loader.sampler, "draw", lambda count: drawn)

    with pytest.raises(
        ValueError, match=r"^`data.sampler` \(in_order.py:InOrder\) must draw 1 to 4 indices below 22, got \["
    ):
        next(batches)


def test_integers_of_numpy_are_indices(in_order, model, tmp_path, monkeypatch):
    loader = open_train(model, tmp_path, in_order)
    monkeypatch.setattr(loader.sampler, "draw", lambda count: np.arange(21, 21 - count, -1))

    assert answers(itertools.islice(loader, 1)) == [[21, 20, 19, 18]]


@pytest.mark.parametrize("stop_after", by_day([1, 2, 3, 5, 8], 3))
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("sampler", [BY_PASS_RATE, STAGED])
def test_a_run_that_is_resumed_draws_the_same_rows(sampler, streaming, stop_after, model, tmp_path):
    options = dict(sources=make_sources(tmp_path, bad=(1,)), on_bad_row="skip", streaming=streaming)
    kwargs = {"stages": STAGES} if sampler == STAGED else {"rest": 2}
    options |= {"sampler": sampler, "sampler_kwargs": kwargs}
    unbroken = taken(open_mixture(model, tmp_path, **options), 12, odd_rows_pass_half)
    stopped = open_mixture(model, tmp_path, **options)
    before = taken(stopped, stop_after, odd_rows_pass_half)

    resumed = open_mixture(model, tmp_path, **options)
    resumed.load_state_dict(stored(stopped))

    assert before + taken(resumed, 12 - stop_after, odd_rows_pass_half) == unbroken


def test_a_checkpoint_of_another_sampler_is_refused_and_where_it_is_allowed_the_sampler_begins(
    in_order, model, tmp_path
):
    plain, sampled = open_train(model, tmp_path, None), open_train(model, tmp_path, in_order)
    next(iter(sampled))

    for one, other in ((plain, sampled), (sampled, plain)):
        with pytest.raises(ValueError, match=r"differ from the checkpoint's.*'sampler'.*InOrder"):
            one.load_state_dict(other.state_dict())
    sampled.load_state_dict(plain.state_dict(), allow_changes=True)
    assert sampled.sampler.next == 4


def test_a_checkpoint_from_before_there_were_samplers_is_resumed(model, tmp_path):
    loader = open_train(model, tmp_path, None)
    state = loader.state_dict()
    del state["sampler"]

    assert loader.changes(state) == {}


def test_without_a_sampler_rows_are_read_in_epochs(model, tmp_path):
    assert not isinstance(open_train(model, tmp_path, None), SampledLoader)
