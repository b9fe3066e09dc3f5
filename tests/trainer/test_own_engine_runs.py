# SPDX-License-Identifier: Apache-2.0
"""Runs that sample in other processes, or over several steps: a step ahead, as a stream, partially."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.runs import Run, killed_and_resumed, saved_tensors
from tests.helpers.agent_runs import OPTIONS, save_model, talkative, write_dots
from tests.helpers.training import (
    QUICKSTART,
    SAMPLERS,
    learned,
    mixed,
    quickstart_arguments,
    read_metrics,
    train,
)
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))
from shapes import write_questions

pytestmark = pytest.mark.heavy

REWARD = Path(__file__).with_name("scored_by_letters.py")
COLLECTIVE = "worker.rollout.weight_transport=collective"
DELTA = "worker.rollout.weight_transport=delta"
OWN = ["worker.hybrid_engine=false", "trainer.n_gpus_for_rollout=1"]
AHEAD = [*OWN, "trainer.async.mode=one_step_off"]
STREAM = [*OWN, "trainer.async.mode=stream", "trainer.async.deterministic=true"]
PARTIAL = ["trainer.async.mode=partial", "trainer.async.deterministic=true"]
ADAPTERS = ["worker.actor.model.lora.rank=4", "worker.rollout.lora_sync=adapter"]
MERGED = ["worker.actor.model.lora.rank=4", "worker.rollout.lora_sync=merged"]
CORRECTED = "algorithm.rollout_correction.rollout_is=token"  # as by default with the modes
FRESH = "trainer.async.staleness_threshold=0"
SAMPLED = [
    f"data.sampler={SAMPLERS}/by_pass_rate.py:ByPassRate",
    "data.sampler_kwargs={score: accuracy, rest: 1}",
]
HALF = 2  # steps


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_tiny_model(folder / "model", "qwen2")
    write_questions(folder, "train", 24, seed=1, with_images=False)
    write_questions(folder, "val", 4, seed=2, with_images=False)
    return quickstart_arguments(
        folder,
        folder / "model",
        *mixed(folder),
        f"worker.reward.reward_function={REWARD}:compute_score",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=false",
        "trainer.save_limit=-1",
        f"trainer.save_freq={HALF}",
        f"trainer.max_steps={2 * HALF}",
    )


@contextmanager
def cores(number):
    """Let the commands that are started inside the block use the first of this process's cores."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(usable)[:number])
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory, arguments):
    """The metrics and the folder of a run whose processes sample and train in turn."""
    folder = tmp_path_factory.mktemp("in_turn")
    return train_with(1, folder, *arguments, CORRECTED), folder


def train_with(num_cores, folder, *arguments):
    """Train with one thread for each process: sums depend on the number of threads."""
    with cores(num_cores):
        return train(folder, *arguments)


def check_equal(folder, metrics, expected, expected_folder):
    """Compare runs bit for bit: what they learned, and the tensors of the last checkpoint."""
    for step, values in expected.items():
        assert in_any_mode(metrics[step]) == in_any_mode(values)
    one, other = (saved_tensors(each / f"global_step_{2 * HALF}") for each in (expected_folder, folder))
    assert all(one[key].equal(other[key]) for key in other) and len(other) > 20


def in_any_mode(metrics):
    """Return what a step learned, without what depends on how far ahead prompts are taken."""
    return {
        key: value
        for key, value in learned(metrics).items()
        if not key.startswith("async/") and not key.endswith("/epoch")
    }


@pytest.mark.nightly("verl/workers", "verl/single_controller")
def test_a_stream_of_another_process_has_the_trainers_log_probs_of_every_step(arguments, tmp_path):
    metrics = train(tmp_path, *arguments, *STREAM, FRESH)

    assert [*metrics] == [1, 2, 3, 4]
    assert all(values["rollout/log_probs_diff_max"] < 1e-4 for values in metrics.values())
    assert all(values["async/staleness_max"] == 0.0 for values in metrics.values())
    assert metrics[4]["actor/grad_norm"] > 0


@pytest.mark.nightly("verl/workers", "verl/distributed")
def test_a_stream_that_is_sent_changes_of_small_steps_has_the_trainers_log_probs_for_fewer_bytes(
    arguments, tmp_path
):
    metrics = train(tmp_path, *arguments, *STREAM, FRESH, DELTA, "worker.actor.optim.lr=1e-6")

    assert [*metrics] == [1, 2, 3, 4]
    assert all(values["rollout/log_probs_diff_max"] < 1e-4 for values in metrics.values())
    # float32: nearly all lower halves change, few upper ones; and a bit for each half, 1/16
    sent, whole = (
        [each[f"async/weights_{name}_gb"] for each in metrics.values()] for name in ("sent", "whole")
    )
    first, *later = (part / everything for part, everything in zip(sent, whole, strict=True))
    assert first == 1.0 and all(0.5 < share < 0.6 for share in later)


@pytest.mark.slow  # two runs each
@pytest.mark.parametrize(
    ("num_cores", "options"),
    [
        pytest.param(2, [*OWN, COLLECTIVE, CORRECTED], id="own processes"),
        pytest.param(2, [*STREAM, FRESH], id="stream"),
        pytest.param(2, [*STREAM, FRESH, DELTA], id="stream, changes"),
        pytest.param(1, [*PARTIAL, FRESH], id="partial"),
    ],
)
def test_without_staleness_other_ways_to_sample_equal_sampling_in_turn_bit_for_bit(
    num_cores, options, arguments, in_turn, tmp_path
):
    metrics = train_with(num_cores, tmp_path, *arguments, *options)

    check_equal(tmp_path, metrics, *in_turn)
    assert all(values.get("async/staleness_max", 0.0) == 0.0 for values in metrics.values())


@pytest.mark.slow  # two runs each
@pytest.mark.parametrize(
    ("options", "transport"),
    [
        pytest.param(["worker.rollout.name=hf"], [COLLECTIVE], id="hf"),
        pytest.param(ADAPTERS, [], id="adapters"),
        pytest.param(ADAPTERS, [COLLECTIVE], id="adapters-collective"),
        pytest.param(ADAPTERS, [DELTA], id="adapters-delta"),
        pytest.param(MERGED, [DELTA], id="merged-delta"),
    ],
)
def test_own_processes_equal_shared_ones_with_other_engines_and_adapters(
    options, transport, arguments, tmp_path
):
    shared = train_with(1, tmp_path / "shared", *arguments, *options)
    own = train_with(2, tmp_path / "own", *arguments, *options, *OWN, *transport)

    check_equal(tmp_path / "own", own, shared, tmp_path / "shared")


@pytest.mark.slow  # three runs each
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(AHEAD, id="one_step_off"),
        pytest.param(STREAM, id="stream"),
        pytest.param([*PARTIAL, "trainer.n_gpus_per_node=2"], id="partial"),
        pytest.param([*AHEAD, *SAMPLED], id="one_step_off, sampled"),
        pytest.param([*STREAM, *SAMPLED], id="stream, sampled"),
        pytest.param([*PARTIAL, *SAMPLED], id="partial, sampled"),
    ],
)
def test_a_run_that_samples_ahead_is_a_step_old_at_most_and_resumes_bit_for_bit(mode, arguments, tmp_path):
    arguments = [*arguments, *mode]
    unbroken = Run(tmp_path / "unbroken", arguments)
    assert unbroken.end() == 0, unbroken.stderr

    killed_and_resumed(tmp_path / "killed", arguments, HALF)

    found = read_metrics(tmp_path / "unbroken")
    staleness = [metrics["async/staleness_max"] for metrics in found.values()]
    assert staleness[0] == 0.0 and max(staleness) == 1.0
    assert all("source/small/score" in metrics for metrics in found.values())
    one, other = (
        saved_tensors(tmp_path / name / f"global_step_{2 * HALF}") for name in ("unbroken", "killed")
    )
    assert all(one[key].equal(other[key]) for key in one) and len(one) > 20


@pytest.fixture(scope="module")
def conversing(tmp_path_factory):
    """Arguments of runs with a tool that shows pictures, in which some turns are long."""
    folder = tmp_path_factory.mktemp("conversations")
    talkative(save_model(folder / "model", seed=0))
    write_dots(folder, "train", 24, 1)
    write_dots(folder, "val", 4, 2)
    return quickstart_arguments(
        folder,
        folder / "model",
        *OPTIONS,
        "data.max_prompt_length=64",
        "worker.rollout.name=hf",
        "worker.rollout.multi_turn.tools=[zoom]",
        "worker.rollout.multi_turn.max_tokens_per_turn=40",
        f"worker.reward.reward_function={REWARD}:compute_score",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=false",
        "trainer.val_freq=1",
        "trainer.save_limit=-1",
        f"trainer.save_freq={HALF}",
        f"trainer.max_steps={2 * HALF}",
    )


@pytest.mark.slow  # three runs each
@pytest.mark.parametrize("mode", [pytest.param(STREAM, id="stream"), pytest.param(PARTIAL, id="partial")])
def test_conversations_continue_with_newer_weights_and_a_killed_run_resumes_bit_for_bit(
    mode, conversing, tmp_path
):
    arguments = [*conversing, *mode, "trainer.async.staleness_threshold=3"]
    unbroken = Run(tmp_path / "unbroken", arguments)
    assert unbroken.end() == 0, unbroken.stderr

    killed_and_resumed(tmp_path / "killed", arguments, HALF)

    found = read_metrics(tmp_path / "unbroken")
    assert 1.0 < max(metrics["async/staleness_max"] for metrics in found.values()) <= 3.0
    assert max(metrics["async/partial_rate"] for metrics in found.values()) > 0.0
    assert max(metrics["agent/tool_calls"] for metrics in found.values()) > 0.0
    assert found[HALF]["async/in_flight"] > 0.0, "the checkpoint has no unfinished conversation"
    one, other = (
        saved_tensors(tmp_path / name / f"global_step_{2 * HALF}") for name in ("unbroken", "killed")
    )
    assert all(one[key].equal(other[key]) for key in one) and len(one) > 20
