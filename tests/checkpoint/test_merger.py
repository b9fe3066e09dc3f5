# SPDX-License-Identifier: Apache-2.0
"""What the merger writes loads with transformers and computes the same, from our shards and others'."""

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer, GenerationConfig

from tests.helpers.checkpoints import modes_of, save_shards
from tests.helpers.distributed import run_distributed
from tests.helpers.fp8_files import save_in_fp8
from verl.checkpoint.export_files import unread_tensors
from verl.checkpoint.legacy_shards import find_shard_files
from verl.checkpoint.manifest import MANIFEST, write_manifest
from verl.checkpoint.merger import merge_checkpoint
from verl.checkpoint.sharded import save_huggingface_files
from verl.checkpoint.storage import load_metadata
from verl.cli.merge import main
from verl.config.model import FSDPConfig, ModelConfig
from verl.distributed.fsdp import make_mesh
from verl.models.hub_names import auto_class
from verl.models.lora_weights import AdapterConfig, AdapterFiles
from verl.models.tiny import save_tiny_model
from verl.workers.model_builder import build_model

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = (
    "qwen2", "qwen2_5_vl", "qwen3_vl", "qwen3_moe", "qwen3_vl_moe", "qwen3_next", "qwen3_5",
    "qwen3_5_moe", "mistral3", "minicpmv4_6", "internvl", "llava_onevision",
)  # fmt: skip
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


def add_draft_head(folder: Path) -> dict[str, torch.Tensor]:
    """Add tensors that transformers does not load, as checkpoints on the hub have them."""
    names = {"mtp.fc.weight": (8, 16), "mtp.layers.0.self_attn.q_proj.weight": (4, 8)}
    head = {name: torch.randn(shape) for name, shape in names.items()}
    file = folder / "model.safetensors"
    save_file(load_file(file) | head, file, {"format": "pt"})
    return head


def test_a_merged_model_keeps_the_draft_head_that_training_does_not_load(
    models, checkpoints, tmp_path, caplog
):
    folder = shutil.copytree(checkpoints / "qwen3_5", tmp_path / "actor")
    moved = shutil.copytree(models["qwen3_5"], tmp_path / "moved")
    head = add_draft_head(moved)
    auto = auto_class(AutoConfig.from_pretrained(moved))
    _, report = auto.from_pretrained(moved, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]

    for dtype in (None, torch.bfloat16):
        merged = load_file(merge_checkpoint(folder, base_model=str(moved), dtype=dtype) / "model.safetensors")
        assert merged.keys() == load_file(models["qwen3_5"] / "model.safetensors").keys() | head.keys()
        assert all(torch.equal(merged[name], head[name].to(dtype or torch.float32)) for name in head)


def test_a_draft_head_in_fp8_is_exported_as_what_it_stands_for(tmp_path):
    name = "mtp.layers.0.self_attn.q_proj.weight"
    weight = torch.randn(40, 24)
    save_file({name: weight, "norm.weight": weight[0].clone()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    expected = save_in_fp8(tmp_path, (16, 16))

    [(found, value)] = unread_tensors(tmp_path, ("mtp.",), str(tmp_path))

    assert found == name and torch.equal(value, expected[name])


def test_a_base_model_without_safetensors_files_loses_nothing_in_silence(tmp_path, caplog):
    torch.save({"mtp.fc.weight": torch.zeros(2)}, tmp_path / "pytorch_model.bin")

    assert not list(unread_tensors(tmp_path, ("mtp.",), str(tmp_path)))

    assert f"(mtp.*) are not exported, because the base model {tmp_path} has no safetensors" in caplog.text


def test_a_checkpoint_names_the_model_that_its_draft_head_comes_from(models, checkpoints, tmp_path, caplog):
    folder = shutil.copytree(checkpoints / "qwen3_5", tmp_path / "actor")
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["base_model"] == str(models["qwen3_5"])
    base = shutil.copytree(models["qwen3_5"], tmp_path / "base")
    head = add_draft_head(base)
    (folder / MANIFEST).write_text(json.dumps(manifest | {"base_model": str(base)}))

    assert load_file(merge_checkpoint(folder) / "model.safetensors").keys() >= head.keys()

    shutil.rmtree(base)
    exported = merge_checkpoint(folder)
    assert "give it as `--base_model` to keep them" in caplog.text
    assert_same_model(exported, models["qwen3_5"])


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
def test_who_may_read_an_export_is_left_to_the_umask(models, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        save_adapter(tmp_path / "actor", models, models["qwen2"])
        AutoTokenizer.from_pretrained(models["qwen2"]).save_pretrained(tmp_path / "actor" / "huggingface")
        folder = merge_checkpoint(tmp_path / "actor", max_file_bytes=600_000)
    finally:
        os.umask(before)

    names = modes_of(folder)
    assert {"model.safetensors.index.json", "config.json", "tokenizer.json"} < names.keys()
    assert set(names.values()) == {mode}
    assert modes_of(tmp_path / "actor" / "lora_adapter") == {
        "adapter_config.json": mode,
        "adapter_model.safetensors": mode,
    }


def test_others_may_read_the_weights_of_a_tiny_model_as_its_config(models):
    for folder in models.values():
        assert len({(folder / name).stat().st_mode for name in ("model.safetensors", "config.json")}) == 1


@pytest.mark.nightly
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


# --- damaged checkpoints: the command names the file and what to do, and exits with 1

RANK_0, RANK_1 = (f"model_world_size_2_rank_{rank}.pt" for rank in range(2))
MODULE = "model.layers.0.self_attn.q_proj"
ADAPTER = {f"{MODULE}.lora_A.default.weight": (2, 128), f"{MODULE}.lora_B.default.weight": (128, 2)}


def write_config(folder, text):
    (folder / "huggingface/config.json").write_text(text)


def edit_config(folder, values):
    config = json.loads((folder / "huggingface/config.json").read_text())
    write_config(folder, json.dumps(config | values))


def save_rank(folder, content):
    torch.save(content, folder / RANK_1)


def edit_metadata(folder, edit):
    """Change the metadata, or put an object in their place, under digests that are right again."""
    path = folder / ".metadata"
    with path.open("rb") as file:
        metadata = load_metadata(file, path)
    path.write_bytes(pickle.dumps(edit(metadata) or metadata))
    renew_digests(folder)


def renew_digests(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).unlink()
    write_manifest(folder, {name: value for name, value in manifest.items() if name != "files"})


def cut_file(folder, name):
    """Keep half of a file, or nothing of the metadata."""
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if name != ".metadata":
        (folder / name).write_bytes(content[: len(content) // 2])
    renew_digests(folder)


def add_object(metadata):
    metadata.state_dict_metadata["model.x"] = BytesStorageMetadata()


def only_first_rank(folder, world_size):
    (folder / RANK_1).unlink()
    (folder / RANK_0).rename(folder / f"model_world_size_{world_size}_rank_0.pt")


NO_WEIGHTS = f"{RANK_1} must contain the weights of a model as a dictionary of dense tensors, got "
OTHERS = {  # a damage of another trainer's checkpoint, and part of the message
    "config is null": (write_config, "null", "config.json cannot be read (TypeError"),
    "config is deep": (write_config, "[" * 10**5, "config.json cannot be read (RecursionError"),
    "config without sense": (
        edit_config,
        {"hidden_act": "no"},
        "config.json cannot be read (KeyError: 'no')",
    ),
    "config of no type": (edit_config, {"model_type": ["a"]}, "config.json cannot be read (TypeError"),
    "rank is a list": (save_rank, [torch.ones(2)], NO_WEIGHTS + "[tensor("),
    "rank is a tensor": (save_rank, torch.ones(2), NO_WEIGHTS + "tensor("),
    "rank is empty": (save_rank, {}, NO_WEIGHTS + "{}"),
    "rank has numbers": (save_rank, {"a": 1}, NO_WEIGHTS + "'a': int"),
    "rank has no names": (save_rank, {1: torch.ones(2)}, NO_WEIGHTS + "1: Tensor"),
    "rank is nested": (save_rank, {"model": {"a": torch.ones(2)}}, NO_WEIGHTS + "'model': dict"),
    "rank is sparse": (save_rank, {"a": torch.ones(2).to_sparse()}, NO_WEIGHTS + "'a': Tensor"),
    "rank of another save": (save_rank, {"a": torch.ones(2)}, "must be of one save: copy them again"),
    "rank is not sharded": (save_rank, {"model.embed_tokens.weight": torch.ones(2)}, "must be of one save"),
    "one rank of two": (only_first_rank, 1, "and the other ranks' files (IndexError"),
    "too many ranks": (only_first_rank, 10**11, "(99999999999 of 100000000000 rank files are missing)"),
}
OURS = {
    "metadata are none": (edit_metadata, lambda _: {"a": 1}, ".metadata cannot be read (it holds a dict): "),
    "metadata with objects": (edit_metadata, add_object, "holds model.x, which is not a tensor: "),
    "metadata are missing": (cut_file, ".metadata", ".metadata is missing: "),
    "shard is cut": (cut_file, "__1_0.distcp", ".weight in the shards of"),
}


def failure(folder, capsys, *options):
    """Run the command, which must fail, and return its message."""
    assert main(["--local_dir", str(folder), *options]) == 1
    _, name, message = capsys.readouterr().err.partition("verl-merge: ")  # after bars of progress
    assert name and str(folder) in message and "Traceback" not in message
    return message


@pytest.mark.parametrize("case", OTHERS)
def test_a_damaged_checkpoint_of_another_trainer_is_an_error_that_names_it(
    case, checkpoints, tmp_path, capsys
):
    folder = shutil.copytree(checkpoints / "qwen2_sharded", tmp_path / "actor")
    damage, value, part = OTHERS[case]
    damage(folder, value)

    assert part in failure(folder, capsys)


@pytest.mark.parametrize("case", OURS)
def test_a_damaged_checkpoint_is_an_error_that_names_it(case, checkpoints, tmp_path, capsys):
    folder = shutil.copytree(checkpoints / "qwen2", tmp_path / "actor")
    damage, value, part = OURS[case]
    damage(folder, value)

    message = failure(folder, capsys)
    assert part in message and "trainer.load_checkpoint_path" in message


def test_a_full_disk_is_an_error_that_leaves_no_parts(checkpoints, tmp_path, capsys):
    folder = shutil.copytree(checkpoints / "qwen2", tmp_path / "actor")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # as if no more than 50 kB were free
    try:
        message = failure(folder, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert "huggingface cannot be written" in message and "with room for the weights" in message
    assert not list((folder / "huggingface").glob("*.part"))


def save_adapter(folder, models, base, **shapes):
    """Write a checkpoint of a LoRA adapter."""
    tensors = {name: torch.ones(shape) for name, shape in (ADAPTER | shapes).items()}
    save_huggingface_files(folder, AutoConfig.from_pretrained(models["qwen2"]))
    config = AdapterConfig(rank=2, alpha=2, target_modules="q_proj", base=str(base))
    AdapterFiles(config, [MODULE], {}).save_pretrained(folder / "lora_adapter")
    torch.save(tensors, folder / "model_world_size_1_rank_0.pt")


@pytest.mark.parametrize("content", [b"", b"x" * 1000, None])
def test_a_damaged_base_model_is_an_error_with_a_remedy(content, models, tmp_path, capsys):
    base = shutil.copytree(models["qwen2"], tmp_path / "base")
    if content is None:
        (base / "model.safetensors").rename(base / "model-00001-of-00001.safetensors")
        (base / "model.safetensors.index.json").write_text("{}")
    else:
        (base / "model.safetensors").write_bytes(content)
    save_adapter(tmp_path / "actor", models, base)

    message = failure(tmp_path / "actor", capsys)
    assert f"the base model of {tmp_path}/actor/lora_adapter, {base}, cannot be read" in message
    assert "give it as `--base_model`" in message


def test_adapters_are_not_folded_into_random_weights_or_left_out(models, tmp_path, capsys):
    more = {"model.layers.9.q_proj.lora_A.default.weight": (2, 128)}
    save_adapter(tmp_path / "other", models, models["qwen3_moe"])
    save_adapter(tmp_path / "more", models, models["qwen2"], **more)
    save_adapter(tmp_path / "shape", models, models["qwen2"], **{f"{MODULE}.lora_A.default.weight": (2, 64)})

    # Each of its 2 layers lacks the 3 weights of the dense `mlp` and the 3 biases of q, k and v.
    assert "it lacks 12 weights, such as " in failure(tmp_path / "other", capsys)
    assert "1 adapters fit no weight of the base model (model.layers.9.q" in failure(
        tmp_path / "more", capsys
    )
    assert f"the adapter of {MODULE} cannot be read" in failure(tmp_path / "shape", capsys)
