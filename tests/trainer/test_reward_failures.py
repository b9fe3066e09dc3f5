# SPDX-License-Identifier: Apache-2.0
"""Runs in which calls of the reward function fail."""

import json
import math
import subprocess
import sys
import textwrap
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests.helpers.quickstart import make_folder
from tests.helpers.training import (
    ROOT,
    learned,
    quickstart_arguments,
    read_metrics,
    start_training,
    train,
)
from tests.trainer.fails_for_some import is_unlucky
from tests.trainer.rollouts.sampling import (
    Engine,
    make_collector,
    make_config,
    make_sampler,
    numbered_prompts,
    numbers_of,
)
from verl.config.worker import RewardConfig
from verl.protocol import DataProto, objects
from verl.rewards.manager import RewardManager
from verl.trainer.core_algos import apply_kl_penalty, compute_advantages, get_kl_controller
from verl.trainer.rollouts.group_filter import solve_metrics
from verl.trainer.rollouts.scores import score
from verl.trainer.validation import Validator

pytestmark = pytest.mark.heavy

REWARD = Path(__file__).with_name("fails_for_some.py")
STEPS, RESPONSES = 2, 16


def test_a_masked_response_takes_no_part_in_its_group():
    # Of prompt a the responses with 1 and 4 are left, mean 2.5; of prompt b 5 and 3, mean 4.
    overall = [1.0, math.nan, 4.0, 5.0, 3.0, math.nan]
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1], [1, 1], [1, 0]])
    batch = DataProto.from_dict(
        {"response_mask": mask, "loss_mask": mask}, {"uid": objects(["a"] * 3 + ["b"] * 3)}
    )
    config = make_config(algorithm={"norm_adv_by_std": False, "disable_kl": True})

    batch, _ = score(batch, {"overall": overall}, config.worker, config.algorithm)
    batch, _ = apply_kl_penalty(batch, get_kl_controller(config.algorithm))
    batch = compute_advantages(batch, config.algorithm)

    expected = torch.tensor([[-1.5, -1.5], [0, 0], [1.5, 0.0], [1.0, 1.0], [-1.0, -1.0], [0, 0]])
    torch.testing.assert_close(batch.batch["advantages"], expected)
    assert batch.batch["loss_mask"].sum(-1).tolist() == [2, 0, 1, 2, 2, 0]


FAILING = 0.9  # the score of a response that the function below fails for
FAILS_FOR_NINE = """
    REWARD_TYPE = "sequential"
    def main(row):
        last = int(row["response"].split()[-1])
        assert last != 9
        return {"overall": last / 10, "accuracy": last / 10}
    """


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(textwrap.dedent(FAILS_FOR_NINE))
    options = {"on_failure": "mask", "max_failure_ratio": 1.0, "max_retries": 0}
    with RewardManager(RewardConfig(reward_function=str(path), **options)) as manager:
        yield manager


# What is left is mixed, all right, nothing; and a group in which nothing failed.
GROUPS = [[0.0, FAILING, 1.0], [1.0, FAILING, 1.0], [FAILING] * 3, [1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "options", [{"algorithm": {"online_filtering": True}}, {"trainer": {"rejection_sample": True}}]
)
def test_a_filter_looks_at_the_responses_that_have_a_score(manager, options):
    config = make_config(prompts=4, n=3, mini_batch=2, **options)
    collector = make_collector(config, Engine(lambda number: GROUPS[number % 4]), manager)

    batch, scoring, metrics = collector.collect(1)

    assert {number % 4 for number in numbers_of(batch)} == {0, 3}
    scores, logged = score(batch, scoring.result(), config.worker, config.algorithm)
    failed = torch.tensor(scoring.result()["overall"]).isnan()
    assert torch.equal(scores.batch["loss_mask"].sum(-1) == 0, failed) and failed.any()
    assert logged["reward/failures"] == pytest.approx(1 / 6)  # one of three in every second group
    assert metrics.get("filter/all_equal", 2.0 * metrics["filter/tries"]) == 2 * metrics["filter/tries"]


def test_a_group_without_scores_is_solved_neither_by_none_nor_by_all():
    metrics = solve_metrics(torch.tensor([[math.nan, math.nan], [math.nan, 0.0], [1.0, math.nan]]))

    assert (metrics["batch/solve_none"], metrics["batch/solve_all"]) == (1.0, 1.0)
    assert metrics["batch/without_adv_ratio"] == 1.0


def test_the_responses_to_a_prompt_without_a_baseline_are_masked(manager):
    config = make_config(prompts=2, algorithm={"adv_estimator": "remax"})
    collector = make_collector(config, Engine(lambda number: [0.0, 1.0], greedy_score=FAILING), manager)

    batch, scoring, metrics = collector.collect(1)

    assert not score(batch, scoring.result(), config.worker, config.algorithm)[0].batch["loss_mask"].any()
    assert math.isnan(metrics["reward/baseline"])


def make_validator(engine, manager, num_batches):
    config = make_config()
    prompts = list(islice(numbered_prompts(2), num_batches))
    sampler = make_sampler(config, engine, manager)
    return Validator(sampler, engine, prompts, config.worker, dp_size=1, num_samples=0)


def test_a_validation_is_the_mean_of_the_responses_that_have_a_score(manager):
    engine = Engine(lambda number: [[0.0], [FAILING], [1.0], [0.5]][number])
    validator = make_validator(engine, manager, 2)

    validator.sample(step=1)
    metrics = validator.measure()

    assert metrics["val/reward_score"] == metrics["val/overall_reward"] == 0.5
    assert metrics["val/failures_reward"] == 0.25


def test_a_validation_without_any_score_has_no_mean(manager):
    validator = make_validator(Engine(lambda number: [FAILING]), manager, 1)

    validator.sample(step=1)
    metrics = validator.measure()

    assert "val/reward_score" not in metrics and metrics["val/failures_reward"] == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("failures"), val=8)


def arguments(folder, fails, *options):
    common = [
        f"worker.reward.reward_function={REWARD}:compute_score",
        f"worker.reward.reward_function_kwargs={{fails: {fails}}}",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        f"trainer.max_steps={STEPS}",
    ]
    return quickstart_arguments(folder, folder / "model", *common, *options)


@pytest.fixture(scope="module")
def masked(folder):
    options = ["worker.reward.on_failure=mask", "worker.reward.max_failure_ratio=1"]
    return train(folder / "masked", *arguments(folder, "true", *options))


@pytest.mark.slow
def test_a_run_learns_as_if_the_responses_that_failed_had_been_masked_by_hand(folder, masked):
    output = folder / "by hand"
    options = arguments(folder, "false", f"trainer.save_checkpoint_path={output}")
    finished = subprocess.run(
        [sys.executable, "-m", "tests.trainer.masked_by_hand", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-6000:]

    by_hand = read_metrics(output)
    for step in range(1, STEPS + 1):
        expected = {
            key: value
            for key, value in learned(by_hand[step]).items()
            # These say how responses scored: a masked one has a score in one run and none in the other.
            if not key.startswith(("critic/score", "critic/rewards", "reward/", "val/"))
        }
        assert "actor/grad_norm" in expected and "critic/advantages/mean" in expected
        assert {key: masked[step].get(key) for key in expected} == expected, f"step {step}"


@pytest.mark.slow
def test_failures_are_counted_and_logged_with_what_failed(folder, masked):
    lines = (folder / "masked" / "reward_failures.jsonl").read_text().splitlines()
    failed = [json.loads(line) for line in lines]
    shares = [masked[step]["reward/failures"] for step in range(1, STEPS + 1)]

    in_training = [entry for entry in failed if entry["uid"].startswith("step")]
    assert 0 < len(in_training) == sum(shares) * RESPONSES
    assert all(is_unlucky(entry["response"]) and len(entry["reasons"]) == 2 for entry in failed)
    assert [masked[step]["reward/retries"] for step in range(1, STEPS + 1)] == shares
    assert 0 <= masked[STEPS]["val/reward_score"] < 1


@pytest.mark.slow  # one more run
def test_a_run_in_which_too_much_fails_ends_with_the_reasons(folder):
    finished = start_training(
        *arguments(folder, "true", "worker.reward.on_failure=score", "worker.reward.max_failure_ratio=0.01"),
        f"trainer.save_checkpoint_path={folder / 'too many'}",
    )

    assert finished.returncode == 1
    assert "more than `worker.reward.max_failure_ratio` (0.01) allows" in finished.stderr
    assert "raised ValueError: unlucky" in finished.stderr or "was killed by SIGABRT" in finished.stderr
    assert "Traceback (most recent call last):\n  File" not in finished.stderr
