# SPDX-License-Identifier: Apache-2.0
"""The samplers in `examples/sampler`: which rows they draw, and how often."""

import itertools
import sys
from collections import Counter

import pytest
import torch

from tests.data.test_mixture import WEIGHTS, drawn, make_sources, open_mixture
from tests.data.test_sampler import STAGED, STAGES
from tests.helpers.extensions import minimal_arguments
from tests.helpers.training import SAMPLERS
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.models.tiny import save_tiny_model
from verl.trainer.extensions.checks import check_extensions

sys.path.insert(0, str(SAMPLERS))
from by_pass_rate import REVIVED, ByPassRate
from staged import Staged

ROWS = {"easy": range(10), "hard": range(10, 16)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


def by_pass_rate(size=4, **options):
    return ByPassRate({"": range(size)}, {"": 1.0}, 7, **options)


@pytest.mark.parametrize(
    "sampler",
    [
        ["data.sampler={folder}/by_pass_rate.py:ByPassRate", "data.sampler_kwargs={score: accuracy}"],
        ["data.sampler={folder}/staged.py:Staged", "data.sampler_kwargs={stages: [{weights: {'': 1}}]}"],
    ],
)
def test_a_sampler_passes_the_check_before_a_run(sampler, tmp_path):
    options = [option.replace("{folder}", str(SAMPLERS)) for option in sampler]

    check_extensions(load_config(PPOConfig, [*minimal_arguments(tmp_path), *options]))


def test_a_pass_rate_is_halfway_between_the_last_visit_and_those_before():
    sampler = by_pass_rate()
    for scores in ([1.0, 0.0], [0.0, 0.0], [2.0, -1.0, float("nan")]):  # 1/2, 0, and 1/2 of the known ones
        sampler.see(2, {"overall": scores})
    sampler.see(3, {"overall": [float("nan")]})

    assert sampler.rates[2] == (0.5 / 2 + 0.0) / 2 + 0.5 / 2
    assert sampler.rates[[0, 1, 3]].isnan().all()


def test_weights_are_p_times_one_minus_p_and_unknown_rows_count_as_one_half():
    sampler = by_pass_rate()
    sampler.draws = 21

    rates = torch.tensor([float("nan"), 0.5, 0.2, 0.95, 0.05, 0.95])
    seen = torch.tensor([0, 21, 21, 21, 1, 0])  # the last has rested for 21 draws, the one before for 20

    weights = sampler.weights_of(rates, seen)
    assert weights.tolist() == pytest.approx([0.25, 0.25, 0.16, 0, 0, REVIVED])


def test_rows_are_drawn_in_proportion_to_their_weights():
    sampler, counts, trials = by_pass_rate(), Counter(), 4000
    for row, passed in enumerate((0.5, 0.2, 0.8, 0.3)):
        sampler.see(row, {"overall": [passed]})
    for _ in range(trials):
        counts.update(sampler.draw(1))

    total = 0.25 + 0.16 + 0.16 + 0.21
    for row, weight in enumerate((0.25, 0.16, 0.16, 0.21)):
        expected = trials * weight / total
        assert abs(counts[row] - expected) < 4 * expected**0.5


def test_a_draw_repeats_no_row_and_rows_that_rested_longest_fill_it():
    sampler = by_pass_rate(rest=100)
    for row in (3, 0, 2):  # all solved, one after another
        sampler.draw(1)
        sampler.see(row, {"overall": [1.0]})

    assert sampler.draw(3) == [1, 3, 0]
    assert sorted(sampler.draw(9)) == [0, 1, 2, 3]


def test_a_solved_row_rests_and_comes_back():
    sampler, first_back = by_pass_rate(size=2, rest=5), []
    sampler.see(0, {"overall": [1.0]})
    sampler.see(1, {"overall": [0.5]})

    for number in range(1, 200):
        if sampler.draw(1) == [0]:
            first_back.append(number)

    assert first_back[0] > 5 and len(first_back) == pytest.approx(194 * REVIVED / (REVIVED + 0.25), rel=0.5)


def test_each_source_of_a_mixture_has_its_share_of_the_draws():
    sampler, counts = ByPassRate(ROWS, {"easy": 1, "hard": 2}, 0), Counter()
    for number in range(1, 30):
        for row in sampler.draw(5):
            counts["easy" if row < 10 else "hard"] += 1
            sampler.see(row, {"overall": [float(row % 3 == 0)]})
        assert abs(counts["easy"] - 5 * number / 3) < 1


@pytest.mark.parametrize(
    ("few", "weight", "size"), [(4, 3, 16), (2, 1, 16), (8, 3, 16), (1, 5, 7), (3, 2, 5)]
)
def test_a_source_of_few_rows_has_its_share_of_each_batch_though_no_draw_repeats_a_row(few, weight, size):
    sources = {"few": range(few), "many": range(few, few + 50), "more": range(few + 50, few + 90)}
    weights = {"few": weight, "many": 1, "more": 0.5}
    sampler, counts = ByPassRate(sources, weights, 0), Counter()
    for number in range(1, 40):
        left = size
        while left:  # as the loader fills a batch
            rows = sampler.draw(left)
            assert 0 < len(set(rows)) == len(rows) <= left
            left -= len(rows)
            counts.update(name for row in rows for name, own in sources.items() if row in own)
        for name in sources:
            assert abs(counts[name] - number * size * weights[name] / (weight + 1.5)) < 1


def stored_pass_rates(weights, draws):
    sampler = ByPassRate({"a": range(100), "b": range(100, 200)}, weights, 1)
    for _ in range(draws):
        sampler.draw(16)
    return sampler.state_dict()


def test_shares_with_other_weights_hold_from_the_resumption_on():
    resumed = ByPassRate({"a": range(100), "b": range(100, 200)}, {"a": 1, "b": 3}, 1)
    resumed.load_state_dict(stored_pass_rates({"a": 1, "b": 1}, 50))

    for _ in range(3):
        assert Counter(row < 100 for row in resumed.draw(16)) == {True: 4, False: 12}


def test_a_checkpoint_from_before_weights_were_stored_is_continued():
    state = stored_pass_rates({"a": 1, "b": 3}, 5)
    del state["weights"]

    resumed = ByPassRate({"a": range(100), "b": range(100, 200)}, {"a": 1, "b": 3}, 1)
    resumed.load_state_dict(state)

    assert resumed.turns.counts == {"a": 20, "b": 60}


def test_the_metrics_of_a_sampler_count_the_rows_of_each_pool():
    sampler = by_pass_rate(size=5)
    for row, passed in enumerate((1.0, 0.0, 0.5, 0.05)):
        sampler.see(row, {"overall": [passed]})

    found = sampler.metrics()

    assert found.pop("pass_rate") == pytest.approx(1.55 / 4)
    assert found == {"unseen": 1, "easy": 1, "medium": 1, "hard": 2}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"easy": 0.1}, r"`hard` \(0.1\) must be below `easy` \(0.1\)"),
        ({"hard": -1}, "between 0 and 1"),
        ({"easy": "most"}, r"`easy` \(most\), both between 0 and 1"),
        ({"easy": float("nan")}, r"`easy` \(nan\), both between 0 and 1"),
        ({"rest": -1}, r"`rest` \(-1\) must be an integer of at least 0"),
        ({"rest": 1.5}, r"`rest` \(1.5\) must be an integer of at least 0"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        by_pass_rate(**options)


def test_a_score_that_the_reward_function_does_not_return_is_named_with_those_that_it_does():
    with pytest.raises(ValueError, match=r"`data.sampler_kwargs.score` \(acc\).*\['format', 'overall'\]"):
        by_pass_rate(score="acc").see(0, {"overall": [1.0], "format": [0.0]})


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_a_single_stage_draws_the_rows_of_the_mixture_bit_for_bit(batch_size, model, tmp_path):
    options = dict(sources=make_sources(tmp_path), rollout_batch_size=batch_size)
    staged = {"sampler": STAGED, "sampler_kwargs": {"stages": [{"weights": WEIGHTS}]}}

    assert drawn(open_mixture(model, tmp_path, **options, **staged), 12) == drawn(
        open_mixture(model, tmp_path, **options), 12
    )


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_a_stage_has_exactly_its_prompts_whatever_the_batch_size(batch_size, model, tmp_path):
    sources = make_sources(tmp_path)
    loader = open_mixture(
        model, tmp_path, sources, rollout_batch_size=batch_size, sampler=STAGED,
        sampler_kwargs={"stages": STAGES},
    )  # fmt: skip
    names = list(itertools.chain(*drawn(loader, -(-60 // batch_size))[0]))

    assert names[:9] == ["maths"] * 9
    for end in range(1, 51):
        counts = Counter(names[9 : 9 + end])
        assert all(abs(counts[name] - end * share) < 1 for name, share in (("maths", 0.2), ("code", 0.6)))


def test_a_source_continues_in_the_next_stage_where_it_stopped():
    stages = [{"prompts": 4, "weights": {"easy": 1}}, {"weights": {"easy": 1, "hard": 1}}]
    sampler = Staged(ROWS, {}, 0, stages=stages)

    rows = [row for row in sampler.draw(16) if row < 10]

    assert sorted(rows) == list(range(10))  # an epoch, across the border of the stages


def resumed_in_stages(drawn, then, now):
    before, resumed = Staged(ROWS, {}, 0, stages=then), Staged(ROWS, {}, 0, stages=now)
    before.draw(drawn)
    resumed.load_state_dict(before.state_dict())
    return resumed


def test_a_stage_that_was_made_shorter_than_what_was_drawn_is_over():
    last = {"weights": {"hard": 1}}
    then, now = ([{"prompts": prompts, "weights": {"easy": 1}}, last] for prompts in (100, 50))

    assert min(resumed_in_stages(60, then, now).draw(20)) >= 10
    assert max(resumed_in_stages(49, then, now).draw(1)) < 10
    assert max(resumed_in_stages(60, then, [now[0] | {"prompts": 61}, last]).draw(1)) < 10


def test_a_stage_of_other_weights_begins_again():
    last = {"weights": {"hard": 1}}
    then, now = ([{"prompts": 40, "weights": {"easy": 1, "hard": weight}}, last] for weight in (1, 3))
    resumed = resumed_in_stages(30, then, now)

    for _ in range(2):
        assert Counter(row < 10 for row in resumed.draw(20)) == {True: 5, False: 15}
    assert min(resumed.draw(9)) >= 10


@pytest.mark.parametrize("sampler", [ByPassRate, Staged])
def test_a_source_without_a_usable_row_is_named(sampler):
    options = {"stages": [{"weights": {"easy": 1}}]} if sampler is Staged else {}

    with pytest.raises(ValueError, match=r"no row of the sources \['none'\] can be used"):
        sampler(ROWS | {"none": range(16, 16)}, {"easy": 1, "hard": 1, "none": 1}, 0, **options)


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ([], "must have at least one"),
        ([{"weights": {"medium": 1}}], r"stage 1 names \['medium'\], the sources are \['easy', 'hard'\]"),
        ([{"weights": {"easy": 0}}], "the weights of stage 1 must be above 0"),
        ([{"weights": {}}], "the weights of stage 1 must be above 0"),
        ([{"weights": {"easy": 1}}, {"weights": {"hard": 1}}], "each stage but the last must have `prompts`"),
        ([{"prompts": 3, "weights": {"easy": 1}}], "and the last one none"),
        ({"weights": {"easy": 1}}, r"`stages` is a list, .* got \{'weights'"),
        ([{"weigths": {"easy": 1}}], "stage 1 must be a mapping with `weights`.* got {'weigths'"),
        ([{"weights": {"easy": 1}, "steps": 3}], "stage 1 must be a mapping with `weights`.* 'steps': 3"),
        ([{"weights": ["easy"]}], "stage 1 must be a mapping with `weights`, a mapping too"),
        ([{"weights": {"easy": "1"}}], "the weights of stage 1 must be above 0.* got {'easy': '1'}"),
        ([{"weights": {"easy": float("nan")}}], "the weights of stage 1 must be above 0"),
        ([{"prompts": 10.5, "weights": {"easy": 1}}, {"weights": {"easy": 1}}], "integer from 1.*has 10.5"),
        ([{"prompts": "10", "weights": {"easy": 1}}, {"weights": {"easy": 1}}], "integer from 1.*has '10'"),
        ([{"prompts": 0, "weights": {"easy": 1}}], "and the last one none: stage 1 has 0"),
    ],
)
def test_stages_that_make_no_sense_are_refused(stages, problem):
    with pytest.raises(ValueError, match=problem):
        Staged(ROWS, {}, 0, stages=stages)
