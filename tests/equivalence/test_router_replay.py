# SPDX-License-Identifier: Apache-2.0
"""Replayed routes: a model's own change nothing, bit for bit, however its rows are packed and divided.

Two passes are compared that are alike but for the replay: log-probs, entropies and every gradient.
"""

from typing import NamedTuple

import pytest
import torch

from tests.equivalence.test_packed_forward import IMAGE, Features, as_batch
from tests.equivalence.test_shared_prompts import media_batch, text_batch
from tests.helpers.distributed import run_distributed
from tests.workers.rollout.reference import collect, hub_tensors, load_model, rollout_config, setup_of
from verl.batch_keys import OLD_ROUTES, ROUTE_MATCHES
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig
from verl.distributed.fsdp import make_mesh
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.mixture.routes import extend_routes
from verl.models.mixture.routing import ExpertChoices
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto
from verl.utils.plain_data import objects
from verl.workers.model_builder import build_model
from verl.workers.packing.forward import PackedForward
from verl.workers.packing.sp_strategy import Strategy
from verl.workers.roles.routers import RouteObserver, column_of
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import RolloutRequest, SamplingOptions

SIZES = ((9, (7, 20, 1, 3)), (24, (3, 8, 2, 5)))  # two prompts, four rows of each
GROUPS = (((IMAGE,), (3, 5)), ((), (6, 2)))
COLUMN = "rollout_routes"
EXPERTS, TOP_K = 8, 2


class Case(NamedTuple):
    """A way to run the rows of a batch."""

    family: str = "qwen3_moe"
    shared: bool = False
    ulysses: int = 1
    ring: int = 1
    checkpointing: bool = False
    lora: bool = False


ALONE = [
    Case(),
    Case(shared=True),
    Case(checkpointing=True),
    Case(shared=True, checkpointing=True, lora=True),
    Case("qwen3_vl_moe", shared=True, checkpointing=True),
]
TOGETHER = [
    Case(shared=True, ulysses=2, checkpointing=True),
    Case(ring=2, checkpointing=True),
    Case("qwen3_vl_moe", ulysses=2, shared=True),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3_moe": str(save_tiny_model(root / "text", "qwen3_moe", num_experts=EXPERTS)),
        "qwen3_vl_moe": str(save_tiny_model(root / "vision", "qwen3_vl_moe")),
    }


def build(case, folder, rank, world_size, dtype="fp32"):
    lora = LoraConfig(rank=4, target_modules="all-linear") if case.lora else LoraConfig()
    model = build_model(
        ModelConfig(folder, enable_gradient_checkpointing=case.checkpointing, lora=lora),
        FSDPConfig(torch_dtype="fp32", mp_param_dtype=dtype),
        mesh=make_mesh(world_size, -1, "cpu"),
        device="cpu",
        trainable=True,
    )
    sp = SequenceParallel.build(case.ulysses, case.ring)
    forward = PackedForward(model, Features(), share_prompt=case.shared, sp=sp)
    forward.strategies = [Strategy.SHARDED]
    return forward, ExpertChoices(model)


def passes(forward, choices, batch, column):
    """Log-probs, entropies, gradients and what was observed in a forward and backward pass."""
    forward.model.zero_grad()
    observer = RouteObserver(choices, column, replays=column is not None, records=True)
    with forward.observed_by([observer]) as observed:
        result = forward.log_probs(batch, 0.8, with_entropy=True)
    (result.log_probs.sum() + 0.1 * result.entropy.sum()).backward()
    gradients = {
        name: getattr(param.grad, "full_tensor", lambda grad=param.grad: grad)().clone()
        for name, param in forward.model.named_parameters()
        if param.grad is not None
    }
    return result.log_probs.detach(), result.entropy.detach(), gradients, observed


def with_routes(batch, observed):
    column = column_of(observed[OLD_ROUTES], batch.batch["attention_mask"])
    return batch.merge(DataProto.from_dict({}, {COLUMN: column}))


def share(matches):
    hits, known = matches.sum(0).tolist()
    return hits / known


def differences(rank, world_size, cases, folders):
    found = []
    for case in cases:
        folder = folders[case.family]
        batch = text_batch(SIZES) if case.family == "qwen3_moe" else media_batch(folder, GROUPS)
        forward, choices = build(case, folder, rank, world_size)
        *plain, gradients, observed = passes(forward, choices, batch, None)
        own = with_routes(batch, observed)
        *replayed, again, seen = passes(forward, choices, own, COLUMN)
        equal = all(map(torch.equal, plain, replayed)) and gradients.keys() == again.keys()
        equal = equal and all(torch.equal(gradients[name], grad) for name, grad in again.items())
        router = any("mlp.gate" in name and grad.any() for name, grad in again.items())
        # other experts: each number plus one
        count = EXPERTS if case.family == "qwen3_moe" else 4
        moved = objects((routes + 1) % count for routes in own.non_tensor_batch[COLUMN])
        shifted = own.merge(DataProto.from_dict({}, {COLUMN: moved}), replace=[COLUMN])
        *other, _, used = passes(forward, choices, shifted, COLUMN)
        kept = with_routes(batch, used).non_tensor_batch[COLUMN]
        found.append(
            (
                equal,
                router or case.lora,
                share(seen[ROUTE_MATCHES]),
                not torch.equal(other[0], plain[0]),
                all(torch.equal(kept[row], moved[row]) for row in range(len(batch))),
            )
        )
    return found


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(1, ALONE, id="one rank"),
        pytest.param(2, TOGETHER, marks=pytest.mark.nightly("verl/workers"), id="two ranks"),
    ],
)
def test_replaying_a_models_own_routes_changes_no_bit(folders, world_size, cases):
    for found in run_distributed(differences, world_size, cases, folders):
        for case, (is_equal, learns, agreement, moves, are_used) in zip(cases, found, strict=True):
            assert is_equal, case
            assert learns, case
            assert agreement == 1.0, case
            assert moves and are_used, case


def sampled_rows(folder, engine_name):
    """Rows of a bf16 engine with its log-probs and routes: eight prompts, four responses each."""
    engine = build_rollout_engine(
        rollout_config(name=engine_name, dtype="bf16"), setup_of(folder, records_routes=True)
    )
    engine.sync_weights(hub_tensors(load_model(folder)))
    engine.wake()
    generator = torch.Generator().manual_seed(3)
    requests = [
        RolloutRequest(f"u{number}", torch.randint(8, 300, (20,), generator=generator).tolist())
        for number in range(8)
    ]
    responses = collect(engine, requests, SamplingOptions(n=4, max_tokens=40, ignore_eos=True))
    engine.close()
    prompts = {request.uid: torch.tensor(request.prompt_token_ids) for request in requests}
    rows = list(responses.values())
    texts = [(prompts[row.uid], torch.tensor(row.token_ids), None, None) for row in rows]
    columns = {
        "uid": objects(row.uid for row in rows),
        COLUMN: objects(extend_routes(row.routes, 60) for row in rows),
    }
    batch = as_batch(texts, prompt=20, response=40).merge(DataProto.from_dict({}, columns))
    return batch, torch.tensor([row.log_probs for row in rows])


def mismatches(rank, world_size, cases, folder, batch, sampled):
    """Mean and largest difference of log-probs to the engine's, without and with replay; and agreement."""
    found = []
    for case in cases:
        forward, choices = build(case, folder, rank, world_size, dtype="bf16")
        forward.model.eval()
        errors = []
        for replays in (False, True):
            observer = RouteObserver(choices, COLUMN, replays=replays)
            with torch.no_grad(), forward.observed_by([observer]) as observed:
                difference = (forward.log_probs(batch, 1.0).log_probs - sampled).abs()
            errors += [difference.mean().item(), difference.max().item(), share(observed[ROUTE_MATCHES])]
        found.append(errors)
    return found


@pytest.mark.heavy
@pytest.mark.slow  # tests/trainer/test_router_replay_runs.py compares engine and trainer in every suite
def test_the_engines_routes_bring_bf16_log_probs_together(folders):
    batch, sampled = sampled_rows(folders["qwen3_moe"], "hf")
    cases = {1: [Case(), Case(shared=True)], 2: [Case(shared=True, ulysses=2)]}

    for ranks, those in cases.items():
        for found in run_distributed(mismatches, ranks, those, folders["qwen3_moe"], batch, sampled):
            for case, (mean, largest, agreement, mean_after, largest_after, _) in zip(
                those, found, strict=True
            ):
                assert 0.98 < agreement < 1, case
                assert mean_after < mean, case
                assert largest > 0.2 and largest_after < 0.06, case
