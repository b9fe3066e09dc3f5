# SPDX-License-Identifier: Apache-2.0
"""A checkpoint holds more than the models, and a run resumes from it as if it had not stopped."""

import json
from dataclasses import replace

import pytest
import torch

from tests.helpers.nightly import by_day
from tests.trainer.rollouts.sampling import Engine, make_collector, make_config
from verl.algorithms.controllers import FixedEntropyController, FixedKLController
from verl.checkpoint.manifest import write_manifest
from verl.checkpoint.tracker import find_last_checkpoint
from verl.data.loader import make_loaders
from verl.data.readers import Readers, load_tokenizer
from verl.models.tiny import save_tiny_model
from verl.trainer.rollouts.engines import SharedEngines
from verl.trainer.rollouts.schedule import InTurn
from verl.trainer.run.checkpointing import (
    GROUPS_FILE,
    LOADER_FILE,
    STATE_FILE,
    Done,
    PPORunState,
    done_before,
)
from verl.trainer.setup import endless

FILTERING = {"online_filtering": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "a" * (n + 1), "answer": n}) for n in range(22)))
    return path


def two_of_three_are_mixed(number):
    return [1.0, 1.0] if number % 3 == 0 else [0.0, 1.0]


def start_run(folder, model, rows, manager, trainer=None, **options):
    """A run of the collector and its state, without models: the engine's weights are a number."""
    trainer = {"save_checkpoint_path": str(folder)} | (trainer or {})
    config = make_config(prompts=4, trainer=trainer, **options)
    data = replace(config.data, train_files=str(rows), max_prompt_length=64, num_workers=0)
    actor = replace(config.worker.actor, model=replace(config.worker.actor.model, model_path=str(model)))
    config = replace(config, data=data, worker=replace(config.worker, actor=actor))
    readers = Readers(load_tokenizer(str(model)), None, None, None)
    loader = make_loaders(config.data, readers, folder).train
    engine = Engine(two_of_three_are_mixed, number_of=len)
    collector = make_collector(config, engine, manager, endless(loader))
    return PPORunState(
        config.trainer,
        100,
        4,
        engine,
        loader,
        kl_controller=FixedKLController(0.1),
        entropy_controller=FixedEntropyController(0.0),
        sampling=in_turn(engine, collector, config),
    )


def in_turn(engine, collector, config):
    return InTurn(SharedEngines(engine, config.worker), collector)


def run_steps(state, last_step):
    """Collect step after step; each ends with an update of the weights."""
    seen = []
    while state.step < last_step:
        state.step += 1
        batch, scoring, metrics = state.collector.collect(state.step)
        tensors = {key: value.tolist() for key, value in batch.batch.items()}
        columns = {key: value.tolist() for key, value in batch.non_tensor_batch.items()}
        scores = {
            key: torch.tensor(column).nan_to_num(-1.0).tolist() for key, column in scoring.result().items()
        }
        seen.append((tensors, columns, scores, metrics))
        state.workers.weights += 1.0
    return seen


@pytest.mark.parametrize("stop_after", by_day([1, 2, 3, 4], 2, paths=["verl/trainer"]))
@pytest.mark.parametrize(
    "options",
    [{"algorithm": FILTERING | {"adv_estimator": "remax"}}, {"trainer": {"rejection_sample": True}}],
    ids=["online_filtering", "rejection_sample"],
)
def test_a_run_that_was_stopped_continues_with_the_carried_groups(
    options, stop_after, model, rows, reward_manager, tmp_path
):
    unbroken = run_steps(start_run(tmp_path / "a", model, rows, reward_manager, **options), 6)
    stopped = start_run(tmp_path / "b", model, rows, reward_manager, **options)
    before = run_steps(stopped, stop_after)
    stopped.save()
    stopped.flush()

    resumed = start_run(tmp_path / "b", model, rows, reward_manager, **options)
    resumed.load()

    assert (
        resumed.collector.num_carried == stopped.collector.num_carried == before[-1][3]["filter/carried_out"]
    )
    assert before + run_steps(resumed, 6) == unbroken


def test_a_checkpoint_counts_the_rows_of_all_steps_whatever_their_batches(
    model, rows, reward_manager, tmp_path
):
    state = start_run(tmp_path, model, rows, reward_manager)
    run_steps(state, 3)
    state.save()
    state.flush()
    resumed = start_run(tmp_path, model, rows, reward_manager)
    resumed.rows_per_step = 10
    resumed.load()
    resumed.step += 2
    folder = tmp_path / "global_step_3"

    assert (resumed.before, resumed.rows) == (Done(3, 12), 32)
    assert done_before(folder, 10) == Done(3, 12) and done_before(None, 10) == Done()
    older = json.loads((folder / STATE_FILE).read_text())
    older.pop("rows")
    (folder / STATE_FILE).write_text(json.dumps(older))
    assert done_before(folder, 10) == Done(3, 30)


def test_groups_are_carried_over_the_checkpoints_that_are_compared(model, rows, reward_manager, tmp_path):
    state = start_run(tmp_path, model, rows, reward_manager, algorithm=FILTERING)

    carried = [metrics["filter/carried_out"] for *_, metrics in run_steps(state, 4)]

    assert max(carried) > 0, carried
    state.save()
    state.flush()
    recorded = json.loads((tmp_path / "global_step_4" / STATE_FILE).read_text())
    assert recorded["carried_groups"] == carried[-1]
    assert (tmp_path / "global_step_4" / GROUPS_FILE).is_file() == (carried[-1] > 0)


def save_with_carried_groups(folder, model, rows, manager):
    """Save after a step that carries groups; return the checkpoint."""
    state = start_run(folder, model, rows, manager, algorithm=FILTERING)
    run_steps(state, 2)
    assert state.collector.num_carried > 0
    state.save()
    state.flush()
    return state.saved


def test_a_checkpoint_that_lost_its_carried_groups_is_refused(model, rows, reward_manager, tmp_path):
    (save_with_carried_groups(tmp_path, model, rows, reward_manager) / GROUPS_FILE).unlink()

    with pytest.raises(FileNotFoundError, match=r"carried_groups.pt is missing: no other checkpoint"):
        start_run(tmp_path, model, rows, reward_manager, algorithm=FILTERING).load()


def test_carried_groups_of_other_options_are_refused_by_name(model, rows, reward_manager, tmp_path):
    save_with_carried_groups(tmp_path, model, rows, reward_manager)

    message = r"carries \d groups sampled with other options.*'worker.rollout.n': \(2, 3\)"
    with pytest.raises(ValueError, match=message):
        start_run(tmp_path, model, rows, reward_manager, n=3, algorithm=FILTERING).load()
    with pytest.raises(ValueError, match=r"'algorithm.adv_estimator=remax': \(False, True\)"):
        remax = FILTERING | {"adv_estimator": "remax"}
        start_run(tmp_path, model, rows, reward_manager, algorithm=remax).load()


def test_a_run_that_no_longer_filters_drops_carried_groups_with_a_warning(
    model, rows, reward_manager, tmp_path, caplog
):
    save_with_carried_groups(tmp_path, model, rows, reward_manager)
    resumed = start_run(tmp_path, model, rows, reward_manager)

    with caplog.at_level("WARNING"):
        resumed.load()

    assert resumed.collector.num_carried == 0
    assert "carried groups are dropped" in caplog.text


def test_a_run_that_only_validates_resumes_from_a_checkpoint_without_training_rows(tmp_path):
    folder = tmp_path / "global_step_3"
    (folder / "actor").mkdir(parents=True)
    write_manifest(folder / "actor", {"weights": 5.0})
    torch.save({"epoch": 1}, folder / LOADER_FILE)
    state = {
        "step": 3,
        "kl_controller": FixedKLController(0.1).state_dict(),
        "entropy_controller": FixedEntropyController(0.0).state_dict(),
        "carried_groups": 2,
    }
    (folder / STATE_FILE).write_text(json.dumps(state))
    write_manifest(folder, {"step": 3})
    trainer = {"val_only": True, "load_checkpoint_path": str(folder)}
    config = make_config(trainer=trainer | {"save_checkpoint_path": str(tmp_path / "saved")})
    engine = Engine(two_of_three_are_mixed)
    collector = make_collector(config, engine, manager=None, prompts=endless(None))

    run_state = PPORunState(
        config.trainer,
        0,
        4,
        engine,
        None,
        kl_controller=FixedKLController(0.1),
        entropy_controller=FixedEntropyController(0.0),
        sampling=in_turn(engine, collector, config),
    )
    run_state.load()

    assert run_state.step == 3
    assert engine.weights == 5.0 and collector.num_carried == 0


def test_a_checkpoint_counts_when_it_is_written_and_the_next_waits_for_it(
    model, rows, reward_manager, tmp_path
):
    state = start_run(tmp_path, model, rows, reward_manager)
    run_steps(state, 1)
    state.workers.is_written = False

    state.save()
    state.publish()

    assert find_last_checkpoint(tmp_path) is None
    run_steps(state, 2)
    state.save()
    assert find_last_checkpoint(tmp_path) == tmp_path / "global_step_1" == state.saved
    state.workers.is_written = True
    state.publish()
    assert find_last_checkpoint(tmp_path) == tmp_path / "global_step_2" == state.saved


def test_a_checkpoint_is_scored_by_the_last_validation_also_after_a_resume(
    model, rows, reward_manager, tmp_path
):
    # Validated at steps 2 and 5, saved at 1, 3, 4 and, resumed, 6.
    state = start_run(tmp_path, model, rows, reward_manager)
    tracker = state.checkpoints
    best = {}
    for step, score in ((1, None), (2, 0.5), (3, None), (4, None)):
        state.step = step
        if score is not None:
            state.record_score(score)
        else:
            state.save()
            state.flush()
            best[step] = (tracker.record.best_global_step, tracker.record.best_val_reward_score)
    assert best == {1: (None, None), 3: (3, 0.5), 4: (3, 0.5)}

    resumed = start_run(tmp_path, model, rows, reward_manager)
    resumed.load()
    assert resumed.best == (2, 0.5)
    resumed.step = 5
    resumed.save()
    resumed.flush()
    assert resumed.checkpoints.record.best_global_step == 3
    resumed.record_score(0.75)
    resumed.step = 6
    resumed.save()
    resumed.flush()

    record = resumed.checkpoints.record
    assert (record.best_global_step, record.best_val_reward_score) == (6, 0.75)
    assert resumed.best == (5, 0.75)


def test_a_failure_to_write_is_logged_and_leaves_the_checkpoint_before(
    model, rows, reward_manager, tmp_path, caplog
):
    state = start_run(tmp_path, model, rows, reward_manager)
    run_steps(state, 1)
    state.save()
    state.flush()
    state.workers.save_problem = "rank 1: OSError: [Errno 28] No space left on device"
    run_steps(state, 2)
    state.save()

    with pytest.raises(OSError, match=r"step 2 could not be saved to `trainer.save_checkpoint_path`: rank 1"):
        state.flush()
    assert "the next step tries again: step=2" in caplog.text and "No space left on device" in caplog.text
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert [folder.name for folder in tmp_path.glob("global_step_*")] == ["global_step_1"]
    state.workers.save_problem = None
    run_steps(state, 3)
    state.save()
    state.flush()
    assert find_last_checkpoint(tmp_path) == tmp_path / "global_step_3"
    resumed = start_run(tmp_path, model, rows, reward_manager)
    resumed.load()
    assert resumed.step == 3
