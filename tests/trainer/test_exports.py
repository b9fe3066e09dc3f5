# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as the model that a run starts from."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.distributed import run_distributed
from tests.helpers.training import QUICKSTART
from verl.config.files.paths import model_source
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.models.tiny import save_tiny_model
from verl.planning.planned_run import planned_ppo
from verl.trainer.model_checks import export_checkpoints, is_unexported

pytestmark = pytest.mark.heavy


def save_checkpoint(rank, world_size, model_folder, folder):
    """A policy's folder as workers write it, with every weight doubled."""
    from verl.checkpoint.sharded import take_snapshot, write_snapshot
    from verl.config.model import FSDPConfig, ModelConfig
    from verl.data.readers import load_tokenizer
    from verl.distributed.fsdp import make_mesh
    from verl.workers.model_builder import build_model

    model = build_model(
        ModelConfig(model_path=str(model_folder)), FSDPConfig(mp_param_dtype="fp32"),
        mesh=make_mesh(world_size, -1, "cpu"), device="cpu", trainable=True,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    files = (model.config, model.generation_config, load_tokenizer(model_folder))
    write_snapshot(folder / "actor", take_snapshot(model, files=files))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    model = save_tiny_model(root / "model", "qwen2")
    run_distributed(save_checkpoint, 1, model, root / "global_step_3")
    return root / "global_step_3"


def config_from(path, *options):
    roles = [f"worker.{role}.model.model_path={path}" for role in ("actor", "reward_model")]
    data = ["data.train_files=a/b", "trainer.val_before_train=false", "worker.rollout.n=2"]
    return load_config(PPOConfig, [*roles, *data, *options])


def test_a_checkpoint_and_its_role_name_the_same_model(checkpoint, tmp_path):
    exported = str(checkpoint / "actor" / "huggingface")

    assert model_source(str(checkpoint)) == model_source(str(checkpoint / "actor")) == exported
    assert model_source(exported) == exported
    assert model_source(str(checkpoint.parent / "model")) == str(checkpoint.parent / "model")


def test_a_folder_of_that_name_without_a_policy_is_an_error(tmp_path):
    (tmp_path / "global_step_8").mkdir()

    with pytest.raises(ValueError, match="has no folder actor: it is not a complete checkpoint"):
        model_source(str(tmp_path / "global_step_8"))


def test_the_weights_are_exported_once_before_a_run_starts_from_them(checkpoint, caplog):
    config = config_from(checkpoint)
    models = [config.worker.actor.model, config.worker.reward_model.model]
    folder = checkpoint / "actor" / "huggingface"
    assert config.worker.actor.model.tokenizer_path == str(folder)
    assert is_unexported(folder)

    export_checkpoints(models)

    assert not is_unexported(folder)
    before = AutoModelForCausalLM.from_pretrained(checkpoint.parent / "model")
    after = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    assert all(after[name].equal(2 * weight) for name, weight in before.named_parameters())
    written = (folder / "model.safetensors").stat().st_mtime_ns
    export_checkpoints(models)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_a_run_serves_a_checkpoint_from_its_export(checkpoint, tmp_path):
    copy = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    (copy / "actor" / "huggingface" / "model.safetensors").unlink(missing_ok=True)
    reward = f"worker.reward.reward_function={QUICKSTART / 'judge_reward.py'}:compute_score"
    config = config_from(checkpoint.parent / "model", f"reward_servers.judge.model_path={copy}", reward)
    (server,) = planned_ppo(config).servers

    export_checkpoints([server.model])

    assert server.options.model_path == str(copy / "actor" / "huggingface")
    assert not is_unexported(Path(server.options.model_path))


def test_models_that_are_no_checkpoints_are_left_alone(tmp_path):
    (tmp_path / "huggingface").mkdir()

    assert not is_unexported(tmp_path / "huggingface")
