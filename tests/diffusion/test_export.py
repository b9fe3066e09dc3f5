# SPDX-License-Identifier: Apache-2.0
"""An exported checkpoint of a diffusion run loads in diffusers and draws what the trained model draws."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import PeftModel
from safetensors.torch import load_file

from examples.quickstart.tiny_pipelines import save_tiny_sd3
from tests.diffusion import models
from tests.diffusion.training import KINDS, build, images, save, update
from tests.helpers.checkpoints import modes_of
from tests.helpers.distributed import run_distributed
from verl.checkpoint.merger import merge_checkpoint
from verl.checkpoint.pipelines import merge_pipeline
from verl.cli.merge import main
from verl.config.files.paths import model_source
from verl.config.model import ModelConfig
from verl.diffusion.families.registry import SD3
from verl.trainer.model_checks import export_checkpoints

pytestmark = pytest.mark.heavy
nightly = pytest.mark.nightly("verl/checkpoint", "verl/cli")


def train_and_save(rank, world_size, base, target):
    """Return what each kind of trained model draws."""
    found = {}
    for kind, lora in KINDS.items():
        policy = build(base, lora, world_size)
        for seed in range(3):
            update(policy, seed)
        save(policy, target / kind, is_first=rank == 0)
        found[kind] = images(policy).numpy()
    return found


@pytest.fixture(scope="module")
def checkpoints(sd3_folder, tmp_path_factory):
    """The folder of the checkpoints, and the images of the models that they are of."""
    target = tmp_path_factory.mktemp("checkpoints")
    found = run_distributed(train_and_save, 2, sd3_folder, target)
    return target, {kind: torch.from_numpy(values) for kind, values in found[0].items()}


@pytest.fixture
def actor(checkpoints, tmp_path):
    """A function that copies the checkpoint of a kind."""

    def copied(kind):
        return shutil.copytree(checkpoints[0] / kind, tmp_path / kind) / "actor"

    return copied


def draw(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    return models.draw((SD3(), pipeline))


@nightly
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_pipeline_draws_what_the_trained_model_draws(checkpoints, actor, sd3_folder, kind):
    exported = merge_checkpoint(actor(kind))

    trained = checkpoints[1][kind]
    base = draw(DiffusionPipeline.from_pretrained(sd3_folder))
    assert (trained - base).abs().max() > 0.05
    torch.testing.assert_close(draw(DiffusionPipeline.from_pretrained(exported)), trained, atol=1e-5, rtol=0)


def test_lora_weights_load_into_the_base_pipeline(checkpoints, actor, sd3_folder):
    pipeline = DiffusionPipeline.from_pretrained(sd3_folder)

    pipeline.load_lora_weights(actor("lora") / "lora_adapter")

    torch.testing.assert_close(draw(pipeline), checkpoints[1]["lora"], atol=1e-5, rtol=0)


@nightly
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_load_with_peft(checkpoints, actor, sd3_folder, kind):
    pipeline = DiffusionPipeline.from_pretrained(sd3_folder)

    PeftModel.from_pretrained(pipeline.transformer, actor(kind) / "lora_adapter")

    torch.testing.assert_close(draw(pipeline), checkpoints[1][kind], atol=1e-5, rtol=0)


@nightly
def test_large_weights_are_cut_into_files_that_an_index_names(actor):
    local_dir = actor("full")
    whole = DiffusionPipeline.from_pretrained(merge_checkpoint(local_dir)).transformer.state_dict()

    exported = merge_checkpoint(local_dir, max_file_bytes=100_000)

    assert len(list((exported / "transformer").glob("*.safetensors"))) > 2
    cut = DiffusionPipeline.from_pretrained(exported).transformer.state_dict()
    assert cut.keys() == whole.keys() and all(torch.equal(cut[name], whole[name]) for name in whole)


@nightly
def test_adapters_are_folded_into_a_base_of_several_files(actor, sd3_folder, tmp_path):
    base = shutil.copytree(sd3_folder, tmp_path / "base")
    transformer = DiffusionPipeline.from_pretrained(base).transformer
    shutil.rmtree(base / "transformer")
    transformer.save_pretrained(base / "transformer", max_shard_size="100KB")
    local_dir = actor("lora")
    expected = load_file(merge_checkpoint(local_dir) / "transformer" / "diffusion_pytorch_model.safetensors")

    exported = merge_checkpoint(local_dir, base_model=str(base))

    found = load_file(exported / "transformer" / "diffusion_pytorch_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@nightly
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_transformer_is_written_in_the_dtype_that_is_asked_for(actor, kind):
    exported = merge_checkpoint(actor(kind), dtype=torch.bfloat16)

    tensors = load_file(exported / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@nightly
def test_folded_weights_keep_the_dtype_of_the_base(actor, sd3_folder, tmp_path):
    base = tmp_path / "base"
    DiffusionPipeline.from_pretrained(sd3_folder, dtype=torch.float16).save_pretrained(base)

    exported = merge_checkpoint(actor("lora"), base_model=str(base))

    tensors = load_file(exported / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}


@nightly
def test_a_changed_export_leaves_the_base_as_it_is(actor, sd3_folder):
    exported = merge_checkpoint(actor("full"))

    with (exported / "vae" / "diffusion_pytorch_model.safetensors").open("r+b") as file:
        file.write(b"changed")

    assert (sd3_folder / "vae" / "diffusion_pytorch_model.safetensors").read_bytes()[:7] != b"changed"


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_others_may_read_an_export_whose_base_is_private(actor, sd3_folder, tmp_path, kind):
    base = shutil.copytree(sd3_folder, tmp_path / "base")
    for name in modes_of(base):
        (base / name).chmod(0o600)
    local_dir = actor(kind)

    exported = merge_checkpoint(local_dir, base_model=str(base))

    modes = modes_of(exported) | modes_of(local_dir / "lora_adapter")
    assert {"vae/config.json", "transformer/diffusion_pytorch_model.safetensors"} < modes.keys()
    assert set(modes.values()) == {0o644}


def test_an_export_that_was_interrupted_is_repeated(checkpoints, actor):
    local_dir = actor("full")
    exported = merge_checkpoint(local_dir)
    (exported / "vae").rename(exported / "vae.tmp")
    (exported / "transformer" / "diffusion_pytorch_model.safetensors").rename(
        exported / "transformer" / "0.part"
    )

    merge_checkpoint(local_dir)

    torch.testing.assert_close(
        draw(DiffusionPipeline.from_pretrained(exported)), checkpoints[1]["full"], atol=1e-5, rtol=0
    )
    assert not [*exported.glob("*.tmp"), *exported.glob("*/*.part")]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_without_its_base_the_error_names_the_file_and_the_option(actor, capsys, kind):
    local_dir = actor(kind)
    manifest = json.loads((local_dir / "manifest.json").read_text())
    (local_dir / "manifest.json").write_text(json.dumps(manifest | {"base_model": "/moved/sd3"}))

    assert main(["--local_dir", str(local_dir)]) == 1

    message = capsys.readouterr().err
    assert f"{local_dir}/manifest.json (/moved/sd3)" in message and "`--base_model`" in message


@nightly
def test_an_incomplete_base_is_told_by_the_missing_part(actor, sd3_folder, tmp_path):
    base = shutil.copytree(sd3_folder, tmp_path / "base")
    shutil.rmtree(base / "text_encoder_2")

    with pytest.raises(FileNotFoundError, match=r"base/text_encoder_2 is missing.*`--base_model`"):
        merge_checkpoint(actor("full"), base_model=str(base))


@pytest.mark.parametrize("name", ["", ".", "..", "../secret", "/etc", "vae/inner"])
def test_a_part_of_the_base_is_a_folder_next_to_its_index(name, tmp_path):
    index = {"_class_name": "StableDiffusion3Pipeline", name: ["diffusers", "AutoencoderKL"]}
    for folder in (tmp_path / "actor" / "huggingface", tmp_path / "base", tmp_path / "secret"):
        folder.mkdir(parents=True)
        (folder / "model_index.json").write_text(json.dumps(index))

    with pytest.raises(ValueError, match=f"base/model_index.json names the part '{name}', which must be"):
        merge_pipeline(tmp_path / "actor", base_model=str(tmp_path / "base"))

    assert [path.name for path in (tmp_path / "actor" / "huggingface").iterdir()] == ["model_index.json"]


@nightly
def test_another_pipeline_is_refused_as_base(actor, sd3_folder, tmp_path):
    base = shutil.copytree(sd3_folder, tmp_path / "base")
    index = json.loads((base / "model_index.json").read_text())
    (base / "model_index.json").write_text(json.dumps(index | {"_class_name": "WanPipeline"}))

    with pytest.raises(
        ValueError, match=r"is a WanPipeline, .* is of a StableDiffusion3Pipeline.*`--base_model`"
    ):
        merge_checkpoint(actor("full"), base_model=str(base))


@nightly
def test_adapters_that_do_not_fit_the_base_are_refused_before_anything_is_written(actor, tmp_path):
    local_dir, base = actor("lora"), save_tiny_sd3(tmp_path / "base", layers=1)

    with pytest.raises(ValueError, match=r"adapters fit no weight of the base model.*`--base_model`"):
        merge_checkpoint(local_dir, base_model=str(base))

    assert not (local_dir / "huggingface" / "vae").exists()


def test_a_run_that_starts_from_a_checkpoint_exports_it_once(checkpoints, actor):
    local_dir = actor("lora")
    model = ModelConfig(model_path=model_source(str(local_dir)))

    export_checkpoints([model])

    weights = Path(model.model_path) / "transformer" / "diffusion_pytorch_model.safetensors"
    written = weights.stat().st_mtime_ns
    export_checkpoints([model])
    assert weights.stat().st_mtime_ns == written
    found = draw(DiffusionPipeline.from_pretrained(model.model_path))
    torch.testing.assert_close(found, checkpoints[1]["lora"], atol=1e-5, rtol=0)


@pytest.mark.nightly("verl/checkpoint", "verl/cli")
def test_exports_of_text_models_import_nothing_of_diffusers():
    code = "import sys, verl.checkpoint.merger; print([name for name in sys.modules if 'diffusers' in name])"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.splitlines()[-1] == "[]"
