# SPDX-License-Identifier: Apache-2.0
"""Every logger with its real package, offline."""

import importlib
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


MLFLOW = """
import os, re, types

RUNS = {}  # by their ids
active = None

class MlflowException(Exception):
    error_code = "INVALID_PARAMETER_VALUE"

def check_names(things):
    for name in things:
        if not re.fullmatch(r"[A-Za-z0-9_\\-. /:]{1,250}", name) or os.path.normpath(name) != name:
            raise MlflowException(f"Invalid name {name!r}")

def set_experiment(name): ...

def start_run(run_id, run_name):
    global active
    if active is not None:
        raise Exception("Run is already active")
    run_id = run_id or os.environ.get("MLFLOW_RUN_ID") or f"run{len(RUNS)}"
    active = RUNS.setdefault(run_id, types.SimpleNamespace(params={}, metrics={}, calls=0))
    active.status = "RUNNING"
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

def log_params(params):
    check_names(params)
    assert len(params) <= 100
    for name, value in params.items():
        if active.params.get(name, value) != value:
            raise MlflowException(f"Changing param values is not allowed: {name}")
    active.params |= params

def log_metrics(metrics, step):
    active.calls += 1
    check_names(metrics)
    for name, value in metrics.items():
        active.metrics.setdefault(name, []).append((step, value))

def log_dict(dictionary, artifact_file): ...

def end_run(status):
    global active
    active.status, active = status, None
"""


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """A stand-in for the service that refuses what its documentation says, whole calls at once."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mlflow.py").write_text(MLFLOW)
    monkeypatch.syspath_prepend(tmp_path / "site")
    sys.modules.pop("mlflow", None)
    yield importlib.import_module("mlflow")
    sys.modules.pop("mlflow", None)


def log_steps(name, folder, metrics, config=CONFIG, texts=()):
    with Tracker([name], Run("project", "experiment", folder, config)) as tracker:
        for step in (1, 2, 3):
            tracker.log({key: value * step for key, value in metrics.items()}, step)
            if texts:
                tracker.log_generations([Generation("q", "r", text, 1.0) for text in texts], step)


def test_mlflow_gets_names_that_it_takes_and_loses_only_what_it_refuses(mlflow, tmp_path, caplog):
    config = {"reward": {"acc@1": 2, "..": 1}, "data": {"seed": 3}} | {f"{n}": n for n in range(150)}

    log_steps("mlflow", tmp_path, {"reward/acc@1": 0.5, "actor//loss": 1.0, "actor/loss": 2.0}, config)

    (run,) = mlflow.RUNS.values()
    assert run.metrics == {
        "reward/acc_1": [(1, 0.5), (2, 1.0), (3, 1.5)], "actor/loss": [(1, 2.0), (2, 4.0), (3, 6.0)],
    }  # fmt: skip
    assert run.params == {"reward.acc_1": "2", "reward...": "1", "data.seed": "3"} | {
        f"{n}": f"{n}" for n in range(150)
    }
    assert run.status == "FINISHED"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "a service refuses a name: name='actor//loss' cause=Invalid name" in warning
    assert run.calls == 1 + 3 + 2 * 2  # all at once, each alone, then those that it takes and the other one


def test_names_that_mlflow_cannot_tell_apart_stay_distinct_and_those_that_it_takes_stay_as_they_are(
    mlflow, tmp_path
):
    names = {"acc@1": 1.0, "acc#1": 2.0, "acc_1": 3.0, "b": 4.0}
    config = {"lr": {"a|b": 1, "a(b": 2}}

    log_steps("mlflow", tmp_path, names, config)
    log_steps("mlflow", tmp_path, dict(reversed(names.items())), config)

    first, second = mlflow.RUNS.values()
    assert first.metrics == second.metrics and first.params == second.params
    assert {name: points[0][1] for name, points in first.metrics.items()} == {
        "acc_1_a0d5cb4b": 1.0, "acc_1_ee05f32f": 2.0, "acc_1": 3.0, "b": 4.0,
    }  # fmt: skip
    assert sorted(first.params.values()) == ["1", "2"] and "lr.a_b" in first.params


def test_a_metric_keeps_its_name_of_mlflow_when_another_comes_later(mlflow, tmp_path):
    with Tracker(["mlflow"], Run("project", "experiment", tmp_path)) as tracker:
        for step, names in enumerate((["acc#1"], ["acc@1"], ["acc_1", "acc#1"]), start=1):
            tracker.log(dict.fromkeys(names, 1.0), step)

    (run,) = mlflow.RUNS.values()
    assert sorted(len(points) for points in run.metrics.values()) == [1, 1, 2]
    assert [step for step, _ in run.metrics["acc_1"]] == [1, 3], "`acc#1` was first"


def test_a_run_of_mlflow_that_is_continued_with_other_options_keeps_its_parameters(
    mlflow, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("MLFLOW_RUN_ID", "mine")
    log_steps("mlflow", tmp_path, {"loss": 1.0}, {"lr": 1, "seed": 1})
    log_steps("mlflow", tmp_path, {"loss": 1.0}, {"lr": 2, "seed": 1, "new": 3})

    assert mlflow.RUNS["mine"].params == {"lr": "1", "seed": "1", "new": "3"}
    assert len(mlflow.RUNS["mine"].metrics["loss"]) == 6 and mlflow.RUNS["mine"].status == "FINISHED"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "name='lr' cause=Changing param values" in warning


def test_a_service_that_is_down_is_not_asked_for_each_name(mlflow, tmp_path, monkeypatch, caplog):
    asked = []

    def log_metrics(metrics, step):
        asked.append(step)
        raise type("RestException", (Exception,), {"error_code": "TEMPORARILY_UNAVAILABLE"})("down")

    monkeypatch.setattr(mlflow, "log_metrics", log_metrics)

    log_steps("mlflow", tmp_path, {"a": 1.0, "b": 1.0})

    assert asked == [1, 2, 3]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "a logger loses lines, the run continues: logger=mlflow cause=RestException: down" in warning


SERVICE = """
import types

logged, Table, Text = [], types.SimpleNamespace, str

def init(**options):
    return types.SimpleNamespace(id="new")

def log(things, step):
    for name in things:
        if "@" in name:
            raise ValueError(f"a name with @: {name}")
    logged.append((step, things))

def finish(**options): ...
"""


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_service_loses_only_the_name_that_it_refuses(name, tmp_path, monkeypatch, caplog):
    (tmp_path / f"{name}.py").write_text(SERVICE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)

    log_steps(name, tmp_path, {"a": 1.0, "acc@1": 1.0, "b": 1.0})

    found = {(step, *pair) for step, things in sys.modules[name].logged for pair in things.items()}
    assert found == {(step, key, float(step)) for step in (1, 2, 3) for key in ("a", "b")}
    assert [record.args[0] for record in caplog.records if "refuses a name" in record.msg] == ["acc@1"]
    sys.modules.pop(name)


def test_tensorboard_loses_only_the_name_that_it_refuses(tmp_path, caplog):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_steps("tensorboard", tmp_path, {"a": 1.0, "half \ud800": 1.0, "b": 1.0}, texts=["half \ud800"])

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert len(events.Tensors("val/generations/text_summary")) == 3
    assert events.Tags()["scalars"] == ["a", "b"]
    assert [event.value for event in events.Scalars("b")] == [1.0, 2.0, 3.0]
    assert [record.args[0] for record in caplog.records if "refuses a name" in record.msg] == ["half \ud800"]


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
    sys.modules.pop("wandb")


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
