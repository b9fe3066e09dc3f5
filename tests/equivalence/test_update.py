# SPDX-License-Identifier: Apache-2.0
"""The update against a padded single-process float32 reference written here from the formulas alone.

The loss, the gradient of every parameter and the logged means must not depend on micro-batch size, dynamic
batching, packing, gradient checkpointing or the number of ranks.
"""

import io
import math
from functools import partial

import pytest
import torch
from PIL import Image
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoProcessor

from tests.helpers.distributed import run_distributed
from tests.helpers.grids import positions_of
from verl.models.hub_names import auto_class
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto, objects

pytestmark = pytest.mark.heavy

FAMILIES = {"text": "qwen2", "image": "qwen2_5_vl"}
MODES = ["token", "seq"]
MICRO_BATCHES = {  # options of the actor, gradient checkpointing
    "one row": ({"micro_batch_size_per_device_for_update": 1, "dynamic_batching": False}, True),
    "four rows": ({"micro_batch_size_per_device_for_update": 4, "dynamic_batching": False}, False),
    "dynamic": ({"micro_batch_size_per_device_for_update": 1, "dynamic_batching": True}, True),
    "all rows": ({"micro_batch_size_per_device_for_update": 64, "dynamic_batching": True}, False),
}
PROMPTS, N = 4, 3  # 12 rows, 2 mini batches of 2 prompts
PROMPT_LENGTH, RESPONSE_LENGTH = 40, 10
TEMPERATURE, ENTROPY_COEF, KL_COEF = 0.7, 0.05, 0.2
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_dual": 2.0}
TOLERANCE = 1e-5


# The batch: rows of different lengths, images in the first three prompts of four.


def png(size, colour):
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").point(lambda value: (value + colour) % 256).save(
        buffer, "PNG"
    )
    return {"bytes": buffer.getvalue()}


def make_prompts(kind, folder):
    """Token ids, positions and image references of each prompt."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(10, 250, (size,), generator=generator) for size in (5, 12, 3, 20)]
    if kind == "text":
        return [(ids, torch.arange(len(ids)), None) for ids in texts]
    processor, config = AutoProcessor.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    media = [[png((56, 56), 0)], [png((84, 56), 60), png((56, 84), 90)], [png((112, 56), 120)], []]
    prompts = []
    for ids, refs in zip(texts, media, strict=True):
        images = [Image.open(io.BytesIO(ref["bytes"])) for ref in refs]
        grids = (
            processor.image_processor(images=images, return_tensors="pt")["image_grid_thw"] if refs else None
        )
        for grid in [] if grids is None else grids:
            tokens = [config.vision_start_token_id, *[config.image_token_id] * (int(grid.prod()) // 4)]
            ids = torch.cat([ids[:2], torch.tensor([*tokens, config.vision_end_token_id]), ids[2:]])
        positions = positions_of(config, ids, image_grid_thw=grids)
        prompts.append((ids, positions, {"images": refs} if refs else None))
    return prompts


def make_batch(kind, folder):
    generator = torch.Generator().manual_seed(1)
    rows = {key: [] for key in ("input_ids", "attention_mask", "position_ids", "responses", "loss_mask")}
    media = []
    for row, (ids, positions, refs) in enumerate(p for p in make_prompts(kind, folder) for _ in range(N)):
        length = 1 + (row * 7) % RESPONSE_LENGTH
        left, right = PROMPT_LENGTH - len(ids), RESPONSE_LENGTH - length
        response = torch.randint(10, 250, (length,), generator=generator)
        positions = torch.cat([positions, positions[..., -1:] + torch.arange(1, length + 1)], -1)
        pad = partial(torch.nn.functional.pad, pad=(left, right))
        rows["input_ids"].append(pad(torch.cat([ids, response])))
        rows["attention_mask"].append(pad(torch.ones(len(ids) + length, dtype=torch.int64)))
        rows["position_ids"].append(pad(positions))
        rows["responses"].append(rows["input_ids"][-1][PROMPT_LENGTH:])
        rows["loss_mask"].append(rows["attention_mask"][-1][PROMPT_LENGTH:])
        media.append(refs)
    return DataProto.from_dict(
        {key: torch.stack(values) for key, values in rows.items()}, {"multi_modal_data": objects(media)}
    )


# The reference.


def padded_log_probs(model, batch, folder):
    """Log-probs and entropy (B, R) by the model's own padded forward and full logits."""
    tensors, inputs = batch.batch, {}
    positions = tensors["position_ids"]
    if positions.ndim == 3:
        positions = positions.transpose(0, 1)
        refs = [ref for row in batch.non_tensor_batch["multi_modal_data"] if row for ref in row["images"]]
        images = [Image.open(io.BytesIO(ref["bytes"])) for ref in refs]
        if images:
            made = AutoProcessor.from_pretrained(folder).image_processor(images=images, return_tensors="pt")
            inputs = {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
    logits = model(
        input_ids=tensors["input_ids"], attention_mask=tensors["attention_mask"], position_ids=positions,
        use_cache=False, **inputs,
    ).logits  # fmt: skip
    log_p = (logits[:, PROMPT_LENGTH - 1 : -1] / TEMPERATURE).log_softmax(-1)
    return log_p.gather(-1, tensors["responses"][..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def add_update_keys(batch, log_probs):
    """Advantages, and old and reference log-probs near the policy's, so that every bound is met somewhere."""
    generator = torch.Generator().manual_seed(2)
    mask = batch.batch["loss_mask"]
    noise = torch.randn(2, *mask.shape, generator=generator)
    advantages = torch.randn(len(mask), 1, generator=generator)
    added = {
        "old_log_probs": (log_probs + 0.5 * noise[0]) * mask,
        "ref_log_probs": (log_probs + 0.3 * noise[1]) * mask,
        "advantages": advantages * mask,
    }
    return batch.merge(DataProto.from_dict(added))


def token_terms(log_prob, old, ref, advantage):
    """Loss, KL and statistics of one token, from the formulas."""
    ratio = (log_prob - old).exp()
    bounded = min(max(ratio, torch.tensor(0.8)), torch.tensor(1.3))
    loss = max(-advantage * ratio, -advantage * bounded)
    higher = float(-advantage * bounded > -advantage * ratio)
    lower = float(advantage < 0 and loss > -advantage * CLIP["clip_ratio_dual"])
    if lower:
        loss = -advantage * CLIP["clip_ratio_dual"]
    kl = (ref - log_prob).exp() - (ref - log_prob) - 1
    return (
        loss,
        kl,
        {"pg_clipfrac_higher": higher, "pg_clipfrac_lower": lower, "ppo_kl": (old - log_prob).item()},
    )


def reference_update(model, batch, folder, mode):
    """Gradients of each mini batch, and the metrics of the step."""
    size = len(batch) // 2
    gradients, losses, kls, tokens = [], [], [], []
    for mini_batch in (batch[:size], batch[size:]):
        log_probs, entropy = padded_log_probs(model, mini_batch, folder)
        tensors = mini_batch.batch
        rows = []
        for row, length in enumerate(tensors["loss_mask"].sum(-1).tolist()):
            keys = ("old_log_probs", "ref_log_probs", "advantages")
            terms = [
                token_terms(log_probs[row, t], *(tensors[key][row, t] for key in keys)) for t in range(length)
            ]
            tokens += [
                statistics | {"entropy": entropy[row, t].item()} for t, (*_, statistics) in enumerate(terms)
            ]
            rows.append(
                torch.stack(
                    [torch.stack([term[0], term[1], entropy[row, t]]) for t, term in enumerate(terms)]
                )
            )
        means = (
            torch.cat(rows).mean(0) if mode == "token" else torch.stack([row.mean(0) for row in rows]).mean(0)
        )
        pg_loss, kl, bonus = means
        model.zero_grad()
        (pg_loss + KL_COEF * kl - ENTROPY_COEF * bonus).backward()
        gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
        losses.append(pg_loss.item())
        kls.append(kl.item())
    metrics = {name: sum(token[name] for token in tokens) / len(tokens) for name in tokens[0]}
    return gradients, metrics | {"pg_loss": sum(losses) / 2, "kl_loss": sum(kls) / 2}


# The same by the real parts, on gloo ranks.


class RecordingOptimizer(torch.optim.SGD):
    """Keeps the gradients of every step and changes nothing."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.0)
        self.named = dict(model.named_parameters())
        self.gradients = []

    def step(self):
        whole = {
            name: param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            for name, param in self.named.items()
        }
        self.gradients.append({name: grad.clone() for name, grad in whole.items()})


def rank_rows(rank, world_size):
    """Rows of this rank: its share of the first mini batch, then of the second."""
    size = PROMPTS * N // 2 // world_size
    return [mini * PROMPTS * N // 2 + rank * size + row for mini in range(2) for row in range(size)]


def build_forward(kind, folder, checkpointing, world_size):
    from verl.config.model import FSDPConfig, ModelConfig
    from verl.data.media.loader import MediaLoader
    from verl.data.media.sizes import MediaOptions
    from verl.distributed.fsdp import make_mesh
    from verl.workers.model_builder import build_model
    from verl.workers.packing.forward import PackedForward

    model = build_model(
        ModelConfig(model_path=str(folder), enable_gradient_checkpointing=checkpointing),
        FSDPConfig(mp_param_dtype="fp32"),
        mesh=make_mesh(world_size, -1, "cpu"),
        device="cpu",
        trainable=True,
    )
    media = None
    if kind == "image":
        media = MediaLoader(
            AutoProcessor.from_pretrained(folder), MediaOptions(min_pixels=1, max_pixels=10**6)
        )
    return PackedForward(model, media, "cpu")


def relative_errors(found, expected):
    """Norm of the error of each parameter's gradient, relative to the norm of the gradient."""
    return {name: ((found[name] - grad).norm() / grad.norm()).item() for name, grad in expected.items()}


def update_on_ranks(rank, world_size, root):
    """For each case: the metrics and the parameter whose gradient is furthest from the reference's."""

    from verl.config.worker import ActorConfig
    from verl.workers.roles.actor import ActorTraining, DataParallelPPOActor, KLLoss

    results = {}
    for kind in FAMILIES:
        batch = DataProto.load_from_disk(root / kind / "batch")[rank_rows(rank, world_size)]
        for setting, (options, checkpointing) in MICRO_BATCHES.items():
            forward = build_forward(kind, root / kind / "model", checkpointing, world_size)
            for mode in MODES:
                optimizer = RecordingOptimizer(forward.model)
                scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
                config = ActorConfig(
                    global_batch_size=2, max_grad_norm=1e9, entropy_coef=ENTROPY_COEF, loss_avg_mode=mode,
                    **CLIP, **options,
                )  # fmt: skip
                training = ActorTraining(
                    optimizer, scheduler, rollout_n=N, kl_loss=KLLoss("low_var_kl", KL_COEF)
                )
                actor = DataParallelPPOActor(config, forward, training)
                metrics = actor.update(batch, TEMPERATURE).metrics
                expected, _ = torch.load(root / kind / f"reference-{mode}.pt")
                errors = [relative_errors(*pair) for pair in zip(optimizer.gradients, expected, strict=True)]
                worst = max((error, name) for mini in errors for name, error in mini.items())
                results[kind, setting, mode] = (worst, metrics)
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models, batches and the reference's results."""
    root = tmp_path_factory.mktemp("update")
    for kind, family in FAMILIES.items():
        folder = save_tiny_model(root / kind / "model", family)
        config = AutoConfig.from_pretrained(folder)
        model = auto_class(config).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        batch = make_batch(kind, folder)
        with torch.no_grad():
            batch = add_update_keys(batch, padded_log_probs(model, batch, folder)[0])
        batch.save_to_disk(root / kind / "batch")
        for mode in MODES:
            torch.save(reference_update(model, batch, folder, mode), root / kind / f"reference-{mode}.pt")
    return root


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.nightly("verl/workers", "verl/algorithms")), 2],
    ids=["1 rank", "2 ranks"],
)
def results(request, root):
    return run_distributed(update_on_ranks, request.param, root)


cases = pytest.mark.parametrize(
    ("kind", "setting", "mode"),
    [(kind, setting, mode) for kind in FAMILIES for setting in MICRO_BATCHES for mode in MODES],
)


@cases
def test_the_gradient_of_every_parameter_equals_the_padded_reference(results, kind, setting, mode):
    for rank in results:
        (error, name), _ = rank[kind, setting, mode]
        assert error < TOLERANCE, name


@cases
def test_the_logged_means_equal_the_padded_reference_on_every_rank(results, root, kind, setting, mode):
    _, expected = torch.load(root / kind / f"reference-{mode}.pt")

    for rank in results:
        _, metrics = rank[kind, setting, mode]
        found = {name: metrics[f"actor/{name}"] for name in expected}
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=1e-6)
        assert metrics["actor/entropy_loss"] == metrics["actor/entropy"]


def test_the_batch_exercises_every_bound(root):
    for kind in FAMILIES:
        _, metrics = torch.load(root / kind / "reference-token.pt")
        assert 0 < metrics["pg_clipfrac_higher"] < 1
        assert 0 < metrics["pg_clipfrac_lower"] < 1
        assert math.isfinite(metrics["pg_loss"])
