# SPDX-License-Identifier: Apache-2.0
"""A model to try things with: of a family, or like one on this disk."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from verl.cli.tiny_model import KINDS, main
from verl.models.tiny import TINY_MODELS

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def like(tmp_path_factory):
    """A vision-language model without its weights, which no other model needs."""
    folder = tmp_path_factory.mktemp("like") / "model"
    assert main(["--kind", "qwen2_5_vl", "--out", str(folder)]) == 0
    (folder / WEIGHTS).unlink()
    return folder


def make_like(like, folder, *arguments):
    assert main(["--like", str(like), "--out", str(folder), *arguments]) == 0
    return folder


def test_every_family_can_be_chosen():
    assert list(KINDS) == sorted(TINY_MODELS)


def test_a_model_of_a_family_has_its_type_and_reports_its_size(tmp_path, capsys):
    assert main(["--kind", "qwen3", "--out", str(tmp_path / "model"), "--set", "num_hidden_layers=1"]) == 0

    config = json.loads((tmp_path / "model" / "config.json").read_text())
    size = (tmp_path / "model" / WEIGHTS).stat().st_size
    assert (config["model_type"], config["num_hidden_layers"]) == ("qwen3", 1)
    assert f"{size / 1e6:.1f} MB of random weights" in capsys.readouterr().out


def test_a_model_like_another_has_its_type_with_the_values_that_were_set(like, tmp_path):
    changes = ("--set", "num_hidden_layers=1", "--set", "hidden_act=gelu")
    model = AutoModelForImageTextToText.from_pretrained(make_like(like, tmp_path / "model", *changes))

    original = json.loads((like / "config.json").read_text())
    assert original["text_config"]["num_hidden_layers"] == 2
    assert model.config.model_type == original["model_type"]
    assert model.config.text_config.num_hidden_layers == 1
    assert model.config.text_config.hidden_act == "gelu"
    assert model.config.vision_config.depth == original["vision_config"]["depth"]


def test_a_model_like_another_has_its_tokenizer_and_processor(like, tmp_path):
    folder = make_like(like, tmp_path / "model")

    for name in ("tokenizer.json", "processor_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (like / name).read_bytes()
    assert AutoTokenizer.from_pretrained(folder).encode("red") == AutoTokenizer.from_pretrained(like).encode(
        "red"
    )


def test_weights_depend_only_on_the_seed(like, tmp_path):
    first, again, other = (
        load_file(make_like(like, tmp_path / str(number), "--seed", seed) / WEIGHTS)
        for number, seed in enumerate(("3", "3", "4"))
    )

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_an_impossible_model_is_reported_and_nothing_is_written(like, tmp_path, capsys):
    for arguments, message in (
        (["--like", str(tmp_path)], "must be a folder with a model's config.json"),
        (["--like", str(like), "--set", "num_wheels=4"], "`--set num_wheels`: the config of qwen2_5_vl has"),
        (["--kind", "qwen2", "--set", "num_attention_heads=many"], "num_attention_heads"),
    ):
        assert main([*arguments, "--out", str(tmp_path / "model")]) == 1
        assert message in capsys.readouterr().err
        assert not list(tmp_path.glob("model/*.safetensors"))
    assert main(["--like", str(like), "--out", str(like)]) == 1


def test_a_change_without_key_and_value_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--out", str(tmp_path), "--set", "num_hidden_layers"])

    assert end.value.code == 2
    assert "must look like KEY=VALUE" in capsys.readouterr().err


def test_the_words_of_rows_become_tokens_of_the_model(tmp_path):
    table = tmp_path / "train.csv"
    table.write_text("question,answer\nWho?,Ada Lovelace\nHow many?,5\n")
    answers = tmp_path / "answers"

    assert main([str(answers), "--kind", "qwen3", "--words-from", f"{table}:answer"]) == 0
    assert main(["--kind", "qwen3", "--out", str(tmp_path / "all"), "--words-from", str(table)]) == 0

    assert len(AutoTokenizer.from_pretrained(answers).encode("Ada Lovelace")) == 1
    assert len(AutoTokenizer.from_pretrained(answers).encode("Who?")) == 4
    assert len(AutoTokenizer.from_pretrained(tmp_path / "all").encode("Who?")) == 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["OUT", "--words-from", "TABLE:answr"], "no such column, the file has ['answer', 'question']"),
        (["OUT", "--words-from", "TABLE:answer"], "no text to take words from"),
        (["OUT", "--words-from", "missing.csv"], "no file or directory"),
    ],
)
def test_rows_without_words_are_told(tmp_path, capsys, arguments, said):
    table = tmp_path / "train.csv"
    table.write_text("question,answer\nWho?,\n")
    places = {"OUT": tmp_path / "out", "TABLE": table}
    for name, place in places.items():
        arguments = [argument.replace(name, str(place)) for argument in arguments]

    assert main(arguments) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "name one folder"),
        (["a", "--out", "b"], "name one folder"),
        (["a", "--like", "b", "--words-from", "c.csv"], "leave out one"),
    ],
)
def test_arguments_that_contradict_are_told(capsys, arguments, said):
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err
