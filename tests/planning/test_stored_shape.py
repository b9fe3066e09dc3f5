# SPDX-License-Identifier: Apache-2.0
"""Sizes read from files, compared with those of the empty model that torch builds."""

import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from tests.helpers.nightly import by_day
from verl.config.model import FSDPConfig, LoraConfig, ModelConfig
from verl.models.families.registry import load_config
from verl.models.tiny import TINY_MODELS, save_tiny_model
from verl.planning.model_sizes import read_shape
from verl.planning.stored_shape import stored_shape
from verl.utils.weight_files import save_weights

DENSE = ["deepseek", "llama", "qwen2", "qwen2_5_vl", "qwen2_vl", "qwen3", "qwen3_vl"]
CHANGES = {
    "overridden": {"override_config": {"tie_word_embeddings": False}},
    "adapted": {"lora": LoraConfig(rank=4)},
    "partly trained": {"train_modules": [".*mlp.*"]},
    "partly frozen": {"freeze_modules": [".*mlp.*"]},
    "without its tower": {"freeze_vision_tower": True},
}


def both(folder, fsdp=FSDPConfig(), *, is_trained=True, **model):  # noqa: B008 - it is frozen
    config = ModelConfig(model_path=str(folder), **model)
    stored = stored_shape(config, fsdp, is_trained=is_trained, head="causal")
    return stored, read_shape(config, fsdp, option="worker.actor.model", is_trained=is_trained, head="causal")


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("tied", [True, False])
def test_the_sizes_equal_those_of_the_empty_model(tmp_path, family, tied):
    folder = save_tiny_model(tmp_path, family, num_hidden_layers=3, tie_word_embeddings=tied)

    for dtype in (None, "bf16"):
        for is_trained in (True, False):
            stored, empty = both(folder, FSDPConfig(torch_dtype=dtype), is_trained=is_trained)
            assert stored == empty


def test_a_model_with_windows_is_left_to_torch(tmp_path):
    stored, empty = both(save_tiny_model(tmp_path, "mistral"))

    assert stored is None
    assert [cache.window for cache in empty.text.caches] == [load_config(tmp_path).sliding_window]


def test_several_files_count_as_one_model(tmp_path):
    folder = save_tiny_model(tmp_path, "qwen2")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, chosen in parts.items():
        save_weights({name: tensors[name] for name in chosen}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, chosen in parts.items() for name in chosen}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    stored, empty = both(folder)

    assert stored == empty


def test_a_head_that_is_stored_although_it_is_tied_counts_once(tmp_path):
    folder = save_tiny_model(tmp_path, "qwen2", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_weights(tensors, folder / "model.safetensors")

    stored, empty = both(folder)

    assert stored == empty


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_is_not_trained_whole_is_left_to_torch(tmp_path, change):
    folder = save_tiny_model(tmp_path, "qwen2_5_vl")
    config = ModelConfig(model_path=str(folder), **CHANGES[change])

    assert stored_shape(config, FSDPConfig(), is_trained=True, head="causal") is None


@pytest.mark.parametrize(
    "family",
    by_day(sorted(TINY_MODELS.keys() - {*DENSE}), "qwen3_moe", "qwen2_5_omni", paths=["verl/models"]),
)
def test_a_model_of_another_kind_is_left_to_torch(tmp_path, family):
    stored, empty = both(save_tiny_model(tmp_path, family))

    assert stored is None and empty.params > 0


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors"])
def test_what_cannot_be_read_is_left_to_torch_which_says_why(tmp_path, broken):
    folder = save_tiny_model(tmp_path, "qwen2")
    (folder / broken).write_text("{")
    config = ModelConfig(model_path=str(folder))

    assert stored_shape(config, FSDPConfig(), is_trained=True, head="causal") is None


def test_scores_are_left_to_torch(tmp_path):
    config = ModelConfig(model_path=str(save_tiny_model(tmp_path, "qwen2")))

    assert stored_shape(config, FSDPConfig(), is_trained=True, head="scalar") is None


def test_a_dry_run_imports_no_torch(tmp_path):
    folder = save_tiny_model(tmp_path, "qwen2_5_vl")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n' * 8)
    (tmp_path / "reward.py").write_text(
        "def compute_score(inputs): return [{'overall': 0.0} for _ in inputs]\n"
    )
    options = [
        f"data.train_files={tmp_path / 'rows.jsonl'}", "data.val_files=null", "data.rollout_batch_size=8",
            "trainer.val_before_train=false",
        f"worker.actor.model.model_path={folder}", "worker.actor.global_batch_size=8",
        f"worker.reward.reward_function={tmp_path / 'reward.py'}:compute_score",
        "trainer.device=cpu", "trainer.n_gpus_per_node=1",
        "worker.rollout.tensor_parallel_size=1", "worker.rollout.n=4",
        'trainer.logger=["file"]', f"trainer.save_checkpoint_path={tmp_path / 'run'}",
    ]  # fmt: skip
    code = (
        "import sys\nfrom verl.trainer.main import main\nstatus = main([*sys.argv[1:], '--dry-run'])\n"
        "sys.exit(f'{status} torch' if 'torch' in sys.modules else status)"
    )

    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "memory at its most" in done.stdout
