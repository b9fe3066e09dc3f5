# SPDX-License-Identifier: Apache-2.0
"""Rules of teachers behind a server (`distillation.teacher_models.NAME.server`)."""

from collections.abc import Iterator, Mapping

from verl.config.distillation import FORWARD_TOP, TEACHERS, DistillationConfig, DistillationLossConfig
from verl.config.reward_servers import TEACHER, RewardServerConfig
from verl.config.rollout import RolloutConfig

LOADED = f"load the teacher instead, `{TEACHERS}.NAME.model_path`"


def served_teacher_problems(
    distillation: DistillationConfig,
    servers: Mapping[str, RewardServerConfig],
    rollout: RolloutConfig,
    max_sequence_length: int,
) -> Iterator[str]:
    served = distillation.served
    named = {str(teacher.server): f"{TEACHERS}.{name}.server" for name, teacher in served.items()}
    if served:
        path = next(iter(named.values()))
        yield from _loss_problems(distillation.distillation_loss, path)
        if rollout.temperature != 1:
            yield (
                f"`worker.rollout.temperature` must be 1 with `{path}`, got {rollout.temperature}: servers"
                f" give log-probs at temperature 1, and others cannot be computed from them; set it, or"
                f" {LOADED}"
            )
    for name, path in named.items():
        if name not in servers or not servers[name].teaches:
            found = f"`reward_servers.{name}` of another kind" if name in servers else repr(name)
            yield (
                f"`{path}` must name a model of `reward_servers` with `kind={TEACHER}`, got {found}: set"
                f" `reward_servers.{name}.kind={TEACHER}` and its `model_path` or `url`"
            )
        elif (limit := servers[name].max_model_len) is not None and limit <= max_sequence_length:
            yield (
                f"`reward_servers.{name}.max_model_len` ({limit}) must be at least {max_sequence_length + 1}:"
                " prompt, response, and a token that the server adds"
            )
    for name, server in servers.items():
        if server.teaches and name not in named:
            yield (
                f"`reward_servers.{name}` has `kind={TEACHER}`, and nothing asks it: set"
                f" `{TEACHERS}.NAME.server={name}` and `distillation.enabled=true`"
            )


def _loss_problems(loss: DistillationLossConfig, path: str) -> Iterator[str]:
    mode = f"`distillation.distillation_loss.loss_mode` ({loss.loss_mode})"
    if loss.is_exact:
        yield (
            f"{mode} needs the teacher's whole distribution, and with `{path}` a server gives its most likely"
            f" tokens: set it to {FORWARD_TOP} or an estimator such as k3, or {LOADED}"
        )
    elif loss.is_top and not loss.is_forward:
        yield (
            f"{mode} needs the logarithm of the probability of all other tokens, which with `{path}` is what"
            f" rounding leaves of 1 minus a server's numbers: set it to {FORWARD_TOP}, or {LOADED}"
        )
