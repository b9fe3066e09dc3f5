# SPDX-License-Identifier: Apache-2.0
"""An unmodified environment of the package `verifiers` (its v1 API): one episode per conversation.

Its harness leads the conversation, and its model client is the endpoint of the run.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from verifiers.v1 import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from verl.agents.harnesses.policy import AsyncPolicy

RUNTIME = {"type": "subprocess"}  # here; the package's own default is a service


async def run(
    row: Mapping[str, Any],
    policy: AsyncPolicy,
    environment: str,
    config: Mapping[str, Any] | None = None,
    index_key: str = "index",
) -> float:
    """Run an episode and return the mean reward of its traces.

    Args:
        environment: The id of a taskset, as `vf-eval` takes it: a package that can be imported.
        config: Options of the environment, as its section `env`.
        index_key: Column of the number of a row's task. Rows without it are tasks themselves, in columns that
            are named as the fields of the taskset's data.
    """
    options = {"agent": {"runtime": RUNTIME}} | dict(config or {})
    options["taskset"] = {**options.get("taskset", {}), "id": environment}
    loaded = load_environment(resolve_env_config(options))
    task = _task_of(loaded.taskset, row, index_key)
    client = EvalClientConfig(base_url=policy.base_url, api_key_var="OPENAI_API_KEY")
    async with loaded.serving():
        episode = await loaded.run_episode(task, ModelContext(policy.model, client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RuntimeError(f"the episode failed: {errors[-1] if errors else 'no reason is given'}")
    frozen = [
        trace.agent.name
        for trace in episode.traces
        if not trace.agent.trainable and trace.agent.config.client == client
    ]
    if frozen:
        raise ValueError(
            f"the agents {frozen} are not trained, so they must have clients of their own:"
            f" set `agent_kwargs.config.{frozen[0]}.client`"
        )
    trained = [trace.reward for trace in episode.traces if trace.agent.trainable]
    return sum(trained) / max(1, len(trained))


def _task_of(taskset: Any, row: Mapping[str, Any], index_key: str) -> Any:
    index = row.get(index_key)
    if index is not None:
        found = next(islice(iter(taskset), int(index), None), None)
        if found is None:
            raise ValueError(f"the taskset has no task {index} (column `{index_key}`)")
        return found
    task_type = type(taskset).task_type()
    data_type = task_type.data_type()
    columns = {name: row[name] for name in data_type.model_fields if row.get(name) is not None}
    return task_type(data_type(**columns), taskset.config.task)
