# SPDX-License-Identifier: Apache-2.0
"""Models looked at before anything is imported: folders, misspelled names, and the length of the context."""

import json
import math
import socket
from pathlib import Path

import pytest

from verl.config.distillation import TeacherConfig
from verl.config.files.model_files import (
    folder_problem,
    hub_problem,
    length_limit,
    read_model_config,
    stored_tensors,
    weights_problem,
)
from verl.config.files.paths import data_source, existing_file, model_source
from verl.config.hints.missing_paths import missing, nearest_sibling
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, load_config


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny-model", "tiny2", "Qwen/Qwen2.5-7B", "data/train"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tiny-model/config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (tmp_path / "train.jsonl").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("resolve", "text", "said"),
    [
        (model_source, "tiny-modell", "no folder tiny-modell here; did you mean ./tiny-model?"),
        (model_source, "Tiny-Model", "no folder Tiny-Model here; did you mean ./tiny-model?"),
        (model_source, "tiny3", "no folder tiny3 here; did you mean ./tiny2?"),
        (model_source, "./tiny-modell", "tiny-modell; did you mean ./tiny-model?"),
        (model_source, "nope.gguf", "/nope.gguf"),
        (model_source, "models/nope.safetensors", "/models/nope.safetensors ("),
        (model_source, "Qwen/Qwen2.5-7b", "did you mean ./Qwen/Qwen2.5-7B?"),
        (data_source, "data/tarin@x", "no folder data/tarin here; did you mean ./data/train?"),
        (
            existing_file,
            "$HOME/train.jsonl",
            "options expand `~` and `${oc.env:HOME}`, and the shell `$HOME`",
        ),
        (existing_file, "tarin.jsonl", "tarin.jsonl; did you mean ./train.jsonl?"),
        (existing_file, "datta/x/train.jsonl", "/datta/x/train.jsonl ("),
    ],
)
def test_a_misspelled_path_is_told_with_its_neighbor(here, resolve, text, said):
    with pytest.raises(FileNotFoundError) as raised:
        resolve(text)

    assert said in str(raised.value)


@pytest.mark.parametrize(
    "name",
    [
        *("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-7B", "gpt2", "tiny-model-2"),
        "owner/tiny-model",
    ],
)
def test_a_name_of_the_hub_is_not_taken_for_a_misspelled_folder(here, name):
    assert model_source(name) == name


@pytest.mark.parametrize("text", ["[tiny-model,tiny2]", "tiny model", "-x"])
def test_a_model_is_one_folder_or_one_name(here, text):
    with pytest.raises(ValueError, match="must be a folder or one hub name such as `owner/name`, got"):
        model_source(text)


def test_a_name_that_was_downloaded_is_right_whatever_lies_here(here, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(here / "hub"))
    snapshot = here / "hub/models--tiny-modell/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"n_positions": 7}')
    (here / "hub/models--tiny-modell/refs").mkdir()
    (here / "hub/models--tiny-modell/refs/main").write_text("abc")

    assert model_source("tiny-modell") == "tiny-modell"
    assert read_model_config("tiny-modell") == {"n_positions": 7}


def test_the_missing_folder_of_a_path_is_named(here):
    assert str(missing("file", here / "nowhere/deep/a.txt")).endswith(f"({here} has no nowhere)")
    assert nearest_sibling(here / "unlike", 0.8) is None


@pytest.mark.parametrize(
    ("config", "overrides", "tokens"),
    [
        ({"max_position_embeddings": 4096}, {}, 4096),
        ({"n_positions": 1024}, {}, 1024),
        ({"max_position_embeddings": 9, "text_config": {"max_position_embeddings": 2048}}, {}, 2048),
        ({"max_position_embeddings": 4096}, {"max_position_embeddings": 8192}, 8192),
        (
            {"text_config": {"max_position_embeddings": 2048}},
            {"text_config": {"max_position_embeddings": 4}},
            4,
        ),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {},
            8192,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn", "factor": 4}}, {}, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, {}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "mrope", "factor": 2}}, {}, 4096),
        (
            {"n_positions": 10, "rope_parameters": {"full": {"rope_type": "dynamic", "factor": 3}}},
            {},
            30,
        ),
        ({"max_position_embeddings": 10, "model_max_length": 99}, {}, None),
        ({"hidden_size": 3}, {}, None),
    ],
)  # fmt: skip
def test_the_limit_of_a_model_follows_its_config(config, overrides, tokens):
    limit = length_limit(config, overrides)

    assert (limit.tokens if limit else None) == tokens


def arguments_of(here, *more):
    (here / "reward.py").write_text("def main(rows): ...")
    return [
        *("data.train_files=owner/rows", "data.val_files=owner/rows", "worker.rollout.n=2"),
        *("worker.rollout.tensor_parallel_size=1", "trainer.n_gpus_per_node=1"),
        *("worker.reward.reward_function=reward.py", "worker.rollout.max_num_batched_tokens=9000"),
        *("worker.actor.model.model_path=tiny-model", *more),
    ]


def test_prompts_and_responses_beyond_the_context_are_refused(here, monkeypatch):
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)
    load_config(PPOConfig, arguments_of(here, "data.max_response_length=3584"))
    longer = arguments_of(here, "data.max_response_length=3585")

    with pytest.raises(ConfigError) as raised:
        load_config(PPOConfig, longer)

    (problem,) = raised.value.problems
    assert problem.startswith(
        "`data.max_prompt_length` + `data.max_response_length` (4097) must be at most 4096, the model's"
        " `max_position_embeddings` in its config.json"
    )
    load_config(PPOConfig, [*longer, "worker.actor.model.override_config.max_position_embeddings=4097"])
    load_config(PPOConfig, [*longer, "worker.rollout.name=hf"])
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    load_config(PPOConfig, longer)


def test_a_folder_that_is_no_model_is_told_with_what_it_is(here):
    option = "worker.actor.model"
    empty, adapter = here / "empty", here / "adapter"
    empty.mkdir()
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')

    assert folder_problem("owner/name", option) is None
    assert folder_problem(str(here / "tiny-model"), option) is None
    assert folder_problem(str(empty), option).endswith("has no config.json and is empty")
    assert folder_problem(str(here), option).endswith(f"did you mean {here}/tiny-model?")
    (empty / "model.Q4_1.gguf").touch()
    assert folder_problem(str(empty), option).endswith(
        f"is no model yet: python3 scripts/convert_gguf.py {empty}/model.Q4_1.gguf FOLDER"
    )
    assert f"set `{option}.model_path=owner/base` and `{option}.lora.path={adapter}`" in folder_problem(
        str(adapter), option
    )
    (problem,) = TeacherConfig(str(adapter)).problems("distillation.teacher_models.big")
    assert problem.endswith("not a model: set it to a folder with the adapter merged into owner/base")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("key", "size"), [("num_hidden_layers", 0), ("hidden_size", -64), ("vocab_size", 0)])
def test_a_config_with_sizes_that_no_model_has_is_told_with_the_key(here, nested, key, size):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 128, key: size}
    (here / "tiny2/config.json").write_text(json.dumps({"text_config": config} if nested else config))

    problem = folder_problem(str(here / "tiny2"), "worker.actor.model")

    assert (
        problem == f"({here / 'tiny2'}): config.json says `{key}` {size}: no model has it, correct the file"
    )


def test_a_model_without_weights_is_told_unless_it_is_a_checkpoint_to_export(here):
    model, exported = here / "tiny-model", here / "actor/huggingface"
    exported.mkdir(parents=True)
    (exported / "config.json").write_text("{}")

    assert "has no weights such as model.safetensors; it has config.json" in weights_problem(str(model))
    assert weights_problem(str(exported)) is None
    assert weights_problem("owner/name") is None
    (model / "pytorch_model.bin").write_text("")
    assert weights_problem(str(model)) is None


def write_weights(model, shape, **config):
    """Write the header of a safetensors file with one tensor, and as many zeros as it says."""
    end = 4 * math.prod(shape)
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}
    header = json.dumps({"__metadata__": {}, "model.embed_tokens.weight": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + b"\0" * end
    (model / "model.safetensors").write_bytes(content)
    (model / "config.json").write_text(json.dumps(config))
    return content


@pytest.mark.parametrize("nested", [False, True])
def test_weights_whose_header_contradicts_the_config_are_told_with_both(here, nested):
    model, text = here / "tiny-model", {"vocab_size": 5, "hidden_size": 2}
    write_weights(model, [7, 2], **({"text_config": text} if nested else text))

    problem = weights_problem(str(model))

    assert problem.endswith(
        "config.json says vocab_size 5, and the weights have 7 x 2 for model.embed_tokens.weight"
    )
    assert weights_problem(str(model), {"vocab_size": 7}) is None


@pytest.mark.parametrize("kept", [0, 7, 50, -1])
def test_weights_cut_short_are_told_by_their_header(here, kept):
    model = here / "tiny-model"
    content = write_weights(model, [7, 2], vocab_size=7, hidden_size=2)
    assert weights_problem(str(model)) is None
    (model / "model.safetensors").write_bytes(content[:kept])

    assert "it is cut short: download or export the model again" in weights_problem(str(model))


def test_the_header_of_a_file_is_read_again_only_once_it_changes(here, monkeypatch):
    model, opened = here / "tiny-model", []
    original = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *a, **k: opened.append(path) or original(path, *a, **k))
    write_weights(model, [7, 2], vocab_size=7, hidden_size=2)
    opened.clear()

    first, again = list(stored_tensors(model)), list(stored_tensors(model))
    assert first == again and opened == [model / "model.safetensors"]
    write_weights(model, [70, 2], vocab_size=70, hidden_size=2)
    assert list(stored_tensors(model)) != first


def test_a_file_of_the_index_that_is_missing_is_named(here):
    model = here / "tiny-model"
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')

    assert "model-2.safetensors" in weights_problem(str(model))


def test_a_model_that_is_neither_here_nor_downloadable_is_told_at_once(here, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(here / "hub"))
    for name in ("HF_HUB_OFFLINE", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub_problem("owner/name") is None

    told = "(owner/name) is not a folder here, was not downloaded, and"
    assert f"{told} 127.0.0.1 cannot be reached: run `hf download" in hub_problem("owner/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert f"{told} `HF_HUB_OFFLINE` is set" in hub_problem("owner/name")
    assert hub_problem(str(here / "tiny-model")) is None
