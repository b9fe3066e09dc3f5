# SPDX-License-Identifier: Apache-2.0
"""Every policy loss under every aggregation against a padded single-process reference written here.

The gradient of every parameter must not depend on micro-batch size, dynamic batching or the number of ranks.
The reference goes over sequences one by one, in float64 behind the model's own padded float32 forward.
"""

from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.equivalence.test_update import (
    TEMPERATURE,
    TOLERANCE,
    RecordingOptimizer,
    build_forward,
    make_batch,
    padded_log_probs,
    relative_errors,
)
from tests.helpers.distributed import run_distributed
from verl.algorithms.aggregation import AGGREGATIONS
from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto

pytestmark = pytest.mark.heavy

N = 3  # responses to each of 4 prompts, all of them one mini batch
MAX_RESPONSE_LENGTH = 10
ETA, BETA, KL_COV_COEF = 0.7, 0.3, 0.4
MICRO_BATCHES = {
    "one row": {"micro_batch_size_per_device_for_update": 1, "dynamic_batching": False},
    "dynamic": {"micro_batch_size_per_device_for_update": 1, "dynamic_batching": True},
    "all rows": {"micro_batch_size_per_device_for_update": 64, "dynamic_batching": True},
}
OPTIONS = {  # where bounds are met by some tokens and not by others
    "gspo": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_dual": 1.05},
    "gspo_token": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_dual": 1.05},
    "dppo_tv": {"clip_ratio_low": 0.001, "clip_ratio_high": 0.001, "clip_ratio_dual": 1.5},
    "dppo_kl": {"clip_ratio_low": 1e-4, "clip_ratio_high": 1e-4, "clip_ratio_dual": 1.5},
    "geo_mean": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4},
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 2.0},  # all candidates: no chance
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": KL_COV_COEF},
    "dro": {"dro_beta": BETA},
    "sppo": {"sppo_eta": ETA},
}
DEFAULTS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_dual": 2.0}
CASES = [(loss, mode) for loss in POLICY_LOSSES.names() for mode in AGGREGATIONS.names()]
GRIDS = {
    "by day": [(loss, mode) for loss, mode in CASES if loss == "default" or mode == "token"],
    "at night": [(loss, mode) for loss, mode in CASES if loss != "default" and mode != "token"],
}


def options_of(loss):
    return DEFAULTS | OPTIONS.get(loss, {})


# The reference: one sequence at a time, `p` and `q` its log-probs now and before, `a` its advantages.


def two_bounds(ratio, a, low, high):
    return torch.stack([-a * ratio, -a * ratio.clamp(1 - low, 1 + high)]).amax(0)


def three_bounds(ratio, a, o):
    loss = two_bounds(ratio, a, o["clip_ratio_low"], o["clip_ratio_high"])
    return torch.where(a < 0, torch.minimum(loss, -a * o["clip_ratio_dual"]), loss)


def default(p, q, a, o, _):
    return three_bounds((p - q).exp(), a, o)


def gspo(p, q, a, o, _):
    return three_bounds((p - q).mean().exp().expand(len(p)), a, o)


def gspo_token(p, q, a, o, _):
    mean = (p - q).detach().mean()
    ratio = (mean + p - p.detach()).exp()  # of the response, with the gradient of the token alone
    return three_bounds(ratio, a, o)


def cispo(p, q, a, o, _):
    weight = (p - q).detach().exp().clamp(1 - o["clip_ratio_low"], 1 + o["clip_ratio_high"])
    return -weight * a * p


def sapo(p, q, a, o, _):
    tau = torch.tensor([1.0 if one > 0 else 1.05 for one in a], dtype=torch.float64)
    return -a * (4 / tau) / (1 + (-tau * ((p - q).exp() - 1)).exp())


def geo_mean(p, q, a, o, _):
    sign = a.mean().sign()
    bounded = torch.minimum(sign * (p - q), sign * (p - q).clamp(-o["clip_ratio_low"], o["clip_ratio_high"]))
    return (-a.mean() * (sign * bounded).mean().exp()).expand(len(p))


def gpg(p, q, a, o, _):
    return -a * p


def clip_cov(p, q, a, o, covariance):
    ratio = (p - q).exp()
    loss = two_bounds(ratio, a, o["clip_ratio_low"], o["clip_ratio_high"])
    candidate = (covariance > o["clip_cov_lb"]) & (covariance < o["clip_cov_ub"]) & (loss == -a * ratio)
    return torch.where(candidate, 0.0, loss)


def kl_cov(p, q, a, o, covariance):
    return -a * (p - q).exp() + torch.where(covariance >= o["smallest"], KL_COV_COEF * (p - q).abs(), 0.0)


def trust_region(inside, p, q, a, o):
    return torch.where(inside, -a * (p - q).detach().exp().clamp(max=o["clip_ratio_dual"]) * p, 0.0)


def dppo_tv(p, q, a, o, _):
    move = (p.exp() - q.exp()).detach()
    inside = torch.where(a > 0, move <= o["clip_ratio_high"], move >= -o["clip_ratio_low"])
    return trust_region(inside, p, q, a, o)


def dppo_kl(p, q, a, o, _):
    new, old = p.detach().exp(), q.exp()
    kl = old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()
    inside = torch.where(
        a > 0, (kl <= o["clip_ratio_high"]) | (new <= old), (kl <= o["clip_ratio_low"]) | (new >= old)
    )
    return trust_region(inside, p, q, a, o)


def dro(p, q, a, o, _):
    return -a * p + BETA / 2 * (p - q) ** 2


def sppo(p, q, a, o, _):
    return (((p - q).sum() - ETA * a.mean()) ** 2).expand(len(p))


REFERENCES = {
    "default": default, "gspo": gspo, "gspo_token": gspo_token, "cispo": cispo, "sapo": sapo,
    "geo_mean": geo_mean, "gpg": gpg, "clip_cov": clip_cov, "kl_cov": kl_cov, "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl, "dro": dro, "sppo": sppo,
}  # fmt: skip


def aggregate(rows, mode):
    if mode == "token":
        return torch.cat(rows).mean()
    if mode == "seq":
        return torch.stack([row.mean() for row in rows]).mean()
    return torch.stack([row.sum() for row in rows]).mean() / (
        MAX_RESPONSE_LENGTH if mode == "seq_sum_norm" else 1
    )


def reference_gradients(model, batch, folder):
    """The gradient of every parameter for each loss and aggregation, and its loss."""
    tensors = batch.batch
    lengths = tensors["loss_mask"].sum(-1).tolist()
    log_probs, _ = padded_log_probs(model, batch, folder)  # (B, R)
    leaf = log_probs.detach().double().requires_grad_()
    flat = torch.cat([leaf.detach()[row, :length] for row, length in enumerate(lengths)])
    advantages = torch.cat(
        [tensors["advantages"][row, :length].double() for row, length in enumerate(lengths)]
    )
    covariances = ((flat - flat.mean()) * (advantages - advantages.mean())).split(lengths)
    smallest = torch.cat(covariances).sort(descending=True).values[int(0.2 * len(flat)) - 1]
    found = {}
    for loss, mode in CASES:
        rows = [
            REFERENCES[loss](
                leaf[row, :length], tensors["old_log_probs"][row, :length].double(),
                tensors["advantages"][row, :length].double(), options_of(loss) | {"smallest": smallest},
                covariances[row],
            )
            for row, length in enumerate(lengths)
        ]  # fmt: skip
        value = aggregate(rows, mode)
        (slope,) = torch.autograd.grad(value, leaf)
        gradients = torch.autograd.grad(log_probs, list(model.parameters()), slope.float(), retain_graph=True)
        names = [name for name, _ in model.named_parameters()]
        found[loss, mode] = (value.item(), dict(zip(names, gradients, strict=True)))
    return found


# The same by the real parts, on gloo ranks.


def update_on_ranks(rank, world_size, root, cases):
    """For each case: the loss, its statistics, and the parameter whose gradient is furthest off."""
    from verl.config.worker import ActorConfig
    from verl.workers.roles.actor import ActorTraining, DataParallelPPOActor

    batch = DataProto.load_from_disk(root / "batch")
    size = len(batch) // world_size
    batch = batch[list(range(rank * size, (rank + 1) * size))]
    expected = torch.load(root / "reference.pt")
    forward = build_forward("text", root / "model", False, world_size)
    results = {}
    for loss, mode in cases:
        for setting in MICRO_BATCHES:
            optimizer = RecordingOptimizer(forward.model)
            scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
            config = ActorConfig(
                global_batch_size=4, max_grad_norm=1e9, loss_type=loss, loss_avg_mode=mode,
                **options_of(loss), **MICRO_BATCHES[setting],
            )  # fmt: skip
            training = ActorTraining(
                optimizer, scheduler, rollout_n=N, max_response_length=MAX_RESPONSE_LENGTH
            )
            updated = DataParallelPPOActor(config, forward, training).update(batch, TEMPERATURE)
            errors = relative_errors(optimizer.gradients[0], expected[loss, mode][1])
            worst = max((error, name) for name, error in errors.items())
            results[loss, mode, setting] = (worst, updated.metrics)
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("losses")
    folder = save_tiny_model(root / "model", "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    batch = make_batch("text", folder)
    generator = torch.Generator().manual_seed(3)
    mask = batch.batch["loss_mask"]
    with torch.no_grad():
        log_probs, _ = padded_log_probs(model, batch, folder)
    noise = torch.randn(mask.shape, generator=generator)
    advantages = torch.randn(len(mask), 1, generator=generator) + 0.3 * torch.randn(
        mask.shape, generator=generator
    )
    added = {
        "old_log_probs": (log_probs + 0.3 * noise) * mask,
        "advantages": advantages * mask,
        "row_ids": torch.arange(len(mask)),
    }
    batch = batch.merge(DataProto.from_dict(added))
    batch.save_to_disk(root / "batch")
    torch.save(reference_gradients(model, batch, folder), root / "reference.pt")
    return root


@pytest.fixture(scope="module")
def results_of(root):
    """The results of a number of ranks for a grid, computed once whatever the order of the cases."""
    return cache(lambda world_size, grid: run_distributed(update_on_ranks, world_size, root, GRIDS[grid]))


BY_DAY = (2, "by day")


def all_cases(run, mark=()):
    return [pytest.param(run, *case, marks=mark) for case in GRIDS[run[1]]]


@pytest.mark.parametrize(
    ("run", "loss", "mode"),
    [
        *all_cases(BY_DAY),
        *all_cases((2, "at night"), pytest.mark.nightly("verl/workers/roles", "verl/algorithms")),
        *(case for grid in GRIDS for case in all_cases((1, grid), pytest.mark.slow)),
    ],
)
def test_loss_and_gradient_of_every_parameter_equal_the_padded_reference(results_of, root, run, loss, mode):
    value, _ = torch.load(root / "reference.pt")[loss, mode]

    for rank in results_of(*run):
        for setting in MICRO_BATCHES:
            (error, name), metrics = rank[loss, mode, setting]
            assert error < TOLERANCE, (setting, name)
            assert metrics["actor/pg_loss"] == pytest.approx(value, rel=TOLERANCE, abs=1e-7), setting


def test_the_batch_exercises_bounds_and_selections(results_of):
    results = results_of(*BY_DAY)
    for loss, name in [
        ("default", "pg_clipfrac_higher"), ("gspo", "pg_clipfrac_higher"), ("gspo", "pg_clipfrac_lower"),
        ("cispo", "pg_clipfrac_higher"),
        ("geo_mean", "pg_clipfrac_higher"), ("dppo_tv", "pg_clipfrac_higher"),
        ("dppo_tv", "pg_clipfrac_lower"), ("dppo_kl", "pg_clipfrac_higher"), ("clip_cov", "clip_cov_frac"),
        ("kl_cov", "kl_cov_frac"),
    ]:  # fmt: skip
        _, metrics = results[0][loss, "token", "all rows"]
        assert 0 < metrics[f"actor/{name}"] < 1, (loss, name)


def choose_at_random(rank, world_size, root):
    """The gradient of a loss that leaves out a few tokens at random."""
    from verl.config.worker import ActorConfig
    from verl.workers.roles.actor import ActorTraining, DataParallelPPOActor

    batch = DataProto.load_from_disk(root / "batch")
    rows = list(range(len(batch)))[::-1] if world_size == 2 else list(range(len(batch)))
    size = len(batch) // world_size
    batch = batch[rows[rank * size : (rank + 1) * size]]
    forward = build_forward("text", root / "model", False, world_size)
    found = []
    for seed in (0, 1):
        optimizer = RecordingOptimizer(forward.model)
        config = ActorConfig(
            global_batch_size=4, max_grad_norm=1e9, loss_type="clip_cov", clip_cov_ratio=0.05,
            clip_cov_lb=0.0, clip_cov_ub=50.0, micro_batch_size_per_device_for_update=world_size,
            dynamic_batching=False,
        )  # fmt: skip
        training = ActorTraining(
            optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0), rollout_n=N
        )
        DataParallelPPOActor(config, forward, training).update(batch, TEMPERATURE, seed=seed)
        found.append(torch.cat([grad.flatten() for grad in optimizer.gradients[0].values()]).numpy())
    return found


@pytest.mark.slow  # three more groups of ranks
def test_a_random_choice_follows_the_seed_and_not_the_ranks_or_the_order_of_the_rows(root):
    [one] = run_distributed(choose_at_random, 1, root)
    two, _ = run_distributed(choose_at_random, 2, root)

    for alone, shared in zip(one, two, strict=True):
        assert np.linalg.norm(alone - shared) / np.linalg.norm(alone) < TOLERANCE
    assert np.linalg.norm(one[0] - one[1]) / np.linalg.norm(one[0]) > 0.01
