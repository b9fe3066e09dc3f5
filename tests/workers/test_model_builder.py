# SPDX-License-Identifier: Apache-2.0
"""The sharded model is the model of the files, and trains like one process."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.helpers.causal_families import FAMILIES as CAUSAL
from tests.helpers.causal_families import build_family
from tests.helpers.distributed import run_distributed
from tests.helpers.fp8_files import save_in_fp8
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig, OptimConfig
from verl.distributed.fsdp import clip_grad_norm, make_mesh, sharded_parameters
from verl.distributed.offload import Offloader
from verl.distributed.weights.gathering import full_named_tensors
from verl.models.hub_names import HubNames, auto_class
from verl.models.monkey_patch import plain_attention
from verl.models.tiny import save_tiny_model
from verl.optim.build import build_optimizer
from verl.workers import model_builder
from verl.workers.model_builder import adapter_config, apply_overrides, build_model

pytestmark = pytest.mark.heavy

FAMILIES = {
    "tied": ("qwen2", {}),
    "untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2_vl": ("qwen2_vl", {}),
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "qwen3_vl": ("qwen3_vl", {}),
    "gemma3": ("gemma3", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 6}),  # halves that two ranks share unevenly
}
FP32 = FSDPConfig(mp_param_dtype="fp32", torch_dtype="fp32")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: save_tiny_model(root / name, family, **options) for name, (family, options) in FAMILIES.items()
    }


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )


def sharded_model(
    folder: Path, fsdp: FSDPConfig = FP32, trainable: bool = True, **options
) -> torch.nn.Module:
    mesh = make_mesh(dist.get_world_size(), fsdp.fsdp_size, "cpu")
    config = ModelConfig(model_path=str(folder), **options)
    return build_model(config, fsdp, mesh=mesh, device="cpu", trainable=trainable)


def text(rows: int) -> torch.Tensor:
    return torch.randint(10, 200, (rows, 12), generator=torch.Generator().manual_seed(1))


def logits(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(input_ids=rows, attention_mask=torch.ones_like(rows), use_cache=False).logits


def differences_from_files(rank: int, world_size: int, folders: dict[str, Path]) -> dict[str, float]:
    worst = {}
    for name, folder in folders.items():
        plain, sharded = plain_model(folder).eval(), sharded_model(folder, trainable=False)
        with torch.no_grad(), plain_attention(sharded):
            worst[name] = (logits(plain, text(2)) - logits(sharded, text(2))).abs().max().item()
        own = dict(plain.named_parameters())
        gathered = dict(full_named_tensors(sharded))
        assert gathered.keys() == own.keys(), "a tied head comes under one name"
        worst[name] += max((own[key] - tensor).abs().max().item() for key, tensor in gathered.items())
    return worst


def train(model: torch.nn.Module, rows: torch.Tensor, num_copies: int, steps: int = 3) -> list[float]:
    """AdamW steps on the mean log-probability of all rows (FSDP averages over ranks); the gradient norms."""
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3))
    norms = []
    for _ in range(steps):
        log_p = torch.log_softmax(logits(model, rows)[:, :-1].float(), -1)
        taken = log_p.gather(-1, rows[:, 1:, None])
        (-taken.mean() * rows.shape[0] * num_copies / 4).backward()
        norms.append(clip_grad_norm(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def trained(
    rank: int, world_size: int, folder: Path, variants: list[FSDPConfig]
) -> list[tuple[list[float], dict]]:
    results = []
    for fsdp in variants:
        model = sharded_model(folder, fsdp)
        with plain_attention(model):
            norms = train(model, text(4)[rank::world_size], world_size)
        results.append((norms, {name: tensor.detach().numpy() for name, tensor in full_named_tensors(model)}))
    return results


def details(rank: int, world_size: int, vision: Path, tied: Path) -> dict[str, object]:
    """Everything that is looked at on one model, in one start of the processes."""
    frozen = sharded_model(vision, freeze_vision_tower=True)
    reference = sharded_model(tied, FSDPConfig(), trainable=False)
    changed = sharded_model(tied, override_config={"attention_dropout": 0.0, "rms_norm_eps": 1e-5})
    training = sharded_model(tied, FSDPConfig())
    before = {name: id(param) for name, param in sharded_parameters(changed).items()}
    ids = text(2)
    with torch.no_grad(), plain_attention(changed):
        first = logits(changed, ids)
        offloader = Offloader(changed, "cpu", offloads_weights=True)
        with offloader.loaded():
            pass
        with offloader.loaded():
            second = logits(changed, ids)
    return {
        "frozen": sorted(
            {name.split(".")[1] for name, p in frozen.named_parameters() if not p.requires_grad}
        ),
        "reference": {(str(p.dtype), p.requires_grad) for p in reference.parameters()},
        "training": {(str(p.dtype), p.requires_grad) for p in training.parameters()},
        "eps": changed.model.norm.variance_epsilon,
        "is_training": (training.training, reference.training),
        "checkpointing": changed.model.layers[0].gradient_checkpointing,
        "offload_changes": (first - second).abs().max().item(),
        "same_parameters": before == {name: id(param) for name, param in sharded_parameters(changed).items()},
        "tied": changed.lm_head.weight is changed.model.embed_tokens.weight,
        "eos": changed.generation_config.eos_token_id,
        "bf16": {str(tensor.dtype) for _, tensor in full_named_tensors(changed, torch.bfloat16)},
    }


def errors(rank: int, world_size: int, paths: list[Path]) -> list[str]:
    messages = []
    for path in paths:
        with pytest.raises(FileNotFoundError) as caught:
            sharded_model(path)
        messages.append(str(caught.value))
    return messages


def observe(rank: int, world_size: int, folders: dict[str, Path], broken: list[Path]) -> dict[str, object]:
    """All that needs two processes, in one start of them."""
    model_builder.BLOCK_BYTES = 512  # most weights are sent in several blocks
    variants = [
        FP32,
        FSDPConfig(mp_param_dtype="fp32", torch_dtype="fp32", fsdp_size=1),  # two copies
        FSDPConfig(mp_param_dtype="fp32", torch_dtype="fp32", enable_full_shard=False),
    ]
    return {
        "differences": differences_from_files(rank, world_size, folders),
        "trained": trained(rank, world_size, folders["tied"], variants),
        "details": details(rank, world_size, folders["qwen2_vl"], folders["tied"]),
        "errors": errors(rank, world_size, broken),
    }


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> list[Path]:
    """Folders that hold no complete model."""
    tmp_path = tmp_path_factory.mktemp("broken")
    no_weights = save_tiny_model(tmp_path / "no_weights")
    (no_weights / "model.safetensors").unlink()
    truncated = save_tiny_model(tmp_path / "truncated")
    content = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(content[: len(content) // 2])
    incomplete = save_tiny_model(tmp_path / "incomplete")
    weights = load_file(incomplete / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, incomplete / "model.safetensors", metadata={"format": "pt"})
    return [tmp_path / "nothing", no_weights, truncated, incomplete]


@pytest.fixture(scope="module")
def two_ranks(folders, broken) -> list[dict]:
    return run_distributed(observe, 2, folders, broken)


def test_logits_and_weights_are_those_of_the_files(folders, two_ranks):
    [one_rank] = run_distributed(differences_from_files, 1, folders)

    for differences in (one_rank, *(seen["differences"] for seen in two_ranks)):
        assert differences == dict.fromkeys(folders, 0.0)


def read_from_fp8(rank: int, world_size: int, folders: list[Path]) -> list[tuple[dict, bool]]:
    model_builder.BLOCK_BYTES = 4096
    found = []
    for folder in folders:
        model = sharded_model(folder)
        values = dict(HubNames(model.config).convert(full_named_tensors(model)))
        found.append(
            (
                {name: each.numpy() for name, each in values.items()},
                hasattr(model.config, "quantization_config"),
            )
        )
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_in_fp8_starts_with_what_its_weights_stand_for(ranks, tmp_path):
    mixture = tmp_path / "mixture"
    build_family("deepseek_v3", CAUSAL["deepseek_v3"]).save_pretrained(mixture)
    dense = save_tiny_model(tmp_path / "dense", "qwen3", hidden_size=256, intermediate_size=192)
    expected = [save_in_fp8(mixture, (20, 28)), save_in_fp8(dense, scales=torch.bfloat16)]

    for seen in run_distributed(read_from_fp8, ranks, [mixture, dense]):
        for values, (found, is_quantized) in zip(expected, seen, strict=True):
            assert not is_quantized
            assert found.keys() == values.keys()
            for name, array in found.items():
                np.testing.assert_array_equal(array, values[name].float().numpy(), name)


def test_adapters_that_need_norms_of_weights_in_fp8_are_refused_before_they_are_read(tmp_path):
    save_in_fp8(save_tiny_model(tmp_path, "qwen3"))
    model = ModelConfig(model_path=str(tmp_path), lora=LoraConfig(rank=2, use_dora=True))

    with pytest.raises(
        ValueError, match=r"`worker.actor.model.lora.use_dora` must be false for weights in FP8"
    ):
        adapter_config(model, "worker.actor.model")


def divided_differences(rank: int, world_size: int, folder: Path) -> list[float]:
    model_builder.BLOCK_BYTES = 512
    own, found = dict(plain_model(folder).named_parameters()), []
    for fsdp_size in (-1, 2):  # two ranks shard each half of the experts; both halves have two copies
        model = sharded_model(folder, replace(FP32, fsdp_size=fsdp_size, expert_parallel_size=2))
        gathered = full_named_tensors(model)
        found.append(max((own[name] - tensor).abs().max().item() for name, tensor in gathered))
    return found


def test_divided_experts_that_are_sharded_or_copied_are_those_of_the_files(folders):
    assert run_distributed(divided_differences, 4, folders["qwen3_moe"]) == [[0.0, 0.0]] * 4


def test_three_steps_on_two_ranks_equal_one_process_with_any_sharding(folders, two_ranks):
    plain = plain_model(folders["tied"])
    norms = train(plain, text(4), 1)
    expected = {name: tensor.detach().numpy() for name, tensor in plain.named_parameters()}

    for seen in two_ranks:
        for sharded_norms, weights in seen["trained"]:
            np.testing.assert_allclose(sharded_norms, norms, rtol=1e-5)
            for name, weight in expected.items():
                np.testing.assert_allclose(weights[name], weight, atol=1e-5, err_msg=name)


def test_options_reach_the_model(two_ranks):
    for rank_seen in two_ranks:
        seen = rank_seen["details"]
        assert seen["frozen"] == ["visual"]
        assert seen["reference"] == {("torch.bfloat16", False)}
        assert seen["training"] == {("torch.float32", True)}
        assert seen["eps"] == 1e-5
        assert seen["is_training"] == (True, False)
        assert seen["checkpointing"]
        assert seen["offload_changes"] == 0.0
        assert seen["same_parameters"]
        assert seen["tied"]
        assert len(seen["eos"]) == 2
        assert seen["bf16"] == {"torch.bfloat16"}


def test_a_folder_without_a_complete_model_is_refused_on_every_rank(two_ranks, broken):
    for seen in two_ranks:
        for message, path in zip(seen["errors"], broken, strict=True):
            assert f"`worker.actor.model.model_path` ({path})" in message
        assert "1 weights are missing, for example ['model.layers.1.mlp.up_proj.weight']" in seen["errors"][3]


def test_an_unknown_option_of_the_model_config_is_refused_with_the_nearest(folders):
    config = AutoConfig.from_pretrained(folders["qwen2_vl"])

    with pytest.raises(ValueError, match=r"did you mean `.*model.override_config.tie_word_embeddings`"):
        apply_overrides(config, {"tie_word_embedding": False})
    with pytest.raises(ValueError, match=r"set `.*model.override_config.text_config.num_hidden_layers`"):
        apply_overrides(config, {"num_hidden_layers": 1})
    apply_overrides(config, {"text_config": {"num_hidden_layers": 1}})
    assert config.text_config.num_hidden_layers == 1
