# SPDX-License-Identifier: Apache-2.0
"""What the merger writes loads with transformers and computes the same, from our shards and others'."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer, GenerationConfig

from tests.helpers.checkpoints import save_shards
from tests.helpers.distributed import run_distributed
from verl.checkpoint.legacy_shards import find_shard_files
from verl.checkpoint.merger import merge_checkpoint
from verl.checkpoint.sharded import save_huggingface_files
from verl.config.model import FSDPConfig, ModelConfig
from verl.distributed.fsdp import make_mesh
from verl.models.hub_names import auto_class
from verl.models.tiny import save_tiny_model
from verl.workers.model_builder import build_model

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("qwen2", "qwen2_5_vl", "qwen3_vl", "qwen3_moe", "qwen3_vl_moe")
FSDP = FSDPConfig(torch_dtype="fp32")


def save_all(rank: int, world_size: int, models: dict[str, Path], target: Path) -> None:
    """Every model as our checkpoint, and one as other trainers write it: sharded, and as copies of shards."""
    for family, folder in models.items():
        mesh = make_mesh(world_size, -1, "cpu")
        model = build_model(
            ModelConfig(model_path=str(folder)), FSDP, mesh=mesh, device="cpu", trainable=True
        )
        save_shards(target / family, model)
        if rank == 0:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            save_huggingface_files(target / family, model.config, model.generation_config, tokenizer)
    for kind, mesh, placements in (
        ("sharded", init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)), [Shard(0)]),
        ("hybrid", init_device_mesh("cpu", (2, 1), mesh_dim_names=("ddp", "fsdp")), [Replicate(), Shard(0)]),
    ):
        for family in ("qwen2", "qwen3_moe"):
            save_as_others(
                rank,
                load_file(models[family] / "model.safetensors"),
                target / f"{family}_{kind}",
                mesh,
                placements,
            )


def save_as_others(rank: int, weights: dict, target: Path, mesh, placements) -> None:
    """transformers 4 names its tensors as the hub does, and keeps a tied head in the dictionary."""
    weights |= {"lm_head.weight": weights["model.embed_tokens.weight"]}
    shards = {name: distribute_tensor(tensor, mesh, placements) for name, tensor in weights.items()}
    assert all(isinstance(shard, DTensor) for shard in shards.values())
    target.mkdir(parents=True, exist_ok=True)
    torch.save(shards, target / f"model_world_size_2_rank_{rank}.pt")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    options = {"qwen3_vl_moe": {"moe_intermediate_size": 96}}
    return {family: save_tiny_model(root / family, family, **options.get(family, {})) for family in FAMILIES}


@pytest.fixture(scope="module")
def checkpoints(models, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("checkpoints")
    run_distributed(save_all, 2, models, target)
    for family in ("qwen2", "qwen3_moe"):
        for kind in ("sharded", "hybrid"):
            save_huggingface_files(target / f"{family}_{kind}", AutoConfig.from_pretrained(models[family]))
    return target


def logits(folder: Path) -> torch.Tensor:
    model = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder)
    rows = torch.randint(10, 200, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(input_ids=rows).logits


def assert_same_model(exported: Path, source: Path) -> None:
    ours, theirs = load_file(exported / "model.safetensors"), load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()  # hub names, a tied head left out
    for name, tensor in ours.items():
        assert torch.equal(tensor if tensor.shape == theirs[name].shape else tensor.mT, theirs[name]), name
    assert torch.equal(logits(exported), logits(source))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_equals_the_trained_model(models, checkpoints, family):
    exported = merge_checkpoint(checkpoints / family)

    assert exported == checkpoints / family / "huggingface"
    assert_same_model(exported, models[family])
    assert AutoTokenizer.from_pretrained(exported)("one two").input_ids
    assert GenerationConfig.from_pretrained(exported).eos_token_id == [2, 0]
    assert json.loads((exported / "config.json").read_text())["architectures"]


@pytest.mark.parametrize("kind", ["sharded", "hybrid"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_shards_of_other_trainers_merge_to_the_same_model(models, checkpoints, family, kind):
    assert_same_model(merge_checkpoint(checkpoints / f"{family}_{kind}"), models[family])


def test_a_critic_of_another_trainer_merges_to_a_token_classifier(models, tmp_path):
    critic = AutoModelForTokenClassification.from_pretrained(models["qwen2"], num_labels=1)
    critic.config.architectures = ["Qwen2ForTokenClassification"]
    save_huggingface_files(tmp_path, critic.config)
    torch.save(critic.state_dict(), tmp_path / "model_world_size_1_rank_0.pt")

    merged = AutoModelForTokenClassification.from_pretrained(merge_checkpoint(tmp_path))

    theirs = critic.state_dict()
    assert merged.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in merged.state_dict().items())


def test_file_sizes_are_bounded_and_merging_again_replaces_the_files(models, checkpoints):
    cut = merge_checkpoint(checkpoints / "qwen2", max_file_bytes=600_000)

    index = json.loads((cut / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in cut.glob("*.safetensors"))
    assert len(files) > 1 and sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert torch.equal(logits(cut), logits(models["qwen2"]))

    merge_checkpoint(checkpoints / "qwen2")
    assert [path.name for path in cut.glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_who_may_read_the_exported_weights_is_left_to_the_umask(checkpoints, umask, mode):
    before = os.umask(umask)
    try:
        folder = merge_checkpoint(checkpoints / "qwen2")
    finally:
        os.umask(before)

    assert (folder / "model.safetensors").stat().st_mode & 0o777 == mode


def test_the_command_writes_the_requested_dtype_to_weights_and_config(checkpoints):
    command = [
        sys.executable,
        ROOT / "scripts" / "model_merger.py",
        "--local_dir",
        checkpoints / "qwen2",
        "--dtype",
        "bf16",
    ]

    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")

    folder = checkpoints / "qwen2" / "huggingface"
    assert done.stdout == f"model written to {folder}\n"
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_missing_and_truncated_rank_files_are_named(checkpoints, models, tmp_path):
    for file in (checkpoints / "qwen2_sharded").glob("*.pt"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_huggingface_files(tmp_path, AutoConfig.from_pretrained(models["qwen2"]))
    second = tmp_path / "model_world_size_2_rank_1.pt"
    second.write_bytes(second.read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"rank_1\.pt is damaged"):
        merge_checkpoint(tmp_path)

    second.unlink()
    with pytest.raises(FileNotFoundError, match=r"rank_1\.pt is missing \(1 of 2 rank files are missing"):
        find_shard_files(tmp_path)


def test_a_pickle_with_anything_but_tensors_is_refused(models, tmp_path):
    save_huggingface_files(tmp_path, AutoConfig.from_pretrained(models["qwen2"]))
    torch.save({"x": Path("/")}, tmp_path / "model_world_size_1_rank_0.pt")

    with pytest.raises(NotImplementedError, match="something other than tensors"):
        merge_checkpoint(tmp_path)


def test_a_folder_without_a_checkpoint_or_of_another_model_is_refused(models, checkpoints, tmp_path):
    with pytest.raises(FileNotFoundError, match="must be a role's folder"):
        merge_checkpoint(tmp_path)
    save_huggingface_files(tmp_path, AutoConfig.from_pretrained(models["qwen2"]))
    with pytest.raises(FileNotFoundError, match=r"holds neither manifest.json nor"):
        merge_checkpoint(tmp_path)

    torch.save({"model.norm.weight": torch.ones(128)}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(ValueError, match=r"do not fit huggingface/config.json: 25 are missing"):
        merge_checkpoint(tmp_path)
