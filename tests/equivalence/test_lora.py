# SPDX-License-Identifier: Apache-2.0
"""Adapters under FSDP2, packing, shared prompts and sequence parallelism against peft on padded rows."""

from typing import NamedTuple

import peft
import pytest
import torch

from tests.equivalence.test_packed_forward import IMAGE, WIDE, Features, load, reference
from tests.equivalence.test_shared_prompts import media_batch, text_batch
from tests.helpers.distributed import run_distributed
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig
from verl.distributed.fsdp import make_mesh
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.tiny import save_tiny_model
from verl.workers.model_builder import build_model
from verl.workers.packing.forward import BaseForward, PackedForward

pytestmark = pytest.mark.heavy

FP32 = FSDPConfig(torch_dtype="fp32", mp_param_dtype="fp32")
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "use_rslora": True}
METHODS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
FAMILIES = {"text": "qwen2", "images": "qwen2_5_vl", "experts": "qwen3_moe"}
METHODS_OF = dict.fromkeys(("text", "images"), METHODS) | {"experts": {"experts": EXPERTS}}
# of a mixture peft would adapt the router too, and experts with twice the rank
LINEAR_OF = {"experts": ["q_proj", "k_proj", "v_proj", "o_proj"]}
GROUPS = [((WIDE, IMAGE), (5, 8, 3)), ((IMAGE,), (4, 1)), ((), (2,))]


class Case(NamedTuple):
    """The model to run, and its division over ranks."""

    content: str
    method: str
    ulysses: int = 1
    ring: int = 1
    shared: bool = True


ALONE = [Case("text", method) for method in METHODS] + [
    Case("images", "lora", shared=False),
    Case("images", "lora"),
    Case("experts", "experts"),
]
TOGETHER = [
    Case("text", "lora"),
    Case("text", "dora"),
    Case("images", "lora"),
    Case("images", "lora", shared=False),
    Case("text", "lora", ulysses=2),
    Case("images", "lora", ulysses=2),
    Case("images", "lora", ring=2),
    Case("experts", "experts"),
    Case("experts", "experts", ulysses=2),
]


class Found(NamedTuple):
    """Largest differences from peft, and whether the base is untouched."""

    log_probs: float
    gradients: float  # of all adapters together, relative
    base_is_exact: bool


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For each content a model, and for each method an adapter with random numbers in both matrices."""
    root = tmp_path_factory.mktemp("models")
    found = {}
    for content, family in FAMILIES.items():
        found[content] = str(save_tiny_model(root / family, family))
        for method, options in METHODS_OF[content].items():
            torch.manual_seed(3)
            targets = LINEAR_OF.get(content, "all-linear")
            config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, **options)
            model = peft.get_peft_model(load(found[content], False), config)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.05)
            model.save_pretrained(root / f"{content}_{method}")
            found[f"{content}_{method}"] = str(root / f"{content}_{method}")
    return found


def batch_of(content, folders):
    return text_batch() if content != "images" else media_batch(folders[content], GROUPS)


def from_peft(case, folders, batch, weights):
    """Log-probs (B, R) and the gradient of each adapter tensor, by its name without peft's prefix."""
    base = load(folders[case.content], False)
    model = peft.PeftModel.from_pretrained(
        base, folders[f"{case.content}_{case.method}"], is_trainable=True, autocast_adapter_dtype=False
    )
    log_probs, entropy = reference(model, batch, 0.8)
    (log_probs * weights + 0.1 * entropy).sum().backward()
    gradients = {
        name.removeprefix("base_model.model."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return log_probs.detach(), gradients


def compare(case, folders, rank, world_size):
    batch = batch_of(case.content, folders)
    weights = torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))
    expected, their_gradients = from_peft(case, folders, batch, weights)
    lora = LoraConfig(path=folders[f"{case.content}_{case.method}"])
    path, mesh = folders[case.content], make_mesh(world_size, -1, "cpu")
    model = build_model(ModelConfig(path, lora=lora), FP32, mesh=mesh, device="cpu", trainable=True)
    base = build_model(ModelConfig(path), FP32, mesh=mesh, device="cpu", trainable=False)
    sp = SequenceParallel.build(case.ulysses, case.ring)
    options = dict(media=Features(), share_prompt=case.shared, sp=sp)
    # Data-parallel ranks have rows of their own.
    rows = list(range(len(batch)))[rank::world_size] if sp.size == 1 else list(range(len(batch)))

    with torch.no_grad():
        untouched = BaseForward(model, **options).log_probs(batch[rows], 0.8).log_probs
        plain = PackedForward(base, **options).log_probs(batch[rows], 0.8).log_probs
    result = PackedForward(model, **options).log_probs(batch[rows], 0.8, with_entropy=True)
    ((result.log_probs * weights[rows] + 0.1 * result.entropy).sum() * world_size).backward()

    own = {
        name: parameter.grad.full_tensor()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert own.keys() == their_gradients.keys()
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)
    difference = sum((own[name] - grad).square().sum().item() for name, grad in their_gradients.items())
    size = sum(grad.square().sum().item() for grad in their_gradients.values())
    return Found(
        (result.log_probs - expected[rows]).abs().max().item(),
        (difference / size) ** 0.5,
        torch.equal(untouched, plain) and not torch.equal(untouched, result.log_probs),
    )


def compare_all(rank, world_size, cases, folders):
    return [compare(case, folders, rank, world_size) for case in cases]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(1, ALONE, marks=pytest.mark.nightly("verl/workers", "verl/models"), id="one rank"),
        pytest.param(2, TOGETHER, id="two ranks"),
    ],
)
def test_adapters_compute_and_learn_as_in_peft_with_a_frozen_base(folders, world_size, cases):
    for found in run_distributed(compare_all, world_size, cases, folders):
        for case, (log_probs, gradients, base_is_exact) in zip(cases, found, strict=True):
            assert log_probs < 1e-5, case
            assert gradients < 1e-5, case
            assert base_is_exact, case
