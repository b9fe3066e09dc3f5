# SPDX-License-Identifier: Apache-2.0
"""Exports are uploaded with the hub's own client, to a local server; each failure is reported in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.helpers.checkpoints import save_shards
from tests.helpers.distributed import run_distributed
from tests.helpers.hub import Hub
from verl.checkpoint.sharded import save_huggingface_files
from verl.cli.merge import main
from verl.config.model import FSDPConfig, ModelConfig
from verl.distributed.fsdp import make_mesh
from verl.models.tiny import save_tiny_model
from verl.workers.model_builder import build_model

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).resolve().parents[2]


def save(rank, world_size, base, actor):
    model = build_model(
        ModelConfig(model_path=str(base)), FSDPConfig(torch_dtype="fp32"),
        mesh=make_mesh(world_size, -1, "cpu"), device="cpu", trainable=True,
    )  # fmt: skip
    save_shards(actor, model)
    save_huggingface_files(actor, model.config, model.generation_config, AutoTokenizer.from_pretrained(base))


@pytest.fixture(scope="module")
def actor(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    base = save_tiny_model(root / "model", "qwen2")
    run_distributed(save, 1, base, root / "global_step_2" / "actor")
    return root / "global_step_2" / "actor"


@pytest.fixture
def hub():
    with Hub() as hub:
        yield hub


def failure(capsys, *arguments):
    assert main(arguments) == 1
    last = capsys.readouterr().err.splitlines()[-1]  # below the bars of what was sent
    assert last.startswith("verl-merge: ")
    return last


def test_the_command_uploads_every_file_of_an_export_to_a_private_repository(actor, hub):
    command = [sys.executable, ROOT / "scripts" / "model_merger.py", "--local_dir", actor]

    done = subprocess.run(
        [*command, "--push-to-hub", "me/tiny"],
        capture_output=True, text=True, env=os.environ | hub.environment,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    folder = actor / "huggingface"
    assert done.stdout == f"model written to {folder}\nuploaded to {hub.endpoint}/me/tiny\n"
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*")}
    assert hub.repositories == {"me/tiny": files} and hub.private == {"me/tiny"}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= files.keys()


def test_a_second_upload_replaces_the_files_of_the_first(actor, hub, monkeypatch):
    hub.use_here(monkeypatch)
    arguments = ["--local_dir", str(actor), "--hf_upload_path", "me/tiny"]  # as in verl and EasyR1

    assert main(arguments) == 0
    first = hub.repositories["me/tiny"]["config.json"]
    assert main([*arguments, "--dtype", "bf16"]) == 0

    assert b"float32" in first and b"bfloat16" in hub.repositories["me/tiny"]["config.json"]


@pytest.mark.parametrize("name", ["tiny", "me/tiny/more", "not a name//", "me/-x", "a/b--c", "me/x.git", ""])
def test_a_wrong_name_is_told_before_anything_is_merged(tmp_path, capsys, name):
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "config.json").write_text("not read")

    told = failure(capsys, "--local_dir", str(tmp_path), "--push-to-hub", name)

    assert told == f"verl-merge: `--push-to-hub` must name a hub repository as `OWNER/NAME`, got {name!r}"


NO_NETWORK = "`--push-to-hub` (me/tiny): {}: allow network access, or leave the upload out"
IN_THE_WAY = {
    "token": "`--push-to-hub` needs a token of the hub: run `hf auth login`, or set `HF_TOKEN`",
    "network": NO_NETWORK.format("127.0.0.1 cannot be reached"),
    "offline": NO_NETWORK.format("`HF_HUB_OFFLINE` is set"),
}


@pytest.mark.parametrize("case", IN_THE_WAY)
def test_what_is_in_the_way_of_an_upload_is_told_before_anything_is_merged(
    tmp_path, capsys, monkeypatch, case
):
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "config.json").write_text("not read")
    with Hub() as hub:
        hub.use_here(monkeypatch)
        if case == "token":
            hub.forget_token(monkeypatch, tmp_path)
        elif case == "network":
            hub.__exit__()
        else:
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")

        told = failure(capsys, "--local_dir", str(tmp_path), "--push-to-hub", "me/tiny")

    assert told == f"verl-merge: {IN_THE_WAY[case]}"


@pytest.mark.parametrize("case", ["wrong token", "refused"])
def test_an_upload_that_fails_is_an_error_after_the_model_was_written(actor, capsys, monkeypatch, case):
    with Hub(refuses=403 if case == "refused" else None) as hub:
        hub.use_here(monkeypatch)
        if case == "wrong token":
            monkeypatch.setenv("HF_TOKEN", "hf_another")
        (actor / "huggingface" / "model.safetensors").unlink(missing_ok=True)

        told = failure(capsys, "--local_dir", str(actor), "--push-to-hub", "me/tiny")

    assert f"{actor}/huggingface was written but not uploaded to me/tiny (" in told
    assert {"wrong token": "Invalid", "refused": "out of storage"}[case] in told and "`hf auth login`" in told
    assert (actor / "huggingface" / "model.safetensors").is_file()
