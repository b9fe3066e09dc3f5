# SPDX-License-Identifier: Apache-2.0
"""Every logger with its real package, offline."""

import json
import sys

import pytest

from verl.logger.base import LOGGERS, Generation, Run
from verl.logger.tracker import Tracker

CONFIG = {"trainer": {"max_steps": 2, "logger": ["file"]}, "data": {"train_files": "x.jsonl", "seed": None}}
GENERATIONS = [Generation("1 + 1?", "<think>easy</think> 2", "2", 1.0), Generation("2 + 2?", "5", "4", 0.0)]


def log_a_run(names: list[str], directory, steps=(1, 2), **options) -> None:
    run = Run("project", "experiment", directory, CONFIG, total_steps=2, **options)
    with Tracker(names, run) as tracker:
        for step in steps:
            tracker.begin_step(step)
            tracker.stage("gen")
            tracker.progress(1, 2, "responses")
            tracker.log({"actor/pg_loss": 0.5 * step, "critic/score/mean": 1.0}, step)
            tracker.log_generations(GENERATIONS, step)


def test_the_loggers_are_those_of_the_reference():
    assert LOGGERS.names() == ["console", "file", "mlflow", "swanlab", "tensorboard", "wandb"]


def test_an_unknown_logger_is_rejected_before_any_opens(tmp_path):
    with pytest.raises(ValueError, match=r"`trainer.logger` must be one of .*'wandb'.*, got 'wandbb'"):
        Tracker(["file", "wandbb"], Run("p", "e", tmp_path))

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "package"), [("wandb", "wandb"), ("swanlab", "swanlab"), ("mlflow", "mlflow-skinny")]
)
def test_a_logger_without_its_package_names_what_to_install(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, name, None)  # makes `import` fail as if it were not installed

    with pytest.raises(
        ModuleNotFoundError,
        match=rf"`trainer.logger` '{name}' needs .*: pip install {package}, or leave '{name}' out of",
    ):
        Tracker([name], Run("p", "e", tmp_path))


def test_a_name_given_twice_logs_once(tmp_path):
    log_a_run(["file", "file"], tmp_path)

    assert len((tmp_path / "experiment_log.jsonl").read_text().splitlines()) == 2


def test_console_and_file_log_the_same_run(tmp_path, capsys):
    log_a_run(["console", "file"], tmp_path, console="full")

    assert "pg_loss 0.5" in capsys.readouterr().out
    assert json.loads((tmp_path / "experiment_log.jsonl").read_text().splitlines()[1])["actor"] == {
        "pg_loss": 1.0
    }


def test_tensorboard_gets_scalars_and_responses(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_a_run(["tensorboard"], tmp_path)

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/pg_loss")] == [(1, 0.5), (2, 1.0)]
    text = events.Tensors("val/generations/text_summary")[1].tensor_proto.string_val[0].decode()
    assert "[response] <think>easy</think> 2" in text


def test_tensorboard_drops_the_steps_that_a_resumed_run_takes_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_a_run(["tensorboard"], tmp_path, steps=(1, 2, 3))
    log_a_run(["tensorboard"], tmp_path, steps=(2, 3, 4), resumed_step=1)

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("actor/pg_loss")] == [1, 2, 3, 4]


def test_wandb_gets_metrics_and_one_growing_table(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")

    log_a_run(["wandb"], tmp_path)

    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json")]
    assert sorted(len(table["data"]) for table in tables) == [2, 4]
    assert tables[0]["columns"] == ["step", "prompt", "response", "ground_truth", "score"]
    assert [1, *GENERATIONS[0]] in max(tables, key=lambda table: len(table["data"]))["data"]


@pytest.mark.parametrize("service", ["wandb", "swanlab", "mlflow"])
def test_a_resumed_run_keeps_its_id_of_a_service_and_a_new_one_gets_another(service, tmp_path, monkeypatch):
    package = pytest.importorskip(service)
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    if service == "mlflow":
        pytest.importorskip("sqlalchemy")
        package.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    run, ids = tmp_path / "run", []

    for step, is_resumed in enumerate((False, True, False), start=1):
        log_a_run([service], run, steps=(step,), resumed_step=step - 1 if is_resumed else None)
        ids.append((run / f"{service}_run_id").read_text().strip())

    assert ids[0] == ids[1] != ids[2]


WANDB = """
import json, os, pathlib, types

calls = pathlib.Path(os.environ["WANDB_DIR"], "calls")
Table = types.SimpleNamespace

def note(*call):
    with calls.open("a") as file:
        file.write(json.dumps(call) + "\\n")

def init(*, project, name, config, **resume):
    note("init", project, name, resume)
    return types.SimpleNamespace(id=resume.get("id", f"new{calls.stat().st_size}"))

def log(metrics, step):
    note("log", step)

def finish(exit_code):
    note("finish", exit_code)
"""


def test_a_resumed_run_asks_wandb_for_the_run_of_its_folder(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    run = tmp_path / "run"

    log_a_run(["wandb"], run, steps=())
    first = (run / "wandb_run_id").read_text().strip()
    log_a_run(["wandb"], run, steps=(), resumed_step=1)
    log_a_run(["wandb"], tmp_path / "another", steps=(), resumed_step=1)  # of a checkpoint that was moved
    monkeypatch.setenv("WANDB_RUN_ID", "the user's")
    log_a_run(["wandb"], run, steps=(), resumed_step=1)

    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    resumed = {"id": first, "resume": "allow", "allow_val_change": True}
    assert [call[3] for call in calls if call[0] == "init"] == [{}, resumed, {}, {}]
    assert [call for call in calls if call[0] == "finish"] == [["finish", 0]] * 4
    monkeypatch.delitem(sys.modules, "wandb")


def test_mlflow_gets_params_metrics_and_an_artifact(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")  # the small package, mlflow-skinny, keeps no local database
    monkeypatch.chdir(tmp_path)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    try:
        log_a_run(["mlflow"], tmp_path)

        (run,) = mlflow.search_runs(experiment_names=["project"], output_format="list")
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "actor/pg_loss")
        stored = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/val/generations/step_2.json")
    finally:
        mlflow.set_tracking_uri(before)
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 1.0)]
    assert run.data.params["trainer.max_steps"] == "2"
    assert run.info.status == "FINISHED"
    assert stored == [one._asdict() for one in GENERATIONS]


def test_swanlab_gets_metrics_and_texts(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)

    log_a_run(["swanlab"], tmp_path)

    written = [path for path in (tmp_path / "swanlab").rglob("*") if path.is_file()]
    assert any(b"actor/pg_loss" in path.read_bytes() for path in written)
