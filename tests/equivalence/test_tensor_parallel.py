# SPDX-License-Identifier: Apache-2.0
"""Layers that are divided over ranks against one process that holds them whole, in float32.

Log-probs, entropies, KL divergences, values and the gradient of every parameter must not depend on the
division: with packed rows, shared prompts, recomputed blocks, tiled MLPs, replicas and micro batches. And an
optimizer step must leave the same weights.
"""

from typing import NamedTuple

import pytest
import torch
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.equivalence.test_packed_forward import Features, load, reference
from tests.equivalence.test_scalar_forward import load_scalar
from tests.equivalence.test_shared_prompts import text_batch
from tests.helpers.causal_families import FAMILIES, SMALL
from tests.helpers.distributed import run_distributed
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig
from verl.config.sft import SFTActorConfig
from verl.distributed.fsdp import clip_grad_norm, make_mesh
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.weights.gathering import full_named_tensors
from verl.models import tiled_mlp
from verl.models.divided_layers import TESTED
from verl.models.lora import adapters_disabled
from verl.models.registry import check_model
from verl.models.tiny import save_tiny_model
from verl.workers.model_builder import build_model
from verl.workers.packing.forward import PackedForward
from verl.workers.packing.sp_strategy import Strategy
from verl.workers.roles.updater import Training
from verl.workers.sft_worker import DataParallelSFT

pytestmark = pytest.mark.heavy

SIZES = ((9, (7, 20, 1, 3)), (24, (3, 8, 2, 5)))  # two prompts, four rows of each
TEMPERATURE, LEARNING_RATE = 0.8, 0.1


class Case(NamedTuple):
    """Division of a model over ranks, and its options."""

    name: str = "qwen2"
    size: int = 2
    fsdp_size: int = -1
    shared: bool = False
    checkpointing: bool = False
    full_shard: bool = True
    micro_batches: int = 1
    ulysses: int = 1
    ring: int = 1
    tile: int = tiled_mlp.TILE


TWO = [
    Case(shared=True),
    Case("untied", checkpointing=True, micro_batches=2),
    Case("qwen3", shared=True, checkpointing=True),
    Case("biased"),
    Case("qwen3", checkpointing=True, tile=10),
]
FOUR = [
    Case("qwen3", shared=True, checkpointing=True, micro_batches=2),
    Case("untied", fsdp_size=2),
    Case("qwen3", full_shard=False),
    Case("wide", size=4, shared=True),
    Case("wide", ulysses=2, shared=True, checkpointing=True),
    Case("qwen3", ring=2, shared=True),
    Case("biased", size=2, tile=10, checkpointing=True),
]
OPTIONS = {
    "qwen2": ("qwen2", {}),
    "untied": ("qwen2", {"tie_word_embeddings": False, "pad_token_id": 17}),
    "qwen3": ("qwen3", {}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide": ("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 4}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny_model(root / name, family, **own) for name, (family, own) in OPTIONS.items()}


def divided(case, folder, world_size, lora=LoraConfig(), **options):  # noqa: B008 - immutable
    return build_model(
        ModelConfig(str(folder), enable_gradient_checkpointing=case.checkpointing, lora=lora),
        FSDPConfig(torch_dtype="fp32", mp_param_dtype="fp32", enable_full_shard=case.full_shard),
        mesh=make_mesh(world_size, case.fsdp_size, "cpu", case.size),
        device="cpu",
        trainable=True,
        **options,
    )


def loss_of(log_probs, entropy, weights):
    return (log_probs * weights + 0.1 * entropy).sum()


def weights_of(batch):
    return torch.randn(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(2))


def step(model):
    """Take a step whose size is that of the gradients: Adam would turn rounding of zeros into steps."""
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()


def expected(folder, batch, weights):
    """Log-probs, gradients and weights after a step of the plain model on padded rows."""
    model = load(folder, False)
    log_probs, entropy = reference(model, batch, TEMPERATURE)
    loss_of(log_probs, entropy, weights).backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    step(model)
    return log_probs.detach(), entropy.detach(), gradients, dict(model.named_parameters())


def compare(case, folders, world_size):
    tiled_mlp.TILE = case.tile  # of this process
    folder, batch = folders[case.name], text_batch(SIZES)
    weights = weights_of(batch)
    log_probs, entropy, gradients, after = expected(folder, batch, weights)
    model = divided(case, folder, world_size)
    sp = SequenceParallel.build(case.ulysses, case.ring, tp_size=case.size)
    forward = PackedForward(model, Features(), share_prompt=case.shared, sp=sp)
    forward.strategies = [Strategy.SHARDED]
    rows = list(range(len(batch)))[sp.dp_index :: sp.dp_size]
    found = {"check": check_model(model), "log_probs": 0.0}
    for part in (rows[start :: case.micro_batches] for start in range(case.micro_batches)):
        result = forward.log_probs(batch[part], TEMPERATURE, with_entropy=True)
        errors = (
            (result.log_probs - log_probs[part]).abs().max(),
            (result.entropy - entropy[part]).abs().max(),
        )
        found["log_probs"] = max(found["log_probs"], *(error.item() for error in errors))
        (loss_of(result.log_probs, result.entropy, weights[part]) * sp.dp_size * sp.size).backward()
    own = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    total = sum(grad.square().sum() for grad in gradients.values()).sqrt()
    found["gradients"] = max(((own[name] - grad).norm() / total).item() for name, grad in gradients.items())
    found["norm"] = abs(clip_grad_norm(model, float("inf")) / total.item() - 1)
    step(model)
    whole = dict(full_named_tensors(model))
    found["weights"] = max((whole[name] - param).abs().max().item() for name, param in after.items())
    return found


def compare_all(rank, world_size, cases, folders):
    return [compare(case, folders, world_size) for case in cases]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(2, TWO, id="two ranks"),
        pytest.param(4, FOUR, id="four ranks", marks=pytest.mark.nightly("verl/models", "verl/distributed")),
    ],
)
def test_divided_layers_compute_and_learn_as_those_of_one_process(folders, world_size, cases):
    for found in run_distributed(compare_all, world_size, cases, folders):
        for case, each in zip(cases, found, strict=True):
            assert max(each.values()) < 1e-5, (case, each)


def save_small(name, folder):
    """Write a random model of a type in transformers' format."""
    config = AutoConfig.for_model(name, **SMALL | FAMILIES[name])
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


@pytest.mark.nightly("verl/models")
def test_every_listed_type_of_model_computes_and_learns_as_in_one_process(tmp_path):
    folders = {name: save_small(name, tmp_path / name) for name in TESTED}
    cases = [Case(name, shared=True) for name in folders]

    for found in run_distributed(compare_all, 2, cases, folders):
        for case, each in zip(cases, found, strict=True):
            assert max(each.values()) < 1e-5, (case, each)


def statistics(forward, frozen, batch):
    """Log-probs, KL divergence from another model and collisions, with the gradient of the divergence."""
    result = forward.log_probs(batch, TEMPERATURE, with_sum_squares=True, reference=frozen)
    (result.kl.square().sum() * forward.sp.dp_size).backward()
    gradients = {name: param.grad.full_tensor() for name, param in forward.model.named_parameters()}
    values = torch.stack([result.log_probs.detach(), result.kl.detach(), result.sum_squared_probs])
    return values, gradients


def compared_with_references(rank, world_size, folders):
    """The same with both models whole, and with one or both divided."""
    batch, found = text_batch(SIZES)[list(range(8))], []
    for size, reference_size in ((1, 1), (2, 2), (2, 1)):
        sp = SequenceParallel.build(1, 1, tp_size=size)
        rows = list(range(8))[sp.dp_index :: sp.dp_size]
        models = [
            divided(Case(name, each), folders[name], world_size)
            for name, each in (("qwen2", size), ("untied", reference_size))
        ]
        forward, frozen = (PackedForward(model, Features(), sp=sp) for model in models)
        values, gradients = statistics(forward, frozen, batch[rows])
        found.append((values, gradients, rows))
    (whole, wanted, whole_rows), *others = found
    errors = []
    for values, gradients, rows in others:
        places = [rows.index(row) for row in whole_rows]
        total = sum(grad.square().sum() for grad in wanted.values()).sqrt()
        errors.append((values[:, places] - whole).abs().max().item())
        errors.append(max(((gradients[name] - grad).norm() / total).item() for name, grad in wanted.items()))
    return errors


def test_the_kl_divergence_and_its_gradient_are_those_of_whole_vocabularies(folders):
    for errors in run_distributed(compared_with_references, 2, folders):
        assert max(errors) < 1e-5, errors


def adapted(rank, world_size, folder):
    """Differences of log-probs and gradients with adapters, and without, of whole and of divided layers."""
    batch, found = text_batch(SIZES), []
    for size in (1, 2):
        torch.manual_seed(0)  # of the adapters' initial values
        case = Case("qwen3", size, checkpointing=True)
        model = divided(case, folder, world_size, lora=LoraConfig(rank=4))
        for name, param in model.named_parameters():
            if "lora_B" in name:  # zero at first
                generator = torch.Generator().manual_seed(len(name))
                values = torch.randn(param.shape, generator=generator) / 10
                param.data.copy_(
                    distribute_tensor(values, param.device_mesh, param.placements, src_data_rank=None)
                )
        sp = SequenceParallel.build(1, 1, tp_size=size)
        forward = PackedForward(model, Features(), share_prompt=True, sp=sp)
        rows = list(range(len(batch)))[sp.dp_index :: sp.dp_size]
        log_probs = forward.log_probs(batch[rows], TEMPERATURE).log_probs
        (log_probs.square().sum() * sp.dp_size).backward()
        trained = [param for param in model.parameters() if param.requires_grad]
        gradients = torch.cat([param.grad.full_tensor().flatten() for param in trained])
        norm = clip_grad_norm(model, float("inf"))
        with torch.no_grad(), adapters_disabled(model):
            plain = forward.log_probs(batch[rows], TEMPERATURE).log_probs
        found.append((rows, log_probs.detach(), plain, gradients, norm))
    (own, *whole), (every, *parts) = found
    places = [every.index(row) for row in own]
    for number in (0, 1):
        parts[number] = parts[number][places]
    assert not torch.allclose(whole[0], whole[1], atol=1e-2), "adapters change log-probs"
    errors = [(one - other).abs().max().item() for one, other in zip(whole[:2], parts[:2], strict=True)]
    gradient = ((parts[2] - whole[2]).norm() / whole[2].norm()).item()
    return [*errors, gradient, abs(parts[3] / whole[3] - 1)]


def test_adapters_of_divided_layers_compute_and_learn_as_those_of_whole_ones(folders):
    for errors in run_distributed(adapted, 2, folders["qwen3"]):
        assert max(errors) < 1e-5, errors


def values_of(rank, world_size, folders):
    batch = text_batch(SIZES)
    case, errors = Case("qwen3"), []
    model = divided(case, folders["qwen3"], world_size, head="scalar")
    score = model.get_parameter("score.weight")
    with torch.no_grad():
        score.to_local().copy_(torch.linspace(-1, 1, score.numel()).view(score.shape))
    sp = SequenceParallel.build(1, 1, tp_size=case.size)
    values = PackedForward(model, Features(), sp=sp).values(batch)
    values.square().sum().backward()
    plain = load_scalar(folders["qwen3"]).requires_grad_()
    with torch.no_grad():
        plain.get_parameter("score.weight").copy_(score.full_tensor())
    theirs = PackedForward(plain, Features()).values(batch)
    theirs.square().sum().backward()
    errors.append((values - theirs).abs().max().item())
    for name, param in plain.named_parameters():
        own = model.get_parameter(name).grad.full_tensor()
        errors.append(((own - param.grad).norm() / param.grad.norm()).item())
    return errors


def test_values_and_their_gradients_are_those_of_one_process(folders):
    for errors in run_distributed(values_of, 2, folders):
        assert max(errors) < 1e-5, errors


def updated(rank, world_size, folder, cases):
    """Metrics and weights after two updates of several micro batches, for each division."""
    batch, found = text_batch(SIZES), []
    for case in cases:
        sp = SequenceParallel.build(case.ulysses, case.ring, tp_size=case.size)
        model = divided(case, folder, world_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        training = Training(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0))
        config = SFTActorConfig(
            global_batch_size=8,
            micro_batch_size_per_device_for_update=1,
            dynamic_batching=False,
            max_grad_norm=0.5,
            fsdp=FSDPConfig(fsdp_size=case.fsdp_size),
        )
        sft = DataParallelSFT(config, PackedForward(model, Features(), sp=sp), training)
        rows = list(range(len(batch)))[sp.dp_index :: sp.dp_size]
        metrics = [sft.update(batch[rows]) for _ in range(2)]
        weights = torch.cat([tensor.flatten() for _, tensor in full_named_tensors(model)])
        found.append((metrics, weights.numpy()))
    return found


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(2, [Case(size=1), Case(size=2)], id="two ranks"),
        pytest.param(
            4,
            [Case("wide", 1), Case("wide"), Case("wide", fsdp_size=2), Case("wide", ulysses=2)],
            id="four ranks",
            marks=pytest.mark.nightly("verl/workers/roles", "verl/distributed"),
        ),
    ],
)
def test_updates_log_and_leave_what_those_of_whole_layers_do(folders, world_size, cases):
    for (metrics, weights), *others in run_distributed(updated, world_size, folders[cases[0].name], cases):
        assert metrics[0]["train/grad_norm"] > 0.5, "gradients are clipped"
        for own_metrics, own_weights in others:
            for own, wanted in zip(own_metrics, metrics, strict=True):
                assert {key: own[key] for key in wanted} == pytest.approx(wanted, rel=1e-5)
            assert abs(own_weights - weights).max() < 1e-5
