# SPDX-License-Identifier: Apache-2.0
"""Runs that sample in other processes, or over several steps: a step ahead, as a stream, partially."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.runs import Run, killed_and_resumed, saved_tensors
from tests.helpers.agent_runs import OPTIONS, save_model, talkative, write_dots
from tests.helpers.training import QUICKSTART, learned, quickstart_arguments, read_metrics, train
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))
from shapes import write_questions

pytestmark = pytest.mark.heavy

REWARD = Path(__file__).with_name("scored_by_letters.py")
COLLECTIVE = "worker.rollout.weight_transport=collective"
OWN = ["worker.hybrid_engine=false", "trainer.n_gpus_for_rollout=1"]
AHEAD = [*OWN, "trainer.async.mode=one_step_off"]
STREAM = [*OWN, "trainer.async.mode=stream", "trainer.async.deterministic=true"]
PARTIAL = ["trainer.async.mode=partial", "trainer.async.deterministic=true"]
ADAPTERS = ["worker.actor.model.lora.rank=4", "worker.rollout.lora_sync=adapter"]
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


@pytest.mark.parametrize(
    ("options", "transport"),
    [
        pytest.param(["worker.rollout.name=hf"], [COLLECTIVE], id="hf"),
        pytest.param(["worker.rollout.name=vllm"], [COLLECTIVE], marks=pytest.mark.slow, id="vllm"),
        pytest.param(ADAPTERS, [], id="adapters"),
        pytest.param(ADAPTERS, [COLLECTIVE], marks=pytest.mark.slow, id="adapters-collective"),
    ],
)
def test_sampling_in_turn_in_other_processes_equals_sampling_in_the_same_bit_for_bit(
    options, transport, arguments, tmp_path
):
    arguments = [*arguments, *options]

    with cores(1):  # two processes on two cores have a thread each, and sums depend on the number of threads
        shared = train(tmp_path / "shared", *arguments)
    with cores(2):
        own = train(tmp_path / "own", *arguments, *OWN, *transport)

    assert {step: learned(values) for step, values in own.items()} == {
        step: learned(values) for step, values in shared.items()
    }
    one, other = (saved_tensors(tmp_path / name / f"global_step_{2 * HALF}") for name in ("shared", "own"))
    assert all(one[key].equal(other[key]) for key in other) and len(other) > 20


@pytest.mark.parametrize(("where", "mode"), [(OWN, STREAM), ([], PARTIAL)], ids=["stream", "partial"])
def test_a_run_without_staleness_equals_sampling_in_turn_bit_for_bit(where, mode, arguments, tmp_path):
    corrected = [*where, "algorithm.rollout_correction.rollout_is=token"]  # as by default with the modes
    in_turn = train(tmp_path / "in_turn", *arguments, *corrected)
    streamed = train(tmp_path / "streamed", *arguments, *mode, "trainer.async.staleness_threshold=0")

    for step, values in in_turn.items():
        without = {key: value for key, value in streamed[step].items() if not key.startswith("async/")}
        assert learned(without) == learned(values)
    assert {values["async/staleness_max"] for values in streamed.values()} == {0.0}
    one, other = (
        saved_tensors(tmp_path / name / f"global_step_{2 * HALF}") for name in ("in_turn", "streamed")
    )
    assert all(one[key].equal(other[key]) for key in other) and len(other) > 20


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(AHEAD, marks=pytest.mark.slow, id="one_step_off"),
        pytest.param(STREAM, id="stream"),
        pytest.param([*PARTIAL, "trainer.n_gpus_per_node=2"], marks=pytest.mark.slow, id="partial"),
    ],
)
def test_a_run_that_samples_ahead_is_a_step_old_at_most_and_resumes_bit_for_bit(mode, arguments, tmp_path):
    arguments = [*arguments, *mode]
    unbroken = Run(tmp_path / "unbroken", arguments)
    assert unbroken.end() == 0, unbroken.stderr

    killed_and_resumed(tmp_path / "killed", arguments, HALF)

    staleness = [metrics["async/staleness_max"] for metrics in read_metrics(tmp_path / "unbroken").values()]
    assert staleness[0] == 0.0 and max(staleness) == 1.0
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


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(STREAM, id="stream"),
        pytest.param(PARTIAL, marks=pytest.mark.slow, id="partial"),
    ],
)
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
