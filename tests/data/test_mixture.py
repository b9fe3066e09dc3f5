# SPDX-License-Identifier: Apache-2.0
"""Mixtures of sources: shares, order, resumption, and what a row knows of its source."""

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.data.test_loader import answers, make_config, readers_of, write
from tests.helpers.nightly import by_day
from verl.config.data import SourceConfig
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, load_config
from verl.config.sft import SFTDataConfig
from verl.data.first_look import look_at_data
from verl.data.loader import make_loaders, make_sft_loaders
from verl.data.order import Turns
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto
from verl.trainer.metrics import metrics_by_source

SIZES = {"maths": 7, "code": 4, "chat": 11}
WEIGHTS = {"maths": 2.0, "code": 0.5, "chat": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


def make_sources(folder, bad=(), **weights):
    """Write `SIZES` rows of each source, whose answers are (source, number); `bad` ones have no prompt."""
    sources = {}
    for name, size in SIZES.items():
        rows = [{"prompt": f"{name} {n}", "answer": f"{name} {n}", name: n} for n in range(size)]
        for number in bad:
            rows[number % size]["prompt"] = None
        file = write(folder / f"{name}.jsonl", rows)
        sources[name] = SourceConfig(train_files=file, weight=(WEIGHTS | weights)[name])
    return sources


def open_mixture(model, folder, sources, **options):
    config = make_config(model, sources=sources, **options)
    return make_loaders(config.data, readers_of(config), folder / "run").train


def drawn(loader, count):
    """Return the sources of the next `count` batches, and all answers."""
    batches = list(itertools.islice(loader, count))
    return [batch.non_tensor_batch["source"].tolist() for batch in batches], answers(batches)


def check_turns(rng):
    number = rng.randint(1, 8)
    weights = {
        str(source): rng.choice([1, 2, 0.5, 0.1, 7, rng.uniform(0.001, 3)]) for source in range(number)
    }
    turns, bound = Turns(weights), 1 - Fraction(1, max(1, 2 * number - 2))
    total = sum(Fraction(str(weight)) for weight in weights.values())

    for turn in range(1, 200):
        turns.take()
        assert sum(turns.counts.values()) == turn
        for name, weight in weights.items():
            assert abs(Fraction(str(weight)) / total * turn - turns.counts[name]) <= bound


def test_after_any_number_of_turns_each_source_had_its_share_to_within_one():
    for seed in range(200):
        check_turns(random.Random(seed))


def test_two_sources_of_weights_two_and_one_take_turns():
    turns = Turns({"a": 2, "b": 1})

    assert "".join(turns.take() for _ in range(9)) == "abaabaaba"


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("streaming", [False, True])
def test_each_source_has_its_share_of_the_batches_of_any_size(batch_size, streaming, model, tmp_path):
    loader = open_mixture(
        model, tmp_path, make_sources(tmp_path), rollout_batch_size=batch_size, streaming=streaming
    )

    counts = Counter()
    for number, sources in enumerate(drawn(loader, 30)[0], 1):
        counts.update(sources)
        for name, weight in WEIGHTS.items():
            assert abs(counts[name] - number * batch_size * weight / 3.5) < 1


def test_a_source_shows_each_of_its_rows_once_an_epoch_in_an_order_of_its_own(model, tmp_path):
    loader = open_mixture(model, tmp_path, make_sources(tmp_path))
    _, rows = drawn(loader, 40)
    everything = list(itertools.chain(*rows))

    for name, size in SIZES.items():
        own = [row for row in everything if row.startswith(name)]
        epochs = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
        assert len(epochs) >= 2 and all(len(set(epoch)) == size for epoch in epochs)
        assert epochs[0] != epochs[1]
        assert loader.parts[name].epochs == pytest.approx(len(own) / size)


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_rows_change_no_share(streaming, model, tmp_path):
    loader = open_mixture(
        model, tmp_path, make_sources(tmp_path, bad=(0, 2)), on_bad_row="skip", streaming=streaming
    )
    sources, rows = drawn(loader, 14)

    counts = Counter(itertools.chain(*sources))
    assert {name: counts[name] for name in WEIGHTS} == {"maths": 32, "code": 8, "chat": 16}
    assert not {"maths 0", "code 2", "chat 0"} & set(itertools.chain(*rows))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixture_of_one_source_has_the_order_of_its_files_alone(streaming, model, tmp_path):
    sources = make_sources(tmp_path)
    alone = make_config(model, train_files=sources["chat"].train_files, streaming=streaming)
    alone = make_loaders(alone.data, readers_of(alone), tmp_path / "run").train
    one = open_mixture(model, tmp_path, {"chat": sources["chat"]}, streaming=streaming)

    for _ in range(3):
        batches, expected = list(one), list(alone)
        assert answers(batches) == answers(expected) and len(batches) == 2
        assert all(set(batch.non_tensor_batch["source"]) == {"chat"} for batch in batches)
        assert one.state_dict() | {"rows": 0} == alone.state_dict() | {"rows": 0}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop_after", by_day([1, 2, 3, 5, 8, 13], 0, 5))
@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixture_that_is_resumed_continues_with_the_same_rows(
    stop_after, num_workers, streaming, model, tmp_path
):
    options = dict(sources=make_sources(tmp_path, bad=(1,)), on_bad_row="skip", streaming=streaming)
    unbroken = drawn(open_mixture(model, tmp_path, **options), 20)[1]
    stopped = open_mixture(model, tmp_path, **options, num_workers=num_workers)
    before = drawn(stopped, stop_after)[1]

    resumed = open_mixture(model, tmp_path, **options)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))

    assert before + drawn(resumed, 20 - stop_after)[1] == unbroken


def test_other_weights_count_from_the_step_at_which_they_came(model, tmp_path):
    first = open_mixture(model, tmp_path, make_sources(tmp_path, maths=9.0))
    drawn(first, 5)
    resumed = open_mixture(model, tmp_path, make_sources(tmp_path))
    resumed.load_state_dict(first.state_dict())

    counts = Counter(itertools.chain(*drawn(resumed, 7)[0]))
    assert counts == {"maths": 16, "code": 4, "chat": 8}
    assert resumed.parts["maths"].epochs > 16 / 7  # its rows went on from where they were


def test_conversations_are_mixed_as_prompts_are(model, tmp_path):
    sources = {}
    for name, weight in (("much", 3.0), ("little", 1.0)):
        rows = [{"prompt": name, "response": str(number)} for number in range(5)]
        sources[name] = SourceConfig(train_files=write(tmp_path / f"{name}.jsonl", rows), weight=weight)
    data = SFTDataConfig(sources=sources, max_length=64, num_workers=0)
    config = make_config(model)
    loader = make_sft_loaders(data, 4, readers_of(config), tmp_path / "run").train
    words = readers_of(config).tokenizer

    for batch in itertools.islice(loader, 6):
        texts = words.batch_decode(batch.batch["input_ids"])
        assert Counter("much" in text for text in texts) == {True: 3, False: 1}


def test_a_checkpoint_of_other_sources_is_refused(model, tmp_path):
    sources = make_sources(tmp_path)
    mixed = open_mixture(model, tmp_path, sources)
    files = [source.train_files for source in sources.values()]
    config = make_config(model, train_files=files)
    plain = make_loaders(config.data, readers_of(config), tmp_path / "run").train

    for one, other in ((mixed, plain), (plain, mixed)):
        with pytest.raises(ValueError, match=r"differ from the checkpoint's.*'sources'"):
            one.load_state_dict(other.state_dict())


def test_columns_that_only_some_sources_have_are_none_in_the_others(model, tmp_path):
    (batch,) = itertools.islice(open_mixture(model, tmp_path, make_sources(tmp_path)), 1)

    columns = batch.non_tensor_batch
    for row, source in enumerate(columns["source"]):
        assert {name: columns[name][row] is not None for name in SIZES} == {
            name: name == source for name in SIZES
        }


def test_a_template_knows_the_source_of_a_row_also_in_the_first_look(model, tmp_path):
    template = tmp_path / "by_source.jinja"
    template.write_text("{% if source == 'maths' %}Think. {% endif %}{{ content }}")
    config = make_config(model, sources=make_sources(tmp_path), format_prompt=str(template))

    loader = make_loaders(config.data, readers_of(config), tmp_path / "run").train
    look = look_at_data(config.data, str(model))

    for batch in itertools.islice(loader, 3):
        columns = batch.non_tensor_batch
        for source, text in zip(columns["source"], columns["prompt_text"], strict=True):
            assert ("Think. " in text) == (source == "maths")
    assert {row["source"] for row in look.rows} == set(SIZES)


def test_sources_with_validation_files_are_categories_of_the_validation(model, tmp_path):
    sources = make_sources(tmp_path)
    sources["chat"] = SourceConfig(val_files=sources["chat"].train_files)
    sources["code"] = replace(sources["code"], val_files=sources["code"].train_files)
    config = make_config(model, sources=sources)

    loaders = make_loaders(config.data, readers_of(config), tmp_path / "run")

    assert config.data.categories == ("source",)
    (batch,) = loaders.val
    assert Counter(batch.non_tensor_batch["source"]) == {"code": 4, "chat": 11}
    assert set(drawn(loaders.train, 5)[0][0]) == {"maths", "code"}


@pytest.mark.parametrize("look", [False, True])
def test_a_column_that_would_be_lost_is_refused_by_name(look, model, tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"prompt": "?", "answer": 1, "source": "web"}] * 4)
    sources = make_sources(tmp_path) | {"web": SourceConfig(train_files=file)}
    config = make_config(model, sources=sources)

    with pytest.raises(ValueError, match=r"rows.jsonl has a column `source`.*`data.source_key`"):
        if look:
            look_at_data(config.data, str(model))
        else:
            make_loaders(config.data, readers_of(config), tmp_path / "run")

    renamed = make_config(model, sources=sources, source_key="origin")
    loader = make_loaders(renamed.data, readers_of(renamed), tmp_path / "run").train
    (batch,) = itertools.islice(loader, 1)
    assert set(batch.non_tensor_batch["origin"]) <= set(sources)


@pytest.mark.parametrize("key", ["prompts", "ground_truth", "uid"])
def test_the_name_of_a_batch_key_is_no_column_of_sources(key, model, tmp_path):
    with pytest.raises(ValueError, match=rf"`data.source_key` \({key}\) must not be the name of a batch key"):
        open_mixture(model, tmp_path, make_sources(tmp_path), source_key=key)


def test_a_source_whose_rows_are_all_bad_is_refused_with_the_first_of_them(model, tmp_path):
    file = write(tmp_path / "bad.jsonl", [{"prompt": None, "answer": 1}] * 3)
    sources = make_sources(tmp_path) | {"bad": SourceConfig(train_files=file)}

    with pytest.raises(
        ValueError,
        match=r"no row of `data.sources.bad` can be used: 3 of 3 rows are bad, first .*bad.jsonl, row 0",
    ):
        open_mixture(model, tmp_path, sources, on_bad_row="skip")


def test_a_source_without_a_usable_row_is_refused_by_name(model, tmp_path):
    file = write(tmp_path / "long.jsonl", [{"prompt": "word " * 200, "answer": 1}])
    sources = make_sources(tmp_path) | {"long": SourceConfig(train_files=file)}

    with pytest.raises(ValueError, match=r"no row of `data.sources.long` can be used.*1 too long"):
        open_mixture(model, tmp_path, sources)
    with pytest.raises(ValueError, match=r"no row of `data.sources.long` can be used.*1 too long"):
        next(iter(open_mixture(model, tmp_path, sources, streaming=True)))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (dict(sources={"a": SourceConfig()}), "`data.sources.a.train_files` or `data.sources.a.val_files`"),
        (
            dict(sources={"a": SourceConfig(train_files="a.jsonl", weight=0.0)}),
            "`data.sources.a.weight` must be above 0",
        ),
        (dict(source_key=""), "`data.source_key` must name a column, got ''"),
        (
            dict(sources={"a": SourceConfig(train_files="a.jsonl")}, train_files="b.jsonl"),
            "`data.train_files` must be empty with `data.sources`: clear it, `data.train_files=`",
        ),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(options, problem, model):
    data = make_config(model, **options).data
    found = [*data.problems("data")]
    found += [text for name, one in data.sources.items() for text in one.problems(f"data.sources.{name}")]

    assert any(text.startswith(problem) for text in found), found


@pytest.mark.parametrize(("name", "shown"), [("1", "1"), ("'a b'", "'a b'")])
def test_a_name_that_no_source_can_have_is_refused_with_the_rule(name, shown):
    with pytest.raises(ConfigError, match=rf"a name is a letter, then letters, digits, -, _, got {shown}"):
        load_config(PPOConfig, [f"data.sources={{{name}: {{train_files: a.jsonl}}}}"])


def test_the_files_of_the_sources_may_be_named_twice_as_a_written_config_does(model, tmp_path):
    data = make_config(model, sources=make_sources(tmp_path)).data

    assert replace(data) == data and not list(data.problems("data"))
    assert data.train_files == [source.train_files for source in data.sources.values()]


def test_the_metrics_of_a_source_are_those_of_its_rows():
    scores = [[0.0, 1.0, 0.0], [0.0, 0.0, 0.5], [0.0, 0.25, 0.0], [9.0, 0.0, 0.0]]
    tensors = {
        "token_level_scores": torch.tensor(scores),
        "response_mask": torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]]),
        "loss_mask": torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 0], [0, 0, 0]]),
    }
    sources = np.array(["maths", "code", "maths", "chat"], dtype=object)
    batch = DataProto.from_dict(tensors, {"source": sources})

    assert metrics_by_source(batch, "source") == {
        "source/maths/score": 0.625,
        "source/maths/response_length": 2.0,
        "source/maths/share": 0.5,
        "source/maths/token_share": 4 / 6,
        "source/code/score": 0.5,
        "source/code/response_length": 3.0,
        "source/code/share": 0.25,
        "source/code/token_share": 2 / 6,
        "source/chat/response_length": 1.0,  # its only response is masked and has no score
        "source/chat/share": 0.25,
        "source/chat/token_share": 0.0,
    }


def test_a_run_that_only_validates_opens_no_training_file(model, tmp_path):
    sources = make_sources(tmp_path)
    sources["code"] = replace(sources["code"], val_files=sources["code"].train_files)
    data = make_config(model, sources=sources).data.without_training()

    assert data.train_files == "" and data.val_files == [sources["code"].val_files]
    assert list(data.sources) == ["code"] and not list(data.problems("data"))
