# SPDX-License-Identifier: Apache-2.0
"""Puts a run together from its config, and takes it apart again.

The order is that of failing early: data, reward function and cluster are checked before a model is loaded.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ray

from verl.algorithms.kl import FULL
from verl.config.algorithm import TOKEN_BASELINES
from verl.config.ppo import PPOConfig
from verl.data.loader import make_loaders, media_options
from verl.data.media.cache import MediaCache
from verl.distributed.device import resolve_device
from verl.planning.ppo import planned_ppo
from verl.planning.report import resolve_auto_sizes
from verl.planning.step_plan import count_training_steps
from verl.rewards.manager import NoRewardFunction, RewardManager
from verl.trainer.core_algos import get_entropy_controller, get_kl_controller, get_rollout_correction
from verl.trainer.exports import export_checkpoints
from verl.trainer.ray_trainer import RayPPOTrainer
from verl.trainer.rollouts.collector import RolloutCollector
from verl.trainer.rollouts.rollout_log import RolloutLog
from verl.trainer.rollouts.sampler import Sampler
from verl.trainer.run.cluster_join import join_cluster
from verl.trainer.run.run_state import RunState
from verl.trainer.run_parts import (
    check_trained_models,
    endless,
    load_readers,
    open_cache,
    open_tracker,
    start_workers,
)
from verl.trainer.validation import Validator
from verl.viewer.process import viewer_process
from verl.workers.fsdp_worker import FSDPWorker, RunOptions
from verl.workers.roles.actor import KLLoss


@contextmanager
def running_trainer(config: PPOConfig, patience_s: float = 0.0) -> Iterator[RayPPOTrainer]:
    """Start everything a run needs and hand out its trainer; on leaving, end all of it.

    Args:
        config: Of the run; with `trainer.elastic` it may run on fewer devices.
        patience_s: How long to wait, in seconds, for a cluster that is too small or cannot be reached.

    Example::

        with running_trainer(load_config(PPOConfig, sys.argv[1:])) as trainer:
            trainer.fit()

    Raises:
        ValueError: Data, template or reward function cannot be used.
        ClusterError: The cluster is too small, or cannot be reached.
    """
    with ExitStack() as stack:
        if config.trainer.viewer_port is not None:
            folder = Path(config.trainer.checkpoint_folder)
            stack.enter_context(viewer_process(folder, config.trainer.viewer_port))
        export_checkpoints(config.worker)
        device = resolve_device(config.trainer.device)
        check_trained_models(planned_ppo(config))
        config, pool = join_cluster(config, device, patience_s, stack)
        worker = resolve_auto_sizes(config, planned_ppo, device).worker
        cache = open_cache(stack)
        reward: RewardManager | NoRewardFunction = NoRewardFunction()
        if config.worker.reward.reward_function is not None:
            failure_log = Path(config.trainer.checkpoint_folder) / "reward_failures.jsonl"
            reward = stack.enter_context(RewardManager(config.worker.reward, failure_log))

        model = config.worker.actor.model
        tokenizer, processor = load_readers(model, config.data.override_chat_template)
        loaders = make_loaders(config, tokenizer, processor, cache)
        training_steps = count_training_steps(config, len(loaders.train.dataset) if loaders.train else 0) or 0

        options = run_options(config, device, training_steps, cache)
        workers = start_workers(stack, pool, FSDPWorker, worker, options, trainer=config.trainer)
        tracker = stack.enter_context(open_tracker(config, training_steps))
        on_progress = None if config.worker.rollout.disable_tqdm else tracker.progress
        sampler = Sampler(config, workers, reward, tokenizer, on_progress)
        collector = RolloutCollector(config, sampler, endless(loaders.train))
        run_state = RunState(
            config.trainer,
            training_steps,
            get_kl_controller(config.algorithm),
            get_entropy_controller(config.worker.actor),
            workers,
            loaders.train,
            collector,
        )
        validator = Validator(config, sampler, loaders.val)
        rollout_log = RolloutLog(config, tokenizer, loaders.train.dataset.media if loaders.train else None)
        yield RayPPOTrainer(config, workers, collector, validator, run_state, rollout_log, tracker)
        if config.trainer.ray_timeline is not None:
            ray.timeline(config.trainer.ray_timeline)


def run_options(config: PPOConfig, device: str, training_steps: int, cache: MediaCache) -> RunOptions:
    """What the workers need to know of the options outside `worker`."""
    data, algorithm = config.data, config.algorithm
    has_kl_loss = config.use_reference and algorithm.use_kl_loss
    has_full_kl = config.use_reference and algorithm.kl_penalty == FULL
    correction = algorithm.rollout_correction
    return RunOptions(
        device=device,
        training_steps=training_steps,
        max_sequence_length=config.max_sequence_length,
        max_response_length=data.max_response_length,
        media=media_options(config),
        media_cache=cache,
        override_chat_template=data.override_chat_template,
        use_reference=config.use_reference,
        use_critic=config.use_critic,
        use_prime=config.use_prime,
        kl_loss=KLLoss(algorithm.kl_penalty, algorithm.kl_coef) if has_kl_loss else None,
        has_full_kl_in_rewards=has_full_kl and not has_kl_loss,
        has_sum_squares=algorithm.adv_estimator in TOKEN_BASELINES,
        bypass_correction=get_rollout_correction(correction) if correction.bypass_mode else None,
        is_reinforce=correction.bypass_mode and correction.loss_type == "reinforce",
        accuracy_key=algorithm.prime_accuracy_key,
        seed=data.seed,
    )
