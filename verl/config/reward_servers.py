# SPDX-License-Identifier: Apache-2.0
"""Sections `reward_servers.NAME`: models that judge or score responses, served by the run or by others."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from verl.config.algorithm import AlgorithmConfig
from verl.config.files.model_files import context_problem, folder_problem, read_model_config, weights_problem
from verl.config.files.paths import model_source, writable_folder
from verl.config.model import TINY, dtype_option
from verl.config.schema import option
from verl.config.trainer import TrainerConfig, divisible
from verl.config.worker import WorkerConfig

TEACHER = "teacher"
KINDS = ("chat", "score", "classify", "embed", TEACHER)


@dataclass(frozen=True)
class RewardServerConfig:
    """A model for the reward function, which gets it as `servers["NAME"]`."""

    kind: str = option(
        "chat",
        "What the model does: answer messages, score pairs of texts, classify a text, embed it, or teach"
        " (`distillation.teacher_models.NAME.server`).",
        choices=KINDS,
    )
    model_path: str | None = option(
        None, "Folder or hub name of a model that the run serves.", resolve=model_source
    )
    url: str | None = option(
        None, "Endpoint that is running already, such as http://host:8000/v1; nothing is started for it."
    )
    served_model: str | None = option(None, "Name of the model at `url`; null is the name of the section.")
    api_key_env: str | None = option(None, "Environment variable that holds the key of `url`.")
    n_gpus: int | None = option(
        None,
        "GPUs of all replicas, on CPU processes; null is `tensor_parallel_size`, those of one replica.",
        minimum=1,
    )
    colocate: bool = option(
        True,
        "Share the GPUs that train: the server sleeps while they do, and wakes when the responses of a step"
        " are sampled; false takes GPUs of its own, which score while sampling continues.",
    )
    tensor_parallel_size: int = option(1, "GPUs of a replica, all on one node.", minimum=1)
    max_model_len: int | None = option(
        None, "Maximum tokens of a question with its answer; null is the model's own.", minimum=1
    )
    gpu_memory_utilization: float = option(0.6, "GPU memory fraction while awake.", minimum=0.01, maximum=1.0)
    dtype: str = dtype_option("bf16", "Data type of weights and activations.")
    max_num_seqs: int | None = option(
        None, "Maximum requests that a replica computes at once; null is vLLM's default.", minimum=1
    )
    enforce_eager: bool = option(False, "Disable CUDA graphs: faster to start, slower to answer.")
    trust_remote_code: bool = option(False, "Allow Python code that comes with the model.")
    engine_arguments: dict[str, Any] = option(
        dict, "Further arguments of vLLM's server, such as {limit_mm_per_prompt: {image: 16}}."
    )
    sampling: dict[str, Any] = option(
        dict, "Fields of each chat request, over {temperature: 0.0, max_tokens: 512}."
    )
    cache_dir: str | None = option(
        None, "Folder that keeps answers: equal questions are asked once.", resolve=writable_folder
    )
    max_concurrency: int = option(256, "Concurrent requests of a scoring process.", minimum=1)
    max_retries: int = option(
        6, "Attempts after the first at statuses 408, 409, 429 and 5xx, and at connection errors of `url`.",
        minimum=0,
    )  # fmt: skip
    timeout_s: float = option(120.0, "Time limit of an attempt in seconds.", minimum=TINY)
    start_timeout_s: float = option(
        600.0, "Seconds that a server may take to start, and that requests wait for one that restarts.",
        minimum=TINY,
    )  # fmt: skip
    max_restarts: int = option(3, "Restarts of the server's replicas in a run.", minimum=0)

    @property
    def is_served(self) -> bool:
        """True if the run starts the server."""
        return self.url is None

    @property
    def teaches(self) -> bool:
        """True if `distillation` asks the model, and not the reward function."""
        return self.kind == TEACHER

    @property
    def takes_devices(self) -> bool:
        return self.is_served and not self.colocate

    @property
    def num_devices(self) -> int:
        return self.n_gpus or self.tensor_parallel_size

    @property
    def num_replicas(self) -> int:
        return self.num_devices // self.tensor_parallel_size

    def problems(self, path: str) -> Iterator[str]:
        if (self.model_path is None) == (self.url is None):
            which = "neither" if self.url is None else "both"
            yield f"`{path}` needs `{path}.model_path` or `{path}.url`, got {which}: set one of them"
        elif self.url is not None:
            yield from self._endpoint_problems(path, self.url)
        else:
            yield from self._model_problems(path)
        if self.sampling and self.kind != "chat":
            yield f"`{path}.sampling` must be empty with `{path}.kind={self.kind}`, got {self.sampling}"
        if self.teaches and self.is_served and self.colocate:
            yield (
                f"`{path}.colocate` must be false with `{path}.kind={TEACHER}`, which is asked while others"
                f" have the GPUs that train: set `{path}.colocate=false`, or load the teacher where others"
                " train, `distillation.teacher_models.NAME.model_path`"
            )
        if self.teaches and self.cache_dir is not None:
            yield f"`{path}.cache_dir` has no effect with `{path}.kind={TEACHER}`: remove it"

    def _endpoint_problems(self, path: str, url: str) -> Iterator[str]:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield f"`{path}.url` must be like http://host:8000/v1, got {url!r}"
        defaults = type(self)()
        own = ("n_gpus", "tensor_parallel_size", "max_model_len", "engine_arguments")
        for name in own:
            if getattr(self, name) != getattr(defaults, name):
                yield f"`{path}.{name}` has no effect on a server that runs at `{path}.url`: remove it"

    def _model_problems(self, path: str) -> Iterator[str]:
        for name in ("served_model", "api_key_env"):
            if getattr(self, name) is not None:
                yield f"`{path}.{name}` belongs to `{path}.url`, and the run serves `model_path`: remove it"
        if self.num_devices % self.tensor_parallel_size:
            yield (
                f"`{path}.n_gpus` ({self.n_gpus}) must be divisible by `{path}.tensor_parallel_size`"
                f" ({self.tensor_parallel_size}): replicas have this many GPUs each"
            )
        model = self.model_path or ""
        problem = folder_problem(model, path, has_lora=False) or weights_problem(model)
        if problem is not None:
            yield f"`{path}.model_path` {problem}"
        own = {entry.name for entry in fields(self)} & self.engine_arguments.keys()
        if own:
            yield f"`{path}.engine_arguments` has {sorted(own)}, which are options: set `{path}.{min(own)}`"
        config = read_model_config(model)
        heads = None if config is None else config.get("text_config", config).get("num_attention_heads")
        if isinstance(heads, int) and heads % self.tensor_parallel_size:
            yield (
                f"`{path}.tensor_parallel_size` ({self.tensor_parallel_size}) must divide the model's {heads}"
                f" attention heads ({model})"
            )
        if self.max_model_len is not None:
            key = f"`{path}.max_model_len` ({self.max_model_len})"
            yield from context_problem(key, self.max_model_len, model, {})


def without_teachers(servers: Mapping[str, RewardServerConfig]) -> dict[str, RewardServerConfig]:
    """Return the models that the reward function asks."""
    return {name: server for name, server in servers.items() if not server.teaches}


def server_problems(
    servers: Mapping[str, RewardServerConfig],
    worker: WorkerConfig,
    algorithm: AlgorithmConfig,
    trainer: TrainerConfig,
) -> Iterator[str]:
    """Yield the problems of servers together with the rest of a run."""
    asked = sorted(without_teachers(servers))
    if asked and worker.scoring.reward_function is None:
        yield f"`worker.reward.reward_function` must be set with `reward_servers`: only it asks {asked}"
    for name, server in servers.items():
        if server.is_served and server.colocate and not server.teaches:
            yield from _colocation_problems(f"reward_servers.{name}", server, algorithm, trainer)


def _colocation_problems(
    path: str, server: RewardServerConfig, algorithm: AlgorithmConfig, trainer: TrainerConfig
) -> Iterator[str]:
    """Yield why a server cannot wake after sampling and sleep before training."""
    key, mode = f"`{path}.colocate`", trainer.async_training.mode
    if mode != "off":
        yield (
            f"{key} must be false with `trainer.async_training.mode={mode}`, which samples at any time: give"
            f" the server GPUs of its own, `{path}.colocate=false`"
        )
    for option_key, is_set in (
        ("algorithm.online_filtering=true", algorithm.online_filtering),
        ("trainer.rejection_sample=true", trainer.rejection_sample),
        (f"algorithm.adv_estimator={algorithm.adv_estimator}", "reward_baselines" in algorithm.needs),
    ):
        if is_set:
            yield (
                f"{key} must be false with `{option_key}`, which needs scores while the rollout engine is"
                f" awake: give the server GPUs of its own, `{path}.colocate=false`"
            )
    if server.num_devices > trainer.world_size:
        yield (
            f"`{path}.n_gpus` ({server.num_devices}) must be at most the {trainer.world_size} GPUs that"
            f" train, which it shares: lower it, or set `{path}.colocate=false`"
        )
    key, size = f"`{path}.tensor_parallel_size`", server.tensor_parallel_size
    yield from divisible("`trainer.n_gpus_per_node`", trainer.n_gpus_per_node, key, size)
