# SPDX-License-Identifier: Apache-2.0
"""Experts that are divided over ranks against one process that holds them all, in float32.

Log-probs, entropies and the gradient of every parameter must not depend on where experts are: with packed
rows, shared prompts, media, recomputed blocks, sequence parallelism and replicas, and where a rank's experts
get no token.
"""

from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.equivalence.test_packed_forward import CLIP, IMAGE, Features, load, reference, vision_batch
from tests.equivalence.test_shared_prompts import text_batch
from tests.helpers.distributed import run_distributed
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig
from verl.distributed.fsdp import clip_grad_norm, make_mesh
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.registry import check_model
from verl.models.tiny import save_tiny_model
from verl.workers.model_builder import build_model
from verl.workers.packing.forward import PackedForward
from verl.workers.packing.sp_strategy import Strategy

pytestmark = pytest.mark.heavy

SIZES = ((9, (7, 20, 1, 3)), (24, (3, 8, 2, 5)))  # two prompts, four rows of each
CONTENTS = [((IMAGE,), 5), ((), 4), ((IMAGE, CLIP), 6), ((), 3)]
UNUSED = "one half unused"


class Case(NamedTuple):
    """Division of a model over ranks, and its options."""

    name: str = "qwen3_moe"
    size: int = 2
    fsdp_size: int = -1
    shared: bool = False
    checkpointing: bool = False
    ulysses: int = 1
    ring: int = 1
    full_shard: bool = True
    micro_batches: int = 1


TWO = [
    Case(),
    Case(shared=True, checkpointing=True, micro_batches=2),
    Case(UNUSED, checkpointing=True),
    Case("qwen3_vl_moe", checkpointing=True),
    Case(ulysses=2, shared=True),
    Case(ring=2, checkpointing=True),
    Case(full_shard=False),
]
FOUR = [
    Case(shared=True, checkpointing=True),
    Case(UNUSED),
    Case("qwen3_vl_moe"),
    Case(size=4, checkpointing=True),
    Case(fsdp_size=2),
    Case(ulysses=2, checkpointing=True),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    found = {name: save_tiny_model(root / name, name) for name in ("qwen3_moe", "qwen3_vl_moe")}
    found[UNUSED] = save_tiny_model(root / "unused", "qwen3_moe", num_experts_per_tok=1, norm_topk_prob=False)
    use_two_experts(found[UNUSED] / "model.safetensors")
    return found


def use_two_experts(file):
    """Give two experts opposite router weights and the others none: all tokens choose between the two."""
    weights = load_file(file)
    for name, tensor in weights.items():
        if name.endswith("mlp.gate.weight"):
            tensor[1], tensor[2:] = -tensor[0], 0.0
    save_file(weights, file, metadata={"format": "pt"})


def batch_of(case, folder):
    return vision_batch(folder, CONTENTS) if "vl" in case.name else text_batch(SIZES)


def loss_of(log_probs, entropy, weights):
    return (log_probs * weights + 0.1 * entropy).sum()


def expected(folder, batch, weights):
    model = load(folder, False)
    log_probs, entropy = reference(model, batch, 0.8)
    loss_of(log_probs, entropy, weights).backward()
    return log_probs.detach(), {name: param.grad for name, param in model.named_parameters()}


def divided(case, folder, world_size, **options):
    return build_model(
        ModelConfig(str(folder), enable_gradient_checkpointing=case.checkpointing, **options),
        FSDPConfig(
            torch_dtype="fp32",
            mp_param_dtype="fp32",
            fsdp_size=case.fsdp_size,
            expert_parallel_size=case.size,
            enable_full_shard=case.full_shard,
        ),
        mesh=make_mesh(world_size, case.fsdp_size, "cpu"),
        device="cpu",
        trainable=True,
    )


def compare(case, folders, rank, world_size):
    folder = folders[case.name]
    batch = batch_of(case, folder)
    weights = torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))
    theirs, their_gradients = expected(folder, batch, weights)
    model = divided(case, folder, world_size)
    sp = SequenceParallel.build(case.ulysses, case.ring)
    forward = PackedForward(model, Features(), share_prompt=case.shared, sp=sp)
    forward.strategies = [Strategy.SHARDED]
    rows = list(range(len(batch)))[sp.dp_index :: sp.dp_size]
    difference = check_model(model)
    errors = []
    for part in (rows[start :: case.micro_batches] for start in range(case.micro_batches)):
        result = forward.log_probs(batch[part], 0.8, with_entropy=True)
        errors.append((result.log_probs - theirs[part]).abs().max().item())
        (loss_of(result.log_probs, result.entropy, weights[part]) * world_size).backward()

    own = {
        name: param.grad.full_tensor() for name, param in model.named_parameters() if param.grad is not None
    }
    names = {name for name, grad in their_gradients.items() if grad is not None}
    total = sum(grad.square().sum() for grad in their_gradients.values() if grad is not None).sqrt()
    gradients = max(((own[name] - their_gradients[name]).norm() / total).item() for name in names)
    norm = clip_grad_norm(model, 1e9)
    return {
        "log_probs": max(errors),
        "gradients": gradients,
        "norm": abs(norm / total.item() - 1),
        "check": difference,
        "missing": sorted(names - own.keys()),
    }


def compare_all(rank, world_size, cases, folders):
    return [compare(case, folders, rank, world_size) for case in cases]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(2, TWO, id="two ranks"),
        pytest.param(4, FOUR, id="four ranks", marks=pytest.mark.nightly("verl/models", "verl/workers")),
    ],
)
def test_divided_experts_compute_and_learn_as_those_of_one_process(folders, world_size, cases):
    for found in run_distributed(compare_all, world_size, cases, folders):
        for case, each in zip(cases, found, strict=True):
            assert each.pop("missing") == [], case
            assert max(each.values()) < 1e-5, (case, each)


def adapted(rank, world_size, folder):
    """Log-probs and gradients of adapters next to frozen experts, whole and divided."""
    batch, found = text_batch(SIZES)[list(range(8))[rank::world_size]], []
    for size in (1, 2):
        torch.manual_seed(0)  # of the adapters' initial values
        case = Case(size=size, checkpointing=True)
        model = divided(case, folder, world_size, lora=LoraConfig(rank=4))
        forward = PackedForward(model, Features(), share_prompt=True)
        log_probs = forward.log_probs(batch, 0.8).log_probs
        log_probs.square().sum().backward()
        parameters = dict(model.named_parameters())
        assert all(param.grad is None for name, param in parameters.items() if ".experts." in name)
        grads = [param.grad.full_tensor() for param in parameters.values() if param.grad is not None]
        found.append((log_probs.detach(), torch.cat([grad.flatten() for grad in grads])))
    (whole, wanted), (parts, gradient) = found
    return (parts - whole).abs().max().item(), ((gradient - wanted).norm() / wanted.norm()).item()


def test_adapters_of_other_modules_learn_the_same_next_to_divided_experts(folders):
    for log_probs, gradients in run_distributed(adapted, 2, folders["qwen3_moe"]):
        assert log_probs < 1e-5 and gradients < 1e-5
