# SPDX-License-Identifier: Apache-2.0
"""The update of one device, packed and sharded, against the padded float32 reference on the CPU."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoProcessor

from tests.equivalence.test_update import (
    CLIP,
    ENTROPY_COEF,
    FAMILIES,
    KL_COEF,
    TEMPERATURE,
    N,
    RecordingOptimizer,
    add_update_keys,
    make_batch,
    padded_log_probs,
    reference_update,
)
from tests.gpu.alone import run_apart
from verl.models.hub_names import auto_class
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto

pytestmark = pytest.mark.nightly("verl/workers", "verl/models")

# Of log-probs, in nats, and of the whole gradient, beside its norm. bfloat16 keeps 8 bits.
TOLERANCE = {"fp32": (1e-4, 1e-4), "bf16": (0.1, 0.1)}


def update_once(root, kind, dtype, device):
    """Log-probs of the old policy, gradients of each mini batch, metrics."""

    from verl.config.model import FSDPConfig, ModelConfig
    from verl.config.worker import ActorConfig
    from verl.data.media.loader import MediaLoader
    from verl.data.media.sizes import MediaOptions
    from verl.distributed.fsdp import make_mesh
    from verl.workers.model_builder import build_model
    from verl.workers.packing.forward import PackedForward
    from verl.workers.roles.actor import ActorTraining, DataParallelPPOActor, KLLoss

    folder = root / "model"
    model = build_model(
        ModelConfig(model_path=str(folder)), FSDPConfig(mp_param_dtype=dtype), mesh=make_mesh(1, -1, device),
        device=device, trainable=True,
    )  # fmt: skip
    media = None
    if kind == "image":
        options = MediaOptions(min_pixels=1, max_pixels=10**6)
        media = MediaLoader(AutoProcessor.from_pretrained(folder), options)
    optimizer = RecordingOptimizer(model)
    actor = DataParallelPPOActor(
        ActorConfig(
            global_batch_size=2, micro_batch_size_per_device_for_update=2, max_grad_norm=1e9,
            entropy_coef=ENTROPY_COEF, **CLIP,
        ),
        PackedForward(model, media, device),
        ActorTraining(
            optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0), rollout_n=N,
            kl_loss=KLLoss("low_var_kl", KL_COEF),
        ),
    )  # fmt: skip
    batch = DataProto.load_from_disk(root / "batch")
    log_probs = actor.compute_log_probs(batch, TEMPERATURE).batch["old_log_probs"]
    metrics = actor.update(batch, TEMPERATURE).metrics
    gradients = [{name: grad.cpu() for name, grad in mini.items()} for mini in optimizer.gradients]
    torch.save((log_probs, gradients, metrics), root / f"{dtype}.pt")


def off_the_bounds(batch, log_probs):
    """Move old log-probs so that rounding carries no ratio over a clipping bound, where gradients jump."""
    margin = TOLERANCE["bf16"][0]
    mask = batch.batch["loss_mask"]
    log_ratio = log_probs - batch.batch["old_log_probs"]
    for bound in (1 - CLIP["clip_ratio_low"], 1 + CLIP["clip_ratio_high"], CLIP["clip_ratio_dual"]):
        away = log_ratio - math.log(bound)
        log_ratio = torch.where(away.abs() < margin, math.log(bound) + margin * away.sign(), log_ratio)
    return batch.merge({"old_log_probs": (log_probs - log_ratio) * mask}, replace=["old_log_probs"])


def distance(found, expected):
    """Norm of the difference of two gradients over all parameters, beside the norm of the second."""
    difference = sum((found[name] - grad).double().square().sum().item() for name, grad in expected.items())
    size = sum(grad.double().square().sum().item() for grad in expected.values())
    return math.sqrt(difference / size)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request, tmp_path_factory):
    """A folder with model and batch; what the reference says about them."""
    kind = request.param
    root = tmp_path_factory.mktemp(kind)
    folder = save_tiny_model(root / "model", FAMILIES[kind])
    auto = auto_class(AutoConfig.from_pretrained(folder))
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    batch = make_batch(kind, folder)
    with torch.no_grad():
        log_probs = padded_log_probs(model, batch, folder)[0]
    batch = off_the_bounds(add_update_keys(batch, log_probs), log_probs)
    batch.save_to_disk(root / "batch")
    return (
        kind,
        root,
        log_probs * batch.batch["loss_mask"],
        reference_update(model, batch, folder, "token"),
    )


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_log_probs_loss_and_gradients_equal_the_padded_reference(case, dtype, device):
    kind, root, expected_log_probs, (expected, expected_metrics) = case
    of_log_probs, of_gradients = TOLERANCE[dtype]

    run_apart(update_once, root, kind, dtype, device, device=device)

    log_probs, gradients, metrics = torch.load(root / f"{dtype}.pt")
    assert (log_probs - expected_log_probs).abs().max() < of_log_probs
    for found, wanted in zip(gradients, expected, strict=True):
        assert distance(found, wanted) < of_gradients
    losses = [metrics[f"actor/{name}"] for name in ("pg_loss", "kl_loss", "entropy")]
    wanted = [expected_metrics[name] for name in ("pg_loss", "kl_loss", "entropy")]
    assert losses == pytest.approx(wanted, rel=of_gradients, abs=of_log_probs)
