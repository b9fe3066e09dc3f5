# SPDX-License-Identifier: Apache-2.0
"""Evaluates a model on held-out rows with a run's data, rewards, engine and sampling.

The means are those of the run's own validation, since `Validator` computes both.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from verl.config.ppo import PPOConfig
from verl.config.reward_servers import without_teachers
from verl.data.loader import make_loaders
from verl.data.readers import media_options
from verl.logger.tracker import Tracker
from verl.trainer.evaluation.report import (
    Evaluation,
    Question,
    ScoredResponse,
    by_category,
    powers_up_to,
    summarize,
)
from verl.trainer.kinds.text import TextRun
from verl.trainer.metrics import StageTimer
from verl.trainer.prepare import PreparedRun
from verl.trainer.reward_servers.servers import RewardServers
from verl.trainer.rollouts.engines import SharedEngines
from verl.trainer.rollouts.rollout_log import RolloutLog
from verl.trainer.setup import open_cache, open_reward, open_tracker, ppo_options
from verl.trainer.start_workers import start_workers
from verl.trainer.validation import NO_SCORE, ScoredResponses, Validator, as_finished, means_of
from verl.workers.fsdp_worker import FSDPWorker
from verl.workers.run_options import ModelRunOptions

ACCURACY, OVERALL = "accuracy", "overall"  # keys of the reward function that may say what is correct


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Samples responses to the held-out prompts and reports on them."""

    validator: Validator
    log: RolloutLog  # writes responses for the viewer
    folder: Path
    tracker: Tracker

    def evaluate(self, model: str, step: int, question: Question) -> Evaluation:
        """Sample, score and report; `model` and `step` are the report's."""
        ks = self._checked(question)
        with self.validator.sampler.engines.awake(step, StageTimer()):
            self.validator.sample(step)
        scored = self.validator.score()
        metrics = means_of(scored)
        if "val/reward_score" not in metrics:
            raise RuntimeError(NO_SCORE)
        key = correct_key(question.correct_key, scored)
        uids = scored.sequences.non_tensor_batch["uid"]
        found = zip(uids, scored.scores, scored.values[key], strict=True)
        responses = [ScoredResponse(*each) for each in found]
        self.log.keep(as_finished(scored.sequences, scored.values, scored.scores), step)
        self.tracker.log(metrics, step)
        return Evaluation(
            model=model,
            step=step,
            metrics=metrics,
            correct_key=key,
            correct_at=question.correct_at,
            overall=summarize(responses, question.correct_at, ks),
            categories={
                column: by_category(responses, names, question.correct_at, ks)
                for column, names in scored.categories.items()
            },
            folder=self.folder,
        )

    def _checked(self, question: Question) -> list[int]:
        """Return the numbers k of pass@k; raise `ValueError` before anything is sampled."""
        options = self.validator.sampler.validation_options
        if options.n > 1 and options.is_greedy:
            raise ValueError(
                f"{options.n} responses to a prompt are all the same at temperature {options.temperature:g}:"
                " set `worker.rollout.val_override_config.temperature` above 0, or sample one response"
            )
        ks = list(question.ks) or powers_up_to(options.n)
        wrong = [k for k in ks if not 1 <= k <= options.n]
        if wrong:
            raise ValueError(
                f"pass@k needs k from 1 to the number of responses to a prompt, {options.n}, got {wrong}:"
                " raise it with `worker.rollout.val_override_config.n`"
            )
        return sorted(set(ks))


def build_evaluator(run: PreparedRun[PPOConfig], stack: ExitStack, question: Question) -> Evaluator:
    """Start the workers of an evaluation and return its evaluator; the stack ends what it uses.

    Only the policy and the reward model are loaded, whatever else the run trains with.

    Raises:
        ValueError: Data, template or reward function cannot be used.
    """
    config, pool = run.config, run.pool
    data, worker, folder = config.data, config.worker, Path(config.trainer.checkpoint_folder)
    kind = TextRun(data, worker, replace(config.trainer, rollouts_to_keep=question.keep))
    cache = open_cache(stack)
    servers = stack.enter_context(
        RewardServers(without_teachers(config.reward_servers), pool.device, folder, config.num_devices)
    )
    reward = open_reward(stack, worker.scoring, folder, servers)
    media = media_options(data, worker.rollout)
    readers = kind.readers(media, cache)
    val = make_loaders(data, readers, folder).val
    assert val is not None, "the config was checked"
    shared = ModelRunOptions(pool.device, 0, media, cache, data.override_chat_template, data.seed)
    roles = [role for role in config.models if role == "reward_model"]
    options = ppo_options(run, shared, roles, readers.tools)
    servers.start_own()
    workers = start_workers(run, stack, FSDPWorker, options)
    servers.start_shared_and_wait(workers.processes)
    tracker = stack.enter_context(open_tracker(config, 0, None))
    log = kind.rollout_log(readers)
    sampler = kind.sampler(SharedEngines(workers, worker), reward, readers, tracker, log)
    validator = kind.validator(sampler, workers, val, config.dp_size)
    return Evaluator(validator, log, folder, tracker)


def correct_key(asked: str | None, scored: ScoredResponses) -> str:
    """Return the value that says what is correct: `accuracy` if the reward function has it, or `overall`."""
    if asked is None:
        return ACCURACY if ACCURACY in scored.values else OVERALL
    if asked not in scored.values:
        raise ValueError(
            f"the reward function returns no `{asked}`, which is to say what is correct: it returns"
            f" {sorted(scored.values)}"
        )
    return asked
