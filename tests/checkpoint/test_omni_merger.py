# SPDX-License-Identifier: Apache-2.0
"""A merged omni model is a trained thinker, and the parts that speak as they were."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM, AutoTokenizer

from tests.helpers.checkpoints import save_shards
from tests.helpers.distributed import run_distributed
from tests.helpers.omni import SPEAKING, save_speaking
from verl.checkpoint.merger import merge_checkpoint
from verl.checkpoint.sharded import save_huggingface_files
from verl.config.model import FSDPConfig, ModelConfig
from verl.distributed.fsdp import make_mesh
from verl.models.families.registry import whole_config
from verl.workers.model_builder import build_model

pytestmark = [pytest.mark.heavy, pytest.mark.nightly("verl/models/families")]

FSDP = FSDPConfig(torch_dtype="fp32")
SPEAKERS = "spk_dict.pt"  # of Qwen2.5-Omni, which does not load without it


def save_trained(rank: int, world_size: int, models: dict[str, Path], target: Path) -> None:
    for kind, folder in models.items():
        options = ModelConfig(model_path=str(folder))
        model = build_model(
            options, FSDP, mesh=make_mesh(world_size, -1, "cpu"), device="cpu", trainable=True
        )
        with torch.no_grad():
            for weight in model.parameters():
                weight += 1
        save_shards(target / kind, model)
        if rank == 0:
            config = whole_config(model.config, folder)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            save_huggingface_files(target / kind, config, model.generation_config, tokenizer)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    folders = {kind: save_speaking(root / kind, kind) for kind in SPEAKING}
    torch.save({"Chelsie": {"cond": torch.ones(2)}}, folders["qwen2_5_omni"] / SPEAKERS)
    return folders


@pytest.fixture(scope="module")
def merged(models, tmp_path_factory) -> dict[str, Path]:
    target = tmp_path_factory.mktemp("checkpoints")
    run_distributed(save_trained, 1, models, target)
    return {kind: merge_checkpoint(target / kind) for kind in models}


@pytest.mark.parametrize("kind", SPEAKING)
def test_the_thinker_is_trained_and_the_rest_is_the_base_models_bit_for_bit(models, merged, kind):
    before, after = (load_file(each[kind] / "model.safetensors") for each in (models, merged))

    assert after.keys() == before.keys()
    for name, tensor in before.items():
        expected = tensor + 1 if name.startswith("thinker.") else tensor
        assert after[name].dtype == expected.dtype and torch.equal(after[name], expected), name
    assert {name.split(".")[0] for name in after} > {"thinker", "talker"}


@pytest.mark.parametrize("kind", SPEAKING)
def test_the_whole_model_loads_with_transformers(models, merged, kind):
    auto = AutoModelForMultimodalLM
    if kind == "qwen2_5_omni":  # its `from_pretrained` adds the speakers to what this one returns
        assert auto.from_pretrained(merged[kind]).speaker_map["Chelsie"]["cond"].tolist() == [1, 1]
        return

    _, report = auto.from_pretrained(merged[kind], output_loading_info=True)

    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
