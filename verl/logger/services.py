# SPDX-License-Identifier: Apache-2.0
"""Loggers of optional packages, imported only on use.

Each is configured by the environment variables of its package: `WANDB_MODE`, `SWANLAB_MODE`,
`SWANLAB_API_KEY`, `MLFLOW_TRACKING_URI`, and `TENSORBOARD_DIR` for tensorboard.

The id under which a service knows the run is kept in the run's folder (`wandb_run_id`), so that a resumed run
continues its curves. `WANDB_RUN_ID`, `SWANLAB_RUN_ID` and `MLFLOW_RUN_ID` take precedence.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any
from zlib import crc32

from verl.logger.base import LOGGERS, Generation, Logger, Metrics, Run, flatten, import_optional
from verl.utils.rank_logger import get_logger

GENERATIONS_KEY = "val/generations"
VERBATIM = "    "  # Markdown shows indented text as it is
MLFLOW_PARAMS_PER_CALL = 100  # limit of MLflow
MLFLOW_MAX_PARAM_LENGTH = 500  # characters, the lowest limit of all versions and stores
MLFLOW_FOREIGN = re.compile(r"[^\w\-. /:]", re.ASCII)  # characters that its names must not have
MLFLOW_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")  # other errors are of the server, not of a name

logger = get_logger(__name__)


def kept_id(run: Run, service: str) -> str | None:
    """Return the id under which a service knows the run that is resumed, if any."""
    file = run.directory / f"{service}_run_id"
    if run.resumed_step is None or not file.is_file() or f"{service.upper()}_RUN_ID" in os.environ:
        return None
    return file.read_text().strip()


def keep_id(run: Run, service: str, run_id: str) -> None:
    file = run.directory / f"{service}_run_id"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{run_id}\n")
    except OSError as error:
        logger.warning(
            "a resumed run will start new curves: logger=%s path=%s cause=%s", service, file, error
        )


class ServiceLogger(Logger):
    """Loses only what a service refuses."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._refused: set[str] = set()

    def send(self, things: Mapping[str, Any], call: Callable[[dict[str, Any]], object]) -> None:
        """Send things by their names at once, each alone if they are refused; warn once of what is lost."""
        batches = [{name: things[name]} for name in things if name in self._refused]
        batches.append({name: value for name, value in things.items() if name not in self._refused})
        for batch in batches:  # which get longer
            try:
                call(batch)
            except Exception as error:
                if getattr(error, "error_code", MLFLOW_REFUSALS[0]) not in MLFLOW_REFUSALS:
                    raise
                if len(batch) > 1:
                    batches += [{name: value} for name, value in batch.items()]
                elif not batch.keys() <= self._refused:
                    self._refused |= batch.keys()
                    logger.warning("a service refuses a name: name=%r cause=%s", *batch, error)


@LOGGERS.register("tensorboard")
class TensorBoardLogger(ServiceLogger):
    """Event files under `<run folder>/tensorboard`, or `$TENSORBOARD_DIR/<project>/<experiment>`."""

    module = "torch.utils.tensorboard"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        directory = run.directory / "tensorboard"
        if "TENSORBOARD_DIR" in os.environ:
            directory = Path(os.environ["TENSORBOARD_DIR"]) / run.project_name / run.experiment_name
        # A resumed run takes the steps after its checkpoint again, which would draw each curve twice.
        first_step = None if run.resumed_step is None else run.resumed_step + 1
        module = import_optional(self.module, "tensorboard")
        self._writer = module.SummaryWriter(str(directory), purge_step=first_step)
        self._writer.add_text("config", indent(json.dumps(run.config, indent=2, default=str), VERBATIM))

    def log(self, metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            self.send({name: value}, partial(self._add, step))
        self._writer.flush()

    def _add(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        text = "\n\n".join(one.as_text() for one in generations)
        self._writer.add_text(GENERATIONS_KEY, indent(text, VERBATIM), step)

    def close(self, failed: bool = False) -> None:
        self._writer.close()


@LOGGERS.register("wandb")
class WandbLogger(ServiceLogger):
    """A Weights & Biases run; validation responses of all steps form one table."""

    module = "wandb"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._wandb = import_optional(self.module, "wandb")
        self._rows: list[list[object]] = []
        known = kept_id(run, "wandb")
        resume = {} if known is None else {"id": known, "resume": "allow", "allow_val_change": True}
        started = self._wandb.init(
            project=run.project_name, name=run.experiment_name, config=run.config, **resume
        )
        keep_id(run, "wandb", started.id)

    def log(self, metrics: Metrics, step: int) -> None:
        self.send(metrics, partial(self._wandb.log, step=step))

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        # A logged table cannot grow, so each step logs a new one with all rows.
        self._rows.extend([step, *generation] for generation in generations)
        table = self._wandb.Table(columns=["step", *Generation._fields], data=self._rows)
        self._wandb.log({GENERATIONS_KEY: table}, step=step)

    def close(self, failed: bool = False) -> None:
        self._wandb.finish(exit_code=int(failed))


@LOGGERS.register("swanlab")
class SwanlabLogger(ServiceLogger):
    """A SwanLab experiment; validation responses are texts."""

    module = "swanlab"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._swanlab = import_optional(self.module, "swanlab")
        if "SWANLAB_API_KEY" in os.environ:
            self._swanlab.login(api_key=os.environ["SWANLAB_API_KEY"])
        known = kept_id(run, "swanlab")
        started = self._swanlab.init(
            project=run.project_name,
            experiment_name=run.experiment_name,
            config=run.config,
            logdir=os.environ.get("SWANLAB_DIR", str(run.directory / "swanlab")),
            mode=os.environ.get("SWANLAB_MODE", "cloud"),
            **({} if known is None else {"id": known, "resume": "allow"}),
        )
        keep_id(run, "swanlab", started.id)

    def log(self, metrics: Metrics, step: int) -> None:
        self.send(metrics, partial(self._swanlab.log, step=step))

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        texts = [self._swanlab.Text(one.as_text(), caption=f"score {one.score:g}") for one in generations]
        if texts:
            self._swanlab.log({GENERATIONS_KEY: texts}, step=step)

    def close(self, failed: bool = False) -> None:
        self._swanlab.finish()


@LOGGERS.register("mlflow")
class MlflowLogger(ServiceLogger):
    """An MLflow run; validation responses of a step are a JSON artifact.

    Characters that its names must not have become `_`; a name that would then be another's has a checksum at
    its end. Parameters that a run has cannot be changed.
    """

    module = "mlflow"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._mlflow = import_optional(self.module, "mlflow")
        self._names: dict[str, str] = {}  # of the metrics
        self._mlflow.set_experiment(run.project_name)
        known = kept_id(run, "mlflow")
        started = self._mlflow.start_run(run_id=known, run_name=run.experiment_name)
        keep_id(run, "mlflow", started.info.run_id)
        if known is None:
            self.send(_mlflow_names(flatten(run.config, "."), {}), self._log_params)

    def _log_params(self, params: Mapping[str, Any]) -> None:
        cut = [(name, str(value)[:MLFLOW_MAX_PARAM_LENGTH]) for name, value in params.items()]
        for start in range(0, len(cut), MLFLOW_PARAMS_PER_CALL):
            self._mlflow.log_params(dict(cut[start : start + MLFLOW_PARAMS_PER_CALL]))

    def log(self, metrics: Metrics, step: int) -> None:
        self.send(_mlflow_names(metrics, self._names), partial(self._mlflow.log_metrics, step=step))

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        self._mlflow.log_dict([one._asdict() for one in generations], f"{GENERATIONS_KEY}/step_{step}.json")

    def close(self, failed: bool = False) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


def _mlflow_names(things: Mapping[str, Any], known: dict[str, str]) -> dict[str, Any]:
    """Return things by MLflow's names, which are kept in `known`; one that need not change keeps its own."""
    new = things.keys() - known.keys()
    for name in sorted(new, key=lambda name: (bool(MLFLOW_FOREIGN.search(name)), name)):
        clean = MLFLOW_FOREIGN.sub("_", name)
        is_taken = clean in known.values()
        known[name] = f"{clean}_{crc32(name.encode(errors='backslashreplace')):08x}" if is_taken else clean
    return {known[name]: value for name, value in things.items()}
