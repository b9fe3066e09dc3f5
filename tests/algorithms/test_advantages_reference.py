# SPDX-License-Identifier: Apache-2.0
"""Every estimator against a second implementation: Python floats and a loop for each sum."""

import math
import statistics

import pytest
import torch

from tests.algorithms.advantage_batches import ROWS, TOKENS, inputs_for
from verl.algorithms import advantage_math
from verl.algorithms.advantages import ADV_ESTIMATORS


class Batch:
    """The inputs as lists; a row is the positions of its response tokens."""

    def __init__(self, inputs):
        self.inputs = inputs
        self.kept = [[t for t, keep in enumerate(row) if keep] for row in inputs.response_mask.tolist()]
        self.rows = [i for i, positions in enumerate(self.kept) if positions]
        self.group_ids = inputs.group_ids.tolist()
        self.rewards = inputs.token_level_rewards.double().tolist()
        self.scores = {i: math.fsum(self.rewards[i][t] for t in self.kept[i]) for i in self.rows}

    def peers(self, i):
        return [j for j in self.rows if self.group_ids[j] == self.group_ids[i]]

    def z_score(self, values, i, divide):
        group = [values[j] for j in self.peers(i)]
        if len(group) == 1:
            return values[i] / (1 + 1e-6) if divide else values[i]
        distance = values[i] - statistics.fmean(group)
        return distance / (statistics.stdev(group) + 1e-6) if divide else distance

    def later(self, i, t):
        return [s for s in self.kept[i] if s >= t]

    def to_go(self, values, i, t, gamma=1.0):
        return math.fsum(values[i][s] * gamma**k for k, s in enumerate(self.later(i, t)))

    def per_token(self, function):
        return {(i, t): function(i, t) for i in self.rows for t in self.kept[i]}

    def whitened(self, per_token):
        values = list(per_token.values())
        scale = math.sqrt(statistics.variance(values) + 1e-8)
        return {place: (value - statistics.fmean(values)) / scale for place, value in per_token.items()}


def grpo(batch):
    return batch.per_token(lambda i, t: batch.z_score(batch.scores, i, batch.inputs.norm_adv_by_std))


def grpo_passk(batch):
    def advantage(i, t):
        group = sorted((batch.scores[j] for j in batch.peers(i)), reverse=True)
        if len(group) < 2 or batch.scores[i] < group[0]:
            return 0.0
        lead = group[0] - group[1]
        return lead / (statistics.stdev(group) + 1e-6) if batch.inputs.norm_adv_by_std else lead

    return batch.per_token(advantage)


def rloo(batch):
    def advantage(i, t):
        others = [batch.scores[j] for j in batch.peers(i) if j != i]
        return batch.scores[i] - (statistics.fmean(others) if others else 0.0)

    return batch.per_token(advantage)


def opo(batch):
    def advantage(i, t):
        group = batch.peers(i)
        if len(group) == 1:
            return batch.scores[i]
        every_token = [batch.scores[j] for j in group for _ in batch.kept[j]]
        return batch.scores[i] - statistics.fmean(every_token)

    return batch.per_token(advantage)


def gpg(batch):
    earning = [i for i in batch.rows if batch.scores[i] != 0]
    factor = len(batch.rows) / max(len(earning), 1)
    return batch.per_token(lambda i, t: factor * batch.z_score(batch.scores, i, False))


def reinforce_plus_plus_baseline(batch):
    return batch.whitened(batch.per_token(lambda i, t: batch.z_score(batch.scores, i, False)))


def gdpo(batch):
    components = batch.inputs.reward_components.double().tolist()
    weights = batch.inputs.reward_weights.tolist()

    def total(i, t):
        parts = [
            weight * batch.z_score([row[k] for row in components], i, batch.inputs.norm_adv_by_std)
            for k, weight in enumerate(weights)
        ]
        return math.fsum(parts)

    return batch.whitened(batch.per_token(total))


def sppo(batch):
    beta = batch.inputs.softmean_beta
    soft_mean = math.log(statistics.fmean(math.exp(beta * score) for score in batch.scores.values())) / beta
    return batch.per_token(lambda i, t: batch.scores[i] - soft_mean)


def gae(batch):
    # The sum form instead of the recursion: A_t = sum_k (gamma lam)**k delta_{t+k} over response tokens.
    gamma, lam = batch.inputs.gamma, batch.inputs.lam
    values = batch.inputs.values.double().tolist()

    def delta(i, t):
        after = batch.later(i, t)[1:]
        return batch.rewards[i][t] + (gamma * values[i][after[0]] if after else 0.0) - values[i][t]

    def advantage(i, t):
        return math.fsum((gamma * lam) ** k * delta(i, s) for k, s in enumerate(batch.later(i, t)))

    raw = batch.per_token(advantage)
    return batch.whitened(raw), {(i, t): a + values[i][t] for (i, t), a in raw.items()}


def reinforce_plus_plus(batch):
    returns = batch.per_token(lambda i, t: batch.to_go(batch.rewards, i, t, batch.inputs.gamma))
    return batch.whitened(returns), returns


def remax(batch):
    baselines = batch.inputs.reward_baselines.double().tolist()
    returns = batch.per_token(lambda i, t: batch.to_go(batch.rewards, i, t))
    return {(i, t): value - baselines[i] for (i, t), value in returns.items()}, returns


def token_baseline(batch, place_of, token_at):
    """`place_of(i, t)`: where a token is compared; `token_at(j, place)`: what a row has there, or None."""
    probs = batch.inputs.log_probs.double().exp().tolist()
    squares = batch.inputs.sum_squared_probs.double().tolist()
    importance = batch.inputs.importance_weights
    importance = torch.ones(ROWS, TOKENS).tolist() if importance is None else importance.double().tolist()

    def energy(i, t):
        return math.fsum(
            (1 - 2 * probs[i][s] + squares[i][s]) * importance[i][s] ** 2 for s in batch.kept[i] if s <= t
        )

    def advantage(i, t):
        place = place_of(i, t)
        own = batch.to_go(batch.rewards, i, t)
        if all(place > place_of(j, batch.kept[j][-1]) for j in batch.peers(i) if j != i):
            return own  # no other response
        met = [(j, token_at(j, place)) for j in batch.peers(i) if token_at(j, place) is not None]
        weights = [energy(j, s) for j, s in met]
        weighted = math.fsum(
            w * batch.to_go(batch.rewards, j, s) for w, (j, s) in zip(weights, met, strict=True)
        )
        return own - weighted / (math.fsum(weights) + 1e-8)

    return batch.per_token(advantage), batch.per_token(lambda i, t: batch.to_go(batch.rewards, i, t))


def optimal_token_baseline(batch):
    return token_baseline(batch, lambda i, t: t, lambda j, place: place if place in batch.kept[j] else None)


def tir_optimal_token_baseline(batch):
    return token_baseline(
        batch,
        lambda i, t: batch.kept[i].index(t),
        lambda j, place: batch.kept[j][place] if place < len(batch.kept[j]) else None,
    )


def prime(batch):
    inputs = batch.inputs
    rewards = inputs.process_rewards.double().tolist()
    scale = 1.0
    if inputs.normalize_process_rewards:
        scale = (
            max(abs(value) for value in batch.per_token(lambda i, t: batch.to_go(rewards, i, t)).values())
            + 1e-6
        )
    rewards = [[reward / scale for reward in row] for row in rewards]
    means = {i: statistics.fmean(rewards[i][t] for t in batch.kept[i]) for i in batch.rows}
    accuracies = inputs.accuracies.tolist()

    def leave_one_out(own, of_row, i):
        n = len(batch.peers(i))
        if n == 1:
            return own
        return own * n / (n - 1) - math.fsum(of_row[j] for j in batch.peers(i)) / (n - 1)

    mixed = [[0.0] * TOKENS for _ in range(ROWS)]
    for i in batch.rows:
        for t in batch.kept[i]:
            mixed[i][t] = inputs.process_coef * leave_one_out(rewards[i][t], means, i)
        mixed[i][batch.kept[i][-1]] += inputs.accuracy_coef * leave_one_out(accuracies[i], accuracies, i)
    returns = batch.per_token(lambda i, t: batch.to_go(mixed, i, t))
    return batch.whitened(returns), returns


class TurnBatch(Batch):
    """The inputs as lists; a turn is the positions of its response tokens, by its number in its row."""

    def __init__(self, inputs):
        super().__init__(inputs)
        ids = inputs.turn_ids.tolist()
        self.turns = {
            i: {k: [t for t in self.kept[i] if ids[i][t] == k] for k in set(ids[i])} for i in self.rows
        }
        self.turns = {i: {k: ts for k, ts in sorted(turns.items()) if ts} for i, turns in self.turns.items()}
        self.turn_rewards = {
            (i, k): math.fsum(self.rewards[i][t] for t in ts)
            for i, turns in self.turns.items()
            for k, ts in turns.items()
        }

    def later_turns(self, i, k):
        return [other for other in self.turns[i] if other >= k]

    def per_turn(self, function):
        values = {(i, k): function(i, k) for i, turns in self.turns.items() for k in turns}
        return {(i, t): value for (i, k), value in values.items() for t in self.turns[i][k]}


def turn_grpo(batch):
    batch = TurnBatch(batch.inputs)
    gamma = batch.inputs.turn_gamma

    def to_go(i, k):
        return math.fsum(gamma**n * batch.turn_rewards[i, j] for n, j in enumerate(batch.later_turns(i, k)))

    def advantage(i, k):
        group = [to_go(j, k) for j in batch.peers(i) if k in batch.turns[j]]
        mean, deviation = (
            (0.0, 1.0) if len(group) == 1 else (statistics.fmean(group), statistics.stdev(group))
        )
        distance = to_go(i, k) - mean
        return distance / (deviation + 1e-6) if batch.inputs.norm_adv_by_std else distance

    return batch.per_turn(advantage)


def turn_gae(batch):
    batch = TurnBatch(batch.inputs)
    gamma, lam = batch.inputs.turn_gamma, batch.inputs.lam
    values = batch.inputs.values.double().tolist()

    def value(i, k):
        return values[i][batch.turns[i][k][0]]

    def delta(i, k):
        after = batch.later_turns(i, k)[1:]
        return batch.turn_rewards[i, k] + (gamma * value(i, after[0]) if after else 0.0) - value(i, k)

    def advantage(i, k):
        return math.fsum((gamma * lam) ** n * delta(i, j) for n, j in enumerate(batch.later_turns(i, k)))

    targets = batch.per_turn(lambda i, k: advantage(i, k) + value(i, k))
    return batch.whitened(batch.per_turn(advantage)), targets


REFERENCES = {
    function.__name__: function
    for function in (
        *(gae, gdpo, gpg, grpo, grpo_passk, opo, optimal_token_baseline, prime, reinforce_plus_plus),
        *(reinforce_plus_plus_baseline, remax, rloo, sppo, tir_optimal_token_baseline, turn_gae, turn_grpo),
    )
}
CASES = [
    *((name, {}) for name in REFERENCES),
    *((name, {"norm_adv_by_std": False}) for name in ("gdpo", "grpo", "grpo_passk", "turn_grpo")),
    *((name, {"gamma": 0.9, "lam": 0.8}) for name in ("gae", "reinforce_plus_plus")),
    *(("gae", {"gamma": gamma, "lam": lam}) for gamma, lam in ((1.0, 0.0), (0.0, 1.0))),
    *((name, {"turn_gamma": 0.5, "lam": 0.8}) for name in ("turn_gae", "turn_grpo")),
    *((name, {"importance_weights": None}) for name in REFERENCES if name.endswith("token_baseline")),
    ("prime", {"normalize_process_rewards": False, "process_coef": 0.5, "accuracy_coef": 3.0}),
    ("sppo", {"softmean_beta": 0.3}),
]


def in_full(per_token):
    full = torch.zeros(ROWS, TOKENS, dtype=torch.float64)
    for place, value in per_token.items():
        full[place] = value
    return full.float()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value))
def test_an_estimator_equals_a_reference_loop(name, options, seed):
    inputs = inputs_for(name, seed, **options)

    expected = REFERENCES[name](Batch(inputs))
    advantages, returns = expected if isinstance(expected, tuple) else (expected, expected)

    found = ADV_ESTIMATORS[name](inputs)
    torch.testing.assert_close(found.advantages, in_full(advantages), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found.returns, in_full(returns), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", REFERENCES)
def test_block_boundaries_do_not_change_the_result(name, monkeypatch):
    whole = ADV_ESTIMATORS[name](inputs_for(name, gamma=0.9))
    monkeypatch.setattr(advantage_math, "BLOCK_TOKENS", 5 * TOKENS)
    monkeypatch.setattr(advantage_math, "BLOCK_COLUMNS", 3)

    cut = ADV_ESTIMATORS[name](inputs_for(name, gamma=0.9))

    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-5)


def test_every_registered_estimator_has_a_reference_loop():
    assert sorted(REFERENCES) == ADV_ESTIMATORS.names()
