# SPDX-License-Identifier: Apache-2.0
"""Loggers that need an optional package, imported only on use.

Each is configured by the environment variables of its package: `WANDB_MODE`, `SWANLAB_MODE`,
`SWANLAB_API_KEY`, `MLFLOW_TRACKING_URI`, and `TENSORBOARD_DIR` for tensorboard.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

from verl.logger.base import LOGGERS, Generation, Logger, Metrics, Run, flatten, import_optional

GENERATIONS_KEY = "val/generations"
VERBATIM = "    "  # Markdown shows indented text as it is
MLFLOW_PARAMS_PER_CALL = 100  # limit of MLflow
MLFLOW_MAX_PARAM_LENGTH = 500  # characters, the lowest limit of all versions and stores


@LOGGERS.register("tensorboard")
class TensorBoardLogger(Logger):
    """Event files under `<run folder>/tensorboard`, or `$TENSORBOARD_DIR/<project>/<experiment>`."""

    module = "torch.utils.tensorboard"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        directory = run.directory / "tensorboard"
        if "TENSORBOARD_DIR" in os.environ:
            directory = Path(os.environ["TENSORBOARD_DIR"]) / run.project_name / run.experiment_name
        self._writer = import_optional(self.module, "tensorboard").SummaryWriter(str(directory))
        self._writer.add_text("config", indent(json.dumps(run.config, indent=2, default=str), VERBATIM))

    def log(self, metrics: Metrics, step: int) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        text = "\n\n".join(one.as_text() for one in generations)
        self._writer.add_text(GENERATIONS_KEY, indent(text, VERBATIM), step)

    def close(self, failed: bool = False) -> None:
        self._writer.close()


@LOGGERS.register("wandb")
class WandbLogger(Logger):
    """A Weights & Biases run; validation responses of all steps form one table."""

    module = "wandb"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._wandb = import_optional(self.module, "wandb")
        self._rows: list[list[object]] = []
        self._wandb.init(project=run.project_name, name=run.experiment_name, config=run.config)

    def log(self, metrics: Metrics, step: int) -> None:
        self._wandb.log(dict(metrics), step=step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        # A logged table cannot grow, so each step logs a new one with all rows.
        self._rows.extend([step, *generation] for generation in generations)
        table = self._wandb.Table(columns=["step", *Generation._fields], data=self._rows)
        self._wandb.log({GENERATIONS_KEY: table}, step=step)

    def close(self, failed: bool = False) -> None:
        self._wandb.finish(exit_code=int(failed))


@LOGGERS.register("swanlab")
class SwanlabLogger(Logger):
    """A SwanLab experiment; validation responses are texts."""

    module = "swanlab"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._swanlab = import_optional(self.module, "swanlab")
        if "SWANLAB_API_KEY" in os.environ:
            self._swanlab.login(api_key=os.environ["SWANLAB_API_KEY"])
        self._swanlab.init(
            project=run.project_name,
            experiment_name=run.experiment_name,
            config=run.config,
            logdir=os.environ.get("SWANLAB_DIR", str(run.directory / "swanlab")),
            mode=os.environ.get("SWANLAB_MODE", "cloud"),
        )

    def log(self, metrics: Metrics, step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        texts = [self._swanlab.Text(one.as_text(), caption=f"score {one.score:g}") for one in generations]
        if texts:
            self._swanlab.log({GENERATIONS_KEY: texts}, step=step)

    def close(self, failed: bool = False) -> None:
        self._swanlab.finish()


@LOGGERS.register("mlflow")
class MlflowLogger(Logger):
    """An MLflow run; validation responses of a step are a JSON artifact."""

    module = "mlflow"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._mlflow = import_optional(self.module, "mlflow")
        self._mlflow.set_experiment(run.project_name)
        self._mlflow.start_run(run_name=run.experiment_name)
        flat = flatten(run.config, ".").items()
        params = [(key, str(value)[:MLFLOW_MAX_PARAM_LENGTH]) for key, value in flat]
        for start in range(0, len(params), MLFLOW_PARAMS_PER_CALL):
            self._mlflow.log_params(dict(params[start : start + MLFLOW_PARAMS_PER_CALL]))

    def log(self, metrics: Metrics, step: int) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        self._mlflow.log_dict([one._asdict() for one in generations], f"{GENERATIONS_KEY}/step_{step}.json")

    def close(self, failed: bool = False) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")
