# SPDX-License-Identifier: Apache-2.0
"""Rules of the rollout engines: where, when and by which weights they sample, and the lengths they accept."""

import os
from collections.abc import Iterator

from verl.config.algorithm import AlgorithmConfig
from verl.config.data import DataConfig
from verl.config.files.model_files import context_problem
from verl.config.rollout import RolloutConfig
from verl.config.trainer import ONE_STEP_OFF, PARTIAL, STREAM, AsyncConfig, TrainerConfig, divisible
from verl.config.worker import WorkerConfig

FOR_ROLLOUT = "`trainer.n_gpus_for_rollout`"
MAX_FOR_ROLLOUT = "`trainer.async_training.max_gpus_for_rollout`"
QUANTIZED = "`worker.rollout.quantization`"
LONG_CONTEXTS = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # set to 1, vLLM accepts lengths beyond the model's


def engine_problems(
    data: DataConfig, worker: WorkerConfig, algorithm: AlgorithmConfig, trainer: TrainerConfig
) -> Iterator[str]:
    """Yield problems of where, when and by which weights the engines sample."""
    yield from quantization_problems(worker.rollout, algorithm, trainer)
    count, training = trainer.n_gpus_for_rollout, trainer.async_training
    num_engines = (count or trainer.world_size) // worker.rollout.tensor_parallel_size
    if training.deterministic and data.sampler is not None and num_engines > 1:
        yield (
            "`trainer.async_training.deterministic` must be false with `data.sampler` and several engines,"
            f" got {num_engines}: they finish groups in any order, and the sampler draws by their scores"
        )
    if training.continues_responses:
        yield from _continued(worker, algorithm, training)
    if training.max_gpus_for_rollout is not None:
        yield from _growth(training.max_gpus_for_rollout, trainer, worker.rollout)
    if not worker.hybrid_engine:
        yield from _separate(count, training)
        return
    if count:
        yield (
            f"{FOR_ROLLOUT} must be 0 with `worker.hybrid_engine=true`, got {count}: the processes that"
            " train also sample; set `worker.hybrid_engine=false` to sample in others"
        )
    if (way := worker.rollout.weight_transport) != "auto":
        yield (
            f"`worker.rollout.weight_transport` must be 'auto' with `worker.hybrid_engine=true`, got"
            f" {way!r}: weights stay in their processes; set `worker.hybrid_engine=false` to sample in"
            " others"
        )
    if training.samples_ahead:
        yield (
            "`trainer.async_training.mode` must be 'off' or 'partial' with `worker.hybrid_engine=true`,"
            f" got {training.mode!r}:"
            " the engine sleeps while the model trains; set `worker.hybrid_engine=false` and"
            f" {FOR_ROLLOUT}"
        )


def _growth(most: int, trainer: TrainerConfig, rollout: RolloutConfig) -> Iterator[str]:
    count, training = trainer.n_gpus_for_rollout, trainer.async_training
    key, size = "`worker.rollout.tensor_parallel_size`", rollout.tensor_parallel_size
    if training.mode != STREAM or training.deterministic:
        yield (
            f"{MAX_FOR_ROLLOUT} must be null unless `trainer.async_training.mode=stream` with"
            f" `deterministic=false`, got {most}: in other modes no engine joins a run"
        )
    elif most < count:
        yield f"{MAX_FOR_ROLLOUT} ({most}) must be at least {FOR_ROLLOUT} ({count})"
    else:
        yield from divisible(MAX_FOR_ROLLOUT, most, key, size)


def _continued(worker: WorkerConfig, algorithm: AlgorithmConfig, training: AsyncConfig) -> Iterator[str]:
    mode = f"`trainer.async_training.mode={training.mode}`"
    other = ONE_STEP_OFF if training.samples_ahead else "off"
    agent, engine = worker.rollout.multi_turn.agent, worker.rollout.name
    if training.deterministic and (agent is not None or engine == "sglang"):
        cause = f"name={engine}" if agent is None else "multi_turn.agent"
        yield (
            f"`trainer.async_training.deterministic` must be false with `worker.rollout.{cause}`, got true:"
            " where responses are interrupted depends on time; set it to false"
        )
    if "reward_baselines" in algorithm.needs:
        yield (
            f"`algorithm.adv_estimator` {algorithm.adv_estimator} samples greedy responses first,"
            f" which {mode} does not do: set `trainer.async_training.mode={other}`"
        )


def _separate(count: int, training: AsyncConfig) -> Iterator[str]:
    if count == 0:
        yield f"{FOR_ROLLOUT} must be at least 1 with `worker.hybrid_engine=false`, got 0"
    if training.mode == PARTIAL:
        yield (
            "`trainer.async_training.mode` must be 'off', 'one_step_off' or 'stream' with"
            " `worker.hybrid_engine=false`, got 'partial': engines of their own need not stop for training;"
            " set `trainer.async_training.mode=stream`, or `worker.hybrid_engine=true`"
        )


def quantization_problems(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, trainer: TrainerConfig
) -> Iterator[str]:
    """Yield why the policy that samples may not be quantized."""
    value, correction = rollout.quantization, algorithm.rollout_correction
    if value is None:
        return
    if trainer.diffusion:
        yield f"{QUANTIZED} must be null with `trainer.diffusion=true`, got {value!r}: text engines have it"
        return
    if trainer.device == "cpu":
        yield cpu_problem(value)
    if correction.rollout_is is None and not correction.bypass_mode:
        yield (
            f"{QUANTIZED}={value} samples from another policy than the one that is trained, so"
            " `algorithm.rollout_correction.rollout_is` must be token or sequence, got null; or set"
            " `algorithm.rollout_correction.bypass_mode=true`, whose ratio is trainer to engine"
        )


def cpu_problem(value: str) -> str:
    return (
        f"{QUANTIZED} must be null on CPU (`trainer.device`), got {value!r}: its matrix products exist on"
        " GPUs only; set it to null, or `trainer.device` to a kind of GPU"
    )


def length_problems(data: DataConfig, worker: WorkerConfig) -> Iterator[str]:
    """Yield lengths of sequences that the rollout engine would refuse."""
    rollout, prompt, response = worker.rollout, data.max_prompt_length, data.max_response_length
    option = "data.max_response_length"
    if (longer := rollout.validation_tokens) > response:
        response, option = longer, "worker.rollout.val_override_config.max_tokens"
        if rollout.multi_turn.enable:
            yield (
                f"`{option}` ({longer}) must be at most `data.max_response_length` with"
                " `worker.rollout.multi_turn.enable=true`, which limits whole conversations: raise that one"
            )
    needed = prompt + response
    lengths = f"`data.max_prompt_length` + `{option}` ({needed})"
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        yield f"`worker.rollout.max_model_len` ({rollout.max_model_len}) must be at least {lengths}"
    if rollout.max_num_batched_tokens < needed and not rollout.enable_chunked_prefill:
        yield (
            f"`worker.rollout.max_num_batched_tokens` ({rollout.max_num_batched_tokens})"
            f" must be at least {lengths}, or `worker.rollout.enable_chunked_prefill=true`"
        )
    yield from _context_length(rollout.max_model_len or needed, lengths, worker)
    yield from rollout.multi_turn.length_problems(data.max_response_length)


def _context_length(longest: int, lengths: str, worker: WorkerConfig) -> Iterator[str]:
    model, rollout = worker.actor.model, worker.rollout
    if model.model_path is None or rollout.name != "vllm" or os.environ.get(LONG_CONTEXTS) == "1":
        return
    key = lengths
    if rollout.max_model_len is not None:
        key = f"`worker.rollout.max_model_len` ({rollout.max_model_len})"
    yield from context_problem(key, longest, model.model_path, model.override_config)
