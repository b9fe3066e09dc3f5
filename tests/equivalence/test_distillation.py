# SPDX-License-Identifier: Apache-2.0
"""The distillation loss against a padded single-process float64 computation over the full vocabulary.

Loss and gradients must not depend on micro batches, packing, shared prompts, the number of ranks or ranks
that share sequences; each row is compared with its own teacher.
"""

import pytest
import torch
from transformers import AutoConfig

from tests.equivalence.test_update import (
    PROMPTS,
    TEMPERATURE,
    N,
    RecordingOptimizer,
    make_batch,
    rank_rows,
    relative_errors,
)
from tests.helpers.distributed import run_distributed
from tests.helpers.nightly import at_night
from verl.models.hub_names import auto_class
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto, objects

pytestmark = pytest.mark.heavy

TEACHERS = {"math": {"num_hidden_layers": 3}, "code": {"hidden_size": 64, "vocab_size": 640}}
MODES = ["reverse_kl", "forward_kl", "reverse_kl_topk", "forward_kl_topk", "mse"]
K, TOLERANCE = 7, 1e-5
SETTINGS = {  # options of the actor, shared prompts, ranks that share a sequence, ranks
    "one row": ({"micro_batch_size_per_device_for_update": 1, "dynamic_batching": False}, False, 1, 1),
    "all rows": ({"micro_batch_size_per_device_for_update": 64}, False, 1, 1),
    "shared prompts": ({"micro_batch_size_per_device_for_update": 3}, True, 1, 1),
    "2 ranks": ({"micro_batch_size_per_device_for_update": 1}, False, 1, 2),
    "ulysses": ({"micro_batch_size_per_device_for_update": 2}, False, 2, 2),
}


def plain_logits(folder, batch):
    """A model, and its logits before each response token of each row, without padding, in float64."""
    config = AutoConfig.from_pretrained(folder)
    model = auto_class(config).from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    rows, tensors = [], batch.batch
    for ids, mask, length in zip(
        tensors["input_ids"], tensors["attention_mask"], tensors["loss_mask"].sum(-1).tolist(), strict=True
    ):
        logits = model(input_ids=ids[mask.bool()][None], use_cache=False).logits
        rows.append(logits[0, -length - 1 : -1] / TEMPERATURE)
    return model, rows


def divergence(z, y, targets, mode):
    """(R,) from the logits of student and teacher, by the definitions."""
    vocabulary = min(z.shape[-1], y.shape[-1])
    if mode == "mse":
        d = [x.log_softmax(-1).gather(-1, targets[..., None])[..., 0] for x in (z, y)]
        return (d[0] - d[1]).square() / 2
    log_p, log_q = (x[..., :vocabulary].log_softmax(-1) for x in (z, y))
    if mode.endswith("topk"):
        ids = log_q.topk(K, dim=-1).indices
        rest = torch.ones_like(log_q, dtype=torch.bool).scatter(-1, ids, False)
        log_p, log_q = (
            torch.cat([x.gather(-1, ids), x.masked_fill(~rest, -torch.inf).logsumexp(-1, keepdim=True)], -1)
            for x in (log_p, log_q)
        )
    above, below = (log_q, log_p) if mode.startswith("forward") else (log_p, log_q)
    return (above.exp() * (above - below)).sum(-1)


def expected_update(root, batch, mode):
    """Gradients of each mini batch, and the mean divergence of each teacher's rows."""
    model, z = plain_logits(root / "student", batch)
    with torch.no_grad():
        y = [plain_logits(root / name, batch)[1] for name in TEACHERS]
    ids = batch.batch["teacher_ids"].tolist()
    per_row = [
        divergence(own, y[number][row], batch.batch["responses"][row][: len(own)], mode)
        for row, (own, number) in enumerate(zip(z, ids, strict=True))
    ]
    gradients, size = [], len(batch) // 2
    for part in (per_row[:size], per_row[size:]):
        model.zero_grad()
        torch.cat(part).mean().backward(retain_graph=True)
        gradients.append({name: param.grad.float() for name, param in model.named_parameters()})
    means = {
        name: torch.cat([one for one, own in zip(per_row, ids, strict=True) if own == number]).mean().item()
        for number, name in enumerate(TEACHERS)
    }
    return gradients, means


def build(folder, sp, share, trainable):
    from verl.config.model import FSDPConfig, ModelConfig
    from verl.distributed.fsdp import make_mesh
    from verl.workers.model_builder import build_model
    from verl.workers.packing.forward import PackedForward

    model = build_model(
        ModelConfig(model_path=str(folder)), FSDPConfig(mp_param_dtype="fp32", torch_dtype="fp32"),
        mesh=make_mesh(torch.distributed.get_world_size(), -1, "cpu"), device="cpu", trainable=trainable,
    )  # fmt: skip
    return PackedForward(model, None, "cpu", share, sp)


def update_on_ranks(rank, world_size, root, name):
    from verl.config.distillation import DistillationLossConfig
    from verl.config.worker import ActorConfig
    from verl.distributed.sequence_parallel import SequenceParallel
    from verl.workers.roles.actor import ActorTraining, DataParallelPPOActor
    from verl.workers.roles.teachers import Teachers

    options, share, sp_size, _ = SETTINGS[name]
    sp = SequenceParallel.build(sp_size, 1, 1)
    batch = DataProto.load_from_disk(root / "batch")[rank_rows(rank // sp_size, world_size // sp_size)]
    forwards = {one: build(root / one, sp, share, False) for one in TEACHERS}
    results = {}
    for mode in MODES:
        forward = build(root / "student", sp, share, True)
        teachers = Teachers(forwards, DistillationLossConfig(mode, topk=K))
        optimizer = RecordingOptimizer(forward.model)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        config = ActorConfig(
            global_batch_size=2, max_grad_norm=1e9, micro_batch_size_per_device_for_experience=4,
            divide_short_sequences=True, **options,
        )  # fmt: skip
        training = ActorTraining(
            optimizer, scheduler, rollout_n=N, teachers=teachers, uses_advantages=False
        )  # fmt: skip
        actor = DataParallelPPOActor(config, forward, training)
        found = batch
        if mode == "mse":
            parts = [teachers.compute_log_probs(one, config, batch, TEMPERATURE) for one in TEACHERS]
            found = batch.merge({"teacher_log_probs": sum(parts)})
        metrics = actor.update(found, TEMPERATURE).metrics
        expected, means = torch.load(root / f"{mode}.pt")
        errors = [relative_errors(*pair) for pair in zip(optimizer.gradients, expected, strict=True)]
        worst = max((error, key) for mini in errors for key, error in mini.items())
        shown = {one: metrics[f"distillation/kl/{one}"] for one in TEACHERS}
        results[mode] = (worst, shown, means)
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("distillation")
    save_tiny_model(root / "student", "qwen2", tie_word_embeddings=False)
    for seed, (name, overrides) in enumerate(TEACHERS.items(), 1):
        save_tiny_model(root / name, "qwen2", seed=seed, **overrides)
    batch = make_batch("text", root / "student")
    uids = objects([f"prompt {row // N}" for row in range(PROMPTS * N)])
    ids = torch.tensor([row % 5 % 2 for row in range(len(batch))])  # all of one in some micro batches
    batch = batch.merge(
        {"teacher_ids": ids, "uid": uids, "advantages": torch.zeros(batch.batch["loss_mask"].shape)}
    )
    batch = batch.merge({"old_log_probs": batch.batch["advantages"]})
    batch.save_to_disk(root / "batch")
    for mode in MODES:
        torch.save(expected_update(root, batch, mode), root / f"{mode}.pt")
    return root


@pytest.fixture(scope="module", params=at_night(SETTINGS, "all rows", "one row", "ulysses"), ids=str)
def results(request, root):
    return run_distributed(update_on_ranks, SETTINGS[request.param][3], root, request.param)


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradients_equal_float64_over_the_full_vocabulary_however_the_batch_is_cut(results, mode):
    for rank in results:
        (error, name), shown, means = rank[mode]
        assert error < TOLERANCE, name
        assert shown == pytest.approx(means, rel=1e-5)
