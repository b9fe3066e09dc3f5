# SPDX-License-Identifier: Apache-2.0
"""Seconds of a rollout: prompts at once, then token by token while the batch shrinks.

A decoding step reads all weights and the keys and values of the running sequences, so memory sets its pace
until many run; a batch is as slow as its longest responses.
"""

from collections import defaultdict
from dataclasses import dataclass

from verl.planning.memory_model import ModelShape
from verl.planning.planned_run import ACTIVATION_BYTES, PlannedEngine
from verl.planning.speed.cluster import Cluster
from verl.planning.speed.operations import layer_weights
from verl.planning.speed.workload import MEDIA_SHARE, MEDIA_TOKENS, ExpectedLengths

PREFILL_SHARE = 0.7  # of the speed of training products: many short prompts in limited steps
STEP_SECONDS = 2.5e-3  # of the engine's own code and of the graph's launch in each decoding step
EAGER_LAYER_SECONDS = 0.35e-3  # of launching one layer's kernels without a graph
ADAPTER_LAYER_SECONDS = 1.4e-3  # the same of its adapters, from a published run
SEQUENCE_SECONDS = 12e-6  # of scheduling, sampling and log-probs for each running sequence and step
REDUCE_SECONDS = 20e-6  # of starting an all-reduce between the ranks of an engine
IMAGE_SECONDS = 0.02  # of a processor on one core for an image
IMAGE_THREADS = 4  # that process images, see `workers/rollout/processed_media.py`
SAMPLER_BYTES = 24  # for each logit: float32 copies, log-softmax, noise
SEGMENTS = 48


@dataclass(frozen=True)
class EngineSpeed:
    """Predicts how long a rollout engine on a cluster takes to sample with a policy."""

    engine: PlannedEngine
    policy: ModelShape
    cluster: Cluster
    has_adapters: bool  # that the engine applies

    @property
    def ranks(self) -> int:
        return self.engine.options.tensor_parallel_size

    def call_seconds(self, lengths: ExpectedLengths) -> dict[str, float]:
        """Predict one call of the engine, by cause: `prompts`, and those of `step_seconds`."""
        sequences = self.engine.prompts * self.engine.options.n
        at_once = min(sequences, self.sequences_at_once(lengths))
        prompts, first, later = self._prompts(lengths)
        totals: dict[str, float] = defaultdict(float, prompts=prompts)
        for steps, running, context in _schedule(sequences, at_once, lengths):
            for name, seconds in self.step_seconds(running, context).items():
                totals[name] += steps * seconds
        # until the last prompt begins, threads process images while the engine computes
        meanwhile = prompts + (sum(totals.values()) - prompts) * (1 - at_once / sequences)
        totals["engine"] += first + max(0.0, later - meanwhile)
        return totals

    def sequences_at_once(self, lengths: ExpectedLengths) -> int:
        """Return how many sequences the engine samples at once, as far as its cache holds them."""
        options, tokens = self.engine.options, lengths.prompt / self.engine.options.n + lengths.responses.mean
        sequence = self.policy.text.cached(self.engine.number, tokens, self.ranks)
        used = options.gpu_memory_utilization * self.cluster.gpu.memory_bytes
        in_cache = int((used - self.engine.weights(self.policy) - ACTIVATION_BYTES) / sequence)
        return max(1, min(in_cache, options.sequences_at_once(on_gpu=True)))

    def step_seconds(self, running: float, context: float) -> dict[str, float]:
        """Predict one token of all running sequences, with a mean context, by cause.

        `weights` and `cache` are reading; `products` what goes beyond reading weights; `reduces` between
        ranks; `engine` its own code and sampling, and in a whole call also waiting for images.
        """
        text, number, cluster, ranks = self.policy.text, self.engine.number, self.cluster, self.ranks
        dense = (self.policy.params - text.layers * (text.params - layer_weights(text))) / ranks
        # In a mixture the running tokens spread over the experts.
        held = self.engine.weights(self.policy)
        touched = min(held, held * ranks / self.policy.params * dense * _spread(self.policy, running))
        weights = touched / cluster.memory
        flops = 2 * self._active() * running / cluster.products
        sampler = running * SAMPLER_BYTES * self.policy.vocab / ranks / cluster.memory
        is_eager = self.engine.options.enforce_eager
        layer = EAGER_LAYER_SECONDS + ADAPTER_LAYER_SECONDS * self.has_adapters if is_eager else 0.0
        reduces = 0.0
        if ranks > 1:
            moved = 2 * running * text.hidden * number * (ranks - 1) / ranks / cluster.link(ranks)
            reduces = 2 * text.layers * (REDUCE_SECONDS + moved)
        return {
            "weights": weights,
            "cache": running * text.cached(number, context, ranks) / cluster.memory,
            "products": max(0.0, flops - weights),
            "reduces": reduces,
            "engine": STEP_SECONDS + SEQUENCE_SECONDS * running + sampler + layer * text.layers,
        }

    def _active(self) -> float:
        """Weights of a rank that one token is multiplied by."""
        text = self.policy.text
        return (text.layers * layer_weights(text) + self.policy.head) / self.ranks

    def _prompts(self, lengths: ExpectedLengths) -> tuple[float, float, float]:
        """Seconds of the prompts' products, each prompt once, and of processing images.

        The images are those of the prompts that the first step reads, and the others.
        """
        tokens, text, tower = self.engine.prompts * lengths.prompt, self.policy.text, self.policy.tower
        pairs = self.engine.prompts * lengths.prompt**2 / 2
        flops = 2 * self._active() * tokens + 4 * text.layers * text.heads * text.head_dim * pairs
        images = first = 0.0
        if tower is not None:
            media = MEDIA_SHARE * tokens
            patches = media * self.policy.patches_per_token / self.ranks
            flops += 2 * tower.layers * layer_weights(tower) * patches
            images = IMAGE_SECONDS / IMAGE_THREADS * media / MEDIA_TOKENS
            first = images * min(1.0, self.engine.options.max_num_batched_tokens / tokens)
        return flops / (PREFILL_SHARE * self.cluster.products), first, images - first


def _schedule(sequences: int, at_once: int, lengths: ExpectedLengths) -> list[tuple[float, float, float]]:
    """Return (steps, sequences that run, tokens of context) while responses become complete."""
    responses = lengths.responses
    schedule = []
    if sequences > at_once:  # as one ends the next begins
        steps = (sequences - at_once) * responses.mean / at_once
        schedule.append((steps, float(at_once), lengths.prompt + responses.mean_square / 2 / responses.mean))
    last = responses.longest(at_once)
    for segment in range(SEGMENTS):
        middle = (segment + 0.5) * last / SEGMENTS
        running = max(1.0, at_once * responses.running(middle))
        schedule.append((last / SEGMENTS, running, lengths.prompt + middle))
    return schedule


def _spread(policy: ModelShape, running: float) -> float:
    """Weights that a decoding step reads, over those of one token: above 1 in a mixture."""
    one = layer_weights(policy.text) / policy.text.params
    return (1 - (1 - one) ** running) / one if one < 0.9 else 1.0
