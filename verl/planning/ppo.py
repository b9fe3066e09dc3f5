# SPDX-License-Identifier: Apache-2.0
"""What the memory of a run of reinforcement learning follows from: its models, passes, rows and engine."""

from collections.abc import Iterator

from verl.config.ppo import PPOConfig
from verl.planning.planned_engine import PlannedEngine
from verl.planning.planned_run import (
    PlannedModel,
    PlannedPass,
    PlannedRun,
    RowLengths,
    experience_pass,
    update_pass,
)

LOG_PROBS = {"actor": "old", "critic": "values", "prime": "process_rewards"}  # phases by the trained role


def planned_ppo(config: PPOConfig) -> PlannedRun:
    """The run that these options describe."""
    prompt = config.data.max_prompt_length
    engine = PlannedEngine(
        options=config.worker.rollout,
        prompts=config.loader_batch_size // config.num_engines,
        max_prompt_length=prompt,
        max_sequence_length=config.max_sequence_length,
        max_model_len=config.max_model_len,
    )
    lengths = RowLengths(
        prompt=prompt,
        response=config.data.max_response_length,
        media=prompt,
        group=config.worker.rollout.n,
        ranks=config.sp_size,
    )
    return PlannedRun(config.trainer, lengths, tuple(_models(config)), _batch_bytes(config), engine)


def _models(config: PPOConfig) -> Iterator[PlannedModel]:
    worker, actor, ref = config.worker, config.worker.actor, config.worker.ref
    yield _trained(config, "actor")
    if config.use_reference and not actor.model.lora.is_used:  # else it is the policy without adapters
        yield PlannedModel("ref", actor.model, ref.fsdp, ref.offload, (_log_probs(config, "actor", "ref"),))
    if config.use_critic:
        yield _trained(config, "critic")
    if config.use_prime:
        prime = _trained(config, "prime")
        yield prime
        if not prime.model.lora.is_used:  # else its reference is itself without adapters
            passes = (_log_probs(config, "prime", "prime_ref"),)
            yield PlannedModel("prime", prime.model, prime.fsdp, prime.offload, passes)
    if worker.reward_model.is_used:
        scorer = worker.reward_model
        passes = (_scores(config),)
        yield PlannedModel("reward_model", scorer.model, scorer.fsdp, scorer.offload, passes, head="scalar")


def _trained(config: PPOConfig, role: str) -> PlannedModel:
    """A model that scores the responses and learns from them."""
    section = config.trained_roles[role]
    mini_batch = section.global_batch_size * config.worker.rollout.n // config.dp_size
    update = update_pass(section, role, mini_batch, shares=config.worker.actor.share_prompt)
    is_own = section.model.model_path is not None  # only `prime` may go without
    return PlannedModel(
        role,
        section.model if is_own else config.worker.actor.model,
        section.fsdp,
        section.offload,
        (_log_probs(config, role, LOG_PROBS[role]), update),
        section.optim,
        head="scalar" if role == "critic" else "causal",
    )


def _log_probs(config: PPOConfig, owner: str, phase: str) -> PlannedPass:
    """A pass over the responses of a step, in the micro batches of a role."""
    section, shares = config.trained_roles[owner], config.worker.actor.share_prompt
    return experience_pass(phase, section, owner, _step_rows(config), shares=shares)


def _scores(config: PPOConfig) -> PlannedPass:
    """A pass of the reward model, which reads texts of its own."""
    return PlannedPass(
        phase="reward_model",
        size=config.worker.reward_model.micro_batch_size_per_device,
        size_option="worker.reward_model.micro_batch_size_per_device",
        rows=_step_rows(config),
        dynamic=True,
        shares=False,
    )


def _step_rows(config: PPOConfig) -> int:
    """Sequences of one rank in a step."""
    return config.data.rollout_batch_size * config.worker.rollout.n // config.dp_size


def _batch_bytes(config: PPOConfig) -> int:
    """The tensors of a step: three of int64 over sequences, eight of float32 over responses."""
    rows = config.data.rollout_batch_size * config.worker.rollout.n
    return rows * (8 * 3 * config.max_sequence_length + 4 * 8 * config.data.max_response_length)
