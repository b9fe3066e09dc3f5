# SPDX-License-Identifier: Apache-2.0
"""A GGUF file becomes a folder of the same model, whole or not at all."""

import json
import resource

import gguf
import pytest
import torch
from huggingface_hub import metadata_load
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.convert_gguf import main
from verl.config.files.paths import model_source
from verl.models.tiny import save_tiny_model


def write_gguf(model, file, without=()):
    """Write the tiny Qwen2 of a folder as llama.cpp's programs do, without quantization."""
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    added = {each["content"] for each in tokenizer["added_tokens"]}
    vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens += [f"[PAD{number}]" for number in range(len(tokens), config["vocab_size"])]
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_name("Tiny Qwen: 2")
    writer.add_license("apache-2.0")
    writer.add_base_model_repo_url(0, "https://huggingface.co/owner/tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    kinds = (gguf.TokenType.CONTROL if token in added else gguf.TokenType.NORMAL for token in tokens)
    writer.add_token_types(list(kinds))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template((model / "chat_template.jinja").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        if name in without:
            continue
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_the_folder_computes_and_reads_what_the_file_s_model_does(model, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"

    assert main([str(write_gguf(model, tmp_path / "tiny.gguf")), str(folder)]) == 0

    assert f"worker.actor.model.model_path={folder}" in capsys.readouterr().out
    (old, old_tokenizer), (new, new_tokenizer) = (
        (AutoModelForCausalLM.from_pretrained(each), AutoTokenizer.from_pretrained(each))
        for each in (model, folder)
    )
    messages = [{"role": "user", "content": "What colour is the red square?"}]
    ids = [each.apply_chat_template(messages, return_dict=False) for each in (old_tokenizer, new_tokenizer)]
    assert ids[0] == ids[1] and len(ids[0]) > 8
    with torch.no_grad():
        torch.testing.assert_close(new(torch.tensor(ids[:1])).logits, old(torch.tensor(ids[:1])).logits)
    assert new.dtype == torch.float32 and not hasattr(new.config, "quantization_config")
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    assert metadata_load(folder / "README.md") == {
        "model_name": "Tiny Qwen: 2",
        "license": "apache-2.0",
        "base_model": "owner/tiny",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no file "),
        (b"{}", "is no GGUF file"),
        (b"GGUF cut short", "transformers cannot read "),
    ],
    ids=["missing", "other", "cut"],
)
def test_a_file_that_is_none_is_one_error_and_leaves_no_folder(tmp_path, capsys, content, message):
    file = tmp_path / "model.gguf"
    if content is not None:
        file.write_bytes(content)

    assert main([str(file), str(tmp_path / "folder")]) == 2

    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} <= {"model.gguf"}


@pytest.mark.parametrize(
    "share", [0.001, 0.01, 0.5, 0.99999], ids=["header", "words", "weights", "last weight"]
)
def test_a_file_that_is_cut_short_is_to_be_downloaded_again(model, tmp_path, capsys, share):
    file = write_gguf(model, tmp_path / "tiny.gguf")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])

    assert main([str(file), str(tmp_path / "folder")]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert "tiny.gguf: it is cut short or damaged, download it again (" in line
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_weights_that_the_file_lacks_are_an_error_not_random_numbers(model, tmp_path, capsys):
    name = "model.layers.0.mlp.up_proj.weight"
    file = write_gguf(model, tmp_path / "tiny.gguf", without=[name])

    assert main([str(file), str(tmp_path / "folder")]) == 2

    assert f"tiny.gguf lacks 1 weights of its model, such as {name}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("folder", ["/proc/new/folder", "file/folder", "file/new/folder"])
def test_a_folder_that_cannot_be_made_is_an_error_before_the_file_is_read(tmp_path, capsys, folder):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF cut short")
    (tmp_path / "file").touch()

    assert main([str(file), str(tmp_path / folder)]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the parent of ") and "must be a folder that can be written" in line


def test_the_folder_may_be_the_current_one_if_it_is_empty(model, tmp_path, monkeypatch):
    file = write_gguf(model, tmp_path / "tiny.gguf")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")

    assert main([str(file), "."]) == 0

    assert (tmp_path / "folder" / "model.safetensors").is_file()


def test_a_disk_without_room_is_one_error_and_leaves_no_folder(model, tmp_path, capsys):
    file = write_gguf(model, tmp_path / "tiny.gguf")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # cuts off a write, as a full disk
    try:
        status = main([str(file), str(tmp_path / "folder")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert status == 2 and "folder cannot be written, is there room for it? " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_folder_with_files_is_kept(model, tmp_path, capsys):
    (tmp_path / "mine").touch()

    assert main([str(write_gguf(model, model / "tiny.gguf")), str(tmp_path)]) == 2

    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_run_names_the_command_for_a_file(tmp_path):
    (tmp_path / "model.gguf").touch()

    with pytest.raises(ValueError, match=r"is a file: python3 scripts/convert_gguf\.py .*model\.gguf FOLDER"):
        model_source(str(tmp_path / "model.gguf"))
