# SPDX-License-Identifier: Apache-2.0
"""The critic's update against a padded single-process float32 reference written here from the formula.

The loss and the gradient of every parameter must not depend on micro-batch size, dynamic batching or the
number of ranks, under every aggregation.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.equivalence.test_every_loss import MAX_RESPONSE_LENGTH, MICRO_BATCHES, N, aggregate
from tests.equivalence.test_scalar_forward_fsdp import score_of, set_score
from tests.equivalence.test_update import (
    PROMPT_LENGTH,
    TOLERANCE,
    RecordingOptimizer,
    make_batch,
    relative_errors,
)
from tests.helpers.closeness import assert_values_close
from tests.helpers.distributed import run_distributed
from verl.algorithms.aggregation import AGGREGATIONS
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto

pytestmark = pytest.mark.heavy

CLIP_RANGE = 0.3


def padded_values(model, score, batch):
    """Values before the response tokens, (B, R), by the model's own padded forward."""
    tensors = batch.batch
    hidden = model.model(
        input_ids=tensors["input_ids"], attention_mask=tensors["attention_mask"],
        position_ids=tensors["position_ids"], use_cache=False,
    ).last_hidden_state  # fmt: skip
    return (hidden @ score.T)[:, PROMPT_LENGTH - 1 : -1, 0]


def reference(model, score, batch):
    """For each aggregation the loss, the gradients, and the share of clipped values."""
    tensors = batch.batch
    values = padded_values(model, score, batch)
    found = {}
    for mode in AGGREGATIONS.names():
        rows, clipped = [], []
        for row, length in enumerate(tensors["loss_mask"].sum(-1).tolist()):
            new, old, goal = (part[row, :length] for part in (values, tensors["values"], tensors["returns"]))
            bounded = old + (new - old).clamp(-CLIP_RANGE, CLIP_RANGE)
            rows.append(torch.stack([(new - goal) ** 2, (bounded - goal) ** 2]).amax(0) / 2)
            clipped.append(((bounded - goal) ** 2 > (new - goal) ** 2).float())
        loss = aggregate(rows, mode)
        trained = dict(model.model.named_parameters(prefix="model")) | {"score.weight": score}
        gradients = torch.autograd.grad(loss, list(trained.values()), retain_graph=True)
        found[mode] = (
            loss.item(), torch.cat(clipped).mean().item(), dict(zip(trained, gradients, strict=True))
        )  # fmt: skip
    return found


def update_on_ranks(rank, world_size, root):
    from verl.config.model import FSDPConfig, ModelConfig
    from verl.config.worker import CriticConfig
    from verl.distributed.fsdp import make_mesh
    from verl.workers.model_builder import build_model
    from verl.workers.packing.forward import PackedForward
    from verl.workers.roles.critic import DataParallelPPOCritic
    from verl.workers.roles.updater import Training

    batch = DataProto.load_from_disk(root / "batch")
    size = len(batch) // world_size
    batch = batch[list(range(rank * size, (rank + 1) * size))]
    model = build_model(
        ModelConfig(model_path=str(root / "model")), FSDPConfig(mp_param_dtype="fp32"),
        mesh=make_mesh(world_size, -1, "cpu"), device="cpu", trainable=True, head="scalar",
        option="worker.critic.model",
    )  # fmt: skip
    set_score(model)
    expected = torch.load(root / "reference.pt")
    results = {}
    for mode in AGGREGATIONS.names():
        for setting, options in MICRO_BATCHES.items():
            optimizer = RecordingOptimizer(model)
            config = CriticConfig(
                global_batch_size=4, max_grad_norm=1e9, cliprange_value=CLIP_RANGE, loss_avg_mode=mode,
                micro_batch_size_per_device_for_experience=3, **options,
            )  # fmt: skip
            critic = DataParallelPPOCritic(
                config, PackedForward(model),
                Training(
                    optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0), N,
                    MAX_RESPONSE_LENGTH,
                ),
            )  # fmt: skip
            metrics = critic.update(batch)
            errors = relative_errors(optimizer.gradients[0], expected[mode][2])
            results[mode, setting] = (max((error, name) for name, error in errors.items()), metrics)
    return results, critic.compute_values(batch).numpy()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("critic")
    folder = save_tiny_model(root / "model", "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    score = score_of(model.config.hidden_size).requires_grad_()
    batch = make_batch("text", folder)
    generator = torch.Generator().manual_seed(3)
    mask = batch.batch["loss_mask"]
    with torch.no_grad():
        values = padded_values(model, score, batch)
    noise = torch.randn(2, *mask.shape, generator=generator)
    added = {"values": (values + 0.4 * noise[0]) * mask, "returns": (values + noise[1]) * mask}
    batch = batch.merge(DataProto.from_dict(added))
    batch.save_to_disk(root / "batch")
    torch.save(reference(model, score, batch), root / "reference.pt")
    torch.save(values * mask, root / "values.pt")
    return root


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["1 rank", "2 ranks"]
)
def results(request, root):
    return run_distributed(update_on_ranks, request.param, root)


@pytest.mark.parametrize("setting", MICRO_BATCHES)
@pytest.mark.parametrize("mode", AGGREGATIONS.names())
def test_loss_and_gradient_of_every_parameter_equal_the_padded_reference(results, root, mode, setting):
    loss, clipped, _ = torch.load(root / "reference.pt")[mode]
    assert 0 < clipped < 1

    for found, _ in results:
        (error, name), metrics = found[mode, setting]
        assert error < TOLERANCE, name
        assert metrics["critic/vf_loss"] == pytest.approx(loss, rel=TOLERANCE)
        assert metrics["critic/vf_clipfrac"] == pytest.approx(clipped, rel=1e-6)


def test_values_of_the_ranks_equal_the_padded_ones_in_order(results, root):
    found = torch.cat([torch.from_numpy(values) for _, values in results])

    assert_values_close(found, torch.load(root / "values.pt"))
