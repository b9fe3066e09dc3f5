# SPDX-License-Identifier: Apache-2.0
"""Sampling without a model: an engine with scripted responses, and prompts that are numbers."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

from verl.checkpoint.manifest import read_manifest, write_manifest
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto, objects
from verl.trainer.rollouts.collector import RolloutCollector
from verl.trainer.rollouts.group_filter import make_early_stop, make_group_filter, make_quota
from verl.trainer.rollouts.sampler import Sampler
from verl.workers.rollout.interface import FinishedResponse

PROMPT_LENGTH, RESPONSE_LENGTH = 3, 6

# The last token of a response is ten times its score.
REWARD = """
    REWARD_TYPE = "sequential"
    def main(row):
        tokens = [int(word) for word in row["response"].split()]
        scores = {"overall": tokens[-1] / 10, "accuracy": float(tokens[-1] >= 10), "tokens": len(tokens)}
        return scores | ({"rare": 1.0} if tokens[-1] >= 10 else {})
    """


class Words:
    """A stand-in for the tokenizer: a token's text is its number."""

    pad_token_id = 0

    def decode(self, token_ids, skip_special_tokens):
        return " ".join(map(str, token_ids))


class Engine:
    """A stand-in for the worker group: writes responses whose scores follow from the prompt.

    Args:
        scores_of: Returns the scores of the n responses to a prompt, by its number.
        greedy_score: Score of the greedy response to every prompt.
        number_of: Returns the number of a prompt, by its token ids.

    Attributes:
        weights: A number that a test may change; all log-probs are minus it.
        calls: The numbers of the prompts of each call, with the options.
        is_written, save_problem: Its answers about the checkpoint that it writes.
    """

    def __init__(self, scores_of, greedy_score=0.5, number_of=sum):
        self.scores_of, self.greedy_score, self.number_of = scores_of, greedy_score, number_of
        self.weights, self.calls = 1.0, []
        self.is_written, self.save_problem = True, None

    def generate(self, prompts, options):
        columns = prompts.non_tensor_batch
        rows = list(zip(columns["uid"], map(self.number_of, columns["raw_prompt_ids"]), strict=True))
        self.calls.append(([number for _, number in rows], options))
        for uid, number in reversed(rows):  # the last prompt is finished first
            for sample in reversed(range(options.n)):
                yield [self.respond(uid, number, sample, options)]

    def respond(self, uid, number, sample, options):
        place = options.first_sample + sample  # among all responses to the prompt
        score = self.greedy_score if options.is_greedy else self.scores_of(number)[place]
        tokens = [number + 1] * ((number + place) % (RESPONSE_LENGTH - 1)) + [round(10 * score)]
        return FinishedResponse(uid, sample, tokens, [-self.weights] * len(tokens), "stop")

    def save_checkpoint(self, folder, model_only, copies):
        actor = Path(folder) / "actor"
        actor.mkdir()
        write_manifest(actor, {"weights": self.weights})

    def is_checkpoint_written(self):
        return [self.is_written]

    def finish_checkpoint(self):
        return [self.save_problem]

    def load_checkpoint(self, folder):
        self.weights = read_manifest(Path(folder) / "actor")["weights"]


def numbered_prompts(batch_size):
    """Yield batches of prompts without end; the only token of prompt k is k."""
    for first in count(0, batch_size):
        numbers = list(range(first, first + batch_size))
        tokens = torch.zeros(batch_size, PROMPT_LENGTH, dtype=torch.int64)
        tokens[:, -1] = torch.tensor(numbers)
        mask = torch.zeros_like(tokens)
        mask[:, -1] = 1
        tensors = {"prompts": tokens, "prompt_mask": mask, "prompt_position_ids": torch.zeros_like(tokens)}
        columns = {
            "raw_prompt_ids": [[number] for number in numbers],
            "prompt_text": [f"prompt {number}" for number in numbers],
            "ground_truth": [str(number) for number in numbers],
            "multi_modal_data": [{} for _ in numbers],
        }
        yield DataProto.from_dict(tensors, {key: objects(values) for key, values in columns.items()})


def make_config(prompts=4, n=2, mini_batch=2, call=None, algorithm=None, trainer=None, reward=None):
    """A config of `prompts` prompts in a step; the last three replace options of their sections."""
    config = PPOConfig()
    data = replace(
        config.data,
        rollout_batch_size=prompts,
        mini_rollout_batch_size=call,
        max_prompt_length=PROMPT_LENGTH,
        max_response_length=RESPONSE_LENGTH,
    )
    worker = replace(
        config.worker,
        actor=replace(config.worker.actor, global_batch_size=mini_batch),
        rollout=replace(config.worker.rollout, n=n),
        reward=replace(config.worker.reward, **(reward or {})),
    )
    return replace(
        config,
        data=data,
        worker=worker,
        algorithm=replace(config.algorithm, **(algorithm or {})),
        trainer=replace(config.trainer, **(trainer or {})),
    )


def make_collector(config, engine, manager, prompts=None):
    """A collector on the engine, with prompts numbered from 0 unless others are given."""
    prompts = numbered_prompts(config.loader_batch_size) if prompts is None else prompts
    algorithm, trainer = config.algorithm, config.trainer
    mini_batches = [role.global_batch_size for role in config.trained_roles.values()]
    group_filter = make_group_filter(algorithm, trainer.rejection_sample)
    return RolloutCollector(
        make_sampler(config, engine, manager),
        prompts,
        group_filter,
        make_quota(config.data, trainer, mini_batches),
        algorithm,
        config.worker.reward,
        make_early_stop(algorithm, group_filter, config.data.seed),
    )


def make_sampler(config, engine, manager, on_progress=None, on_scored=None):
    return Sampler(config.data, config.worker, engine, manager, Words(), on_progress, on_scored)


def numbers_of(batch):
    """The number of each group's prompt."""
    numbers = [int(truth) for truth in batch.non_tensor_batch["ground_truth"]]
    return list(dict.fromkeys(numbers))
