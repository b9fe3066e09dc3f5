# SPDX-License-Identifier: Apache-2.0
"""Laws that hold for any input, each tried with hundreds of random ones: `make fuzz` tries thousands."""

import io
import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.agents.parsers.test_parsers import SCHEMAS
from tests.helpers.conversations import rules_of
from tests.planning.test_step_plan import make_config
from tests.trainer.test_masked_responses import OF_ROWS
from tests.trainer.test_observed_tokens import CORRECTIONS, PERTURBED, ROWS, conversations, finished
from verl.agents.endpoint.chat_messages import ApiError
from verl.agents.endpoint.requests import read_request
from verl.agents.interface import Observation, ToolCall
from verl.agents.parsers.interface import without_thought
from verl.agents.parsers.registry import CALL_FORMATS
from verl.agents.tools.answers import AnswerLimits, BadAnswerError, as_observation, plain_reward
from verl.algorithms.advantages import ADV_ESTIMATORS
from verl.config.algorithm import AlgorithmConfig
from verl.config.data import DataConfig
from verl.data.readers import load_tokenizer
from verl.data.rl_dataset import RLHFDataset
from verl.logger.base import Run
from verl.logger.tracker import Tracker
from verl.models.lora_weights import read_adapter_config
from verl.models.tiny import save_tiny_model
from verl.planning.step_plan import make_plan
from verl.protocol import DataProto
from verl.rewards.function import load_reward_function
from verl.rewards.graders.judging import read_checklist, read_choice, read_criteria, read_ranking, read_score
from verl.utils.images import open_image, shown_size, to_rgb

pytestmark = pytest.mark.nightly("verl")
CASES = settings(max_examples=max(200, settings.default.max_examples))
FLOAT32 = float(np.finfo(np.float32).max)

# --- 1: pixels are what an image viewer shows

TURNS = {  # numpy's operations that undo an orientation of EXIF data
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: np.rot90(pixels),
}
STORED = [("RGB", "PNG"), ("RGBA", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("1", "PNG"), ("I;16", "PNG")]
STORED += [("RGB", "WEBP"), ("RGBA", "WEBP"), ("P", "PNG"), ("CMYK", "TIFF"), ("F", "TIFF"), ("RGBA", "TIFF")]


def stored_and_shown(mode, rng, width, height):
    """Return an image of a mode with random pixels, and the RGB pixels that a viewer shows."""
    pixels = rng.integers(0, 256, (height, width, 4), dtype=np.uint8)
    alpha = pixels[..., 3:] / 255
    gray = pixels[..., :1].repeat(3, -1)
    on_white = lambda colors: colors * alpha + 255 * (1 - alpha)  # noqa: E731
    if mode == "P":
        table = rng.integers(0, 256, (4, 3), dtype=np.uint8)
        indices = pixels[..., 0] % 4
        image = Image.fromarray(indices, "P")
        image.putpalette(table.tobytes())
        return image, table[indices]
    if mode == "I;16":
        return Image.fromarray(pixels[..., 0].astype(np.uint16) * 257), gray
    if mode == "F":
        return Image.fromarray(pixels[..., 0].astype(np.float32) / 255), gray
    if mode == "1":
        return Image.fromarray(pixels[..., 0] > 127), np.where(gray > 127, 255, 0)
    if mode == "CMYK":
        ink, black = pixels[..., :3].astype(float), pixels[..., 3:].astype(float)
        return Image.fromarray(pixels, "CMYK"), (255 - ink) * (255 - black) / 255
    shown = {"RGB": pixels[..., :3], "L": gray, "RGBA": on_white(pixels[..., :3]), "LA": on_white(gray)}[mode]
    channels = {"RGB": [0, 1, 2], "L": [0], "RGBA": [0, 1, 2, 3], "LA": [0, 3]}[mode]
    return Image.fromarray(pixels[..., channels].squeeze(), mode), shown


@CASES
@given(
    stored=st.sampled_from(STORED),
    orientation=st.integers(1, 8),
    size=st.tuples(st.integers(2, 9), st.integers(2, 9)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_image_is_what_a_viewer_shows(stored, orientation, size, seed):
    (mode, kind), rng = stored, np.random.default_rng(seed)
    image, shown = stored_and_shown(mode, rng, *size)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, kind, exif=exif, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
    file.seek(0)

    opened = open_image(file)
    found = np.asarray(to_rgb(opened), int)

    assert (found.shape[1], found.shape[0]) == shown_size(opened)
    assert np.abs(found - TURNS[orientation](shown)).max() <= 2  # roundings


# --- 2: a masked response influences nothing


@CASES
@given(
    estimator=st.sampled_from(ADV_ESTIMATORS.names()),
    correction=st.sampled_from(list(CORRECTIONS)),
    masked=st.sets(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS - 1),
    scale=st.floats(1e-3, 1e6),
    seed=st.integers(0, 2**32),
)
def test_any_masked_responses_reach_nothing_of_the_others(estimator, correction, masked, scale, seed):
    algorithm = AlgorithmConfig(
        adv_estimator=estimator, gamma=0.9, lam=0.8, kl_coef=0.1, rollout_correction=CORRECTIONS[correction]
    )
    batch, is_masked = conversations(), torch.zeros(ROWS, dtype=torch.bool)
    is_masked[list(masked)] = True
    batch.batch["loss_mask"] = batch.batch["loss_mask"].masked_fill(is_masked.unsqueeze(-1), 0)
    generator = torch.Generator().manual_seed(seed)
    changed = {
        name: torch.where(
            is_masked.view(-1, *[1] * (values.dim() - 1)),
            scale * torch.randn(values.shape, generator=generator), values,
        )
        for name in (*PERTURBED, "token_level_scores", *OF_ROWS)
        for values in [batch.batch[name]]
    }  # fmt: skip

    tensors, metrics = finished(batch, algorithm)
    others, other_metrics = finished(batch.merge(changed, replace=list(changed)), algorithm)

    for name, values in tensors.items():
        torch.testing.assert_close(values[~is_masked], others[name][~is_masked], atol=0, rtol=0, msg=name)
    assert metrics == pytest.approx(other_metrics, nan_ok=True, abs=0, rel=1e-12)


# --- 3: a column that nothing reads can be stored, carried over and resumed

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(0, 2**63 - 1), st.floats(), st.text(max_size=5),
    st.binary(max_size=5), st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1)),
    st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),
    st.dates(), st.times(), st.timedeltas(timedelta(-9), timedelta(9)),
    st.decimals(-1000, 1000, places=2).map(lambda number: Decimal(str(number))),
)  # fmt: skip
cells = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=3), inner),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2"))


@CASES
@given(column=st.lists(cells, min_size=1, max_size=3))
def test_a_column_of_any_type_of_a_table_is_carried_over(tokenizer, tmp_path, column):
    try:
        table = pyarrow.table(
            {"prompt": ["1?"] * len(column), "answer": ["1"] * len(column), "extra": column}
        )
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):
        assume(False)  # values without a common type
    config = DataConfig(max_prompt_length=64, filter_overlong_prompts_workers=1)

    dataset = RLHFDataset(str(tmp_path / "rows.parquet"), tokenizer, None, config, row_timeout_s=None)
    batch = DataProto.from_single_dict(dataset.collate([dataset[index] for index in range(len(dataset))]))
    batch.save_to_disk(tmp_path / "carried.pt")

    loaded = DataProto.load_from_disk(tmp_path / "carried.pt")
    before, after = (
        json.dumps(list(each.non_tensor_batch["extra"]), default=str) for each in (batch, loaded)
    )
    assert before == after and len(loaded) == len(column)


# --- 4: counting is by what was done


@CASES
@given(
    rows=st.integers(1, 500),
    epochs=st.integers(1, 5),
    first=st.integers(1, 50),
    second=st.integers(1, 50),
    share=st.floats(0, 1),
)
def test_a_run_resumed_with_another_batch_trains_its_epochs_and_not_a_step_more(
    rows, epochs, first, second, share
):
    assume(max(first, second) <= rows)
    config = make_config(total_epochs=epochs)

    def steps(batch, done):
        of_batch = replace(config, data=replace(config.data, rollout_batch_size=batch))
        return make_plan(of_batch, rows, done).training_steps

    before = int(share * steps(first, (0, 0)))
    more = steps(second, (before, before * first)) - before

    whole = rows // second * second * epochs  # an epoch drops what makes no whole step
    assert more >= 0
    assert before * first + more * second <= max(whole, before * first)
    assert before * first + (more + 1) * second > whole


# --- 5 and 6: whatever is written from outside is text, and is read without an error

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=run>", "</function>", "<parameter=count>", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>call:run{", "<tool_call|>"),
    *("<think>", "</think>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "```json", "```", "<|\"|>"),
    *("Score: ", "[[A]]", "[3] > [1]", "1: yes", "\\boxed{", "1e999", "NaN", "9" * 5000, "\ud800", "\0"),
    *("{", "}", "[", "]", '"', '"name"', '"arguments"', ":", ",", "1", "true", "null", " ", "\n", "\\"),
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=30).map("".join)
CRITERIA = read_criteria(["is short", {"criterion": "is wrong", "weight": -1}])


@CASES
@given(text=texts)
def test_any_answer_of_a_judge_is_a_score_in_range_or_none(text):
    scores = [read_score(text), read_choice(text), read_checklist(text, CRITERIA)]
    ranking = read_ranking(text, 3)

    assert all(score is None or 0 <= score <= 1 for score in scores)
    assert ranking is None or (len(ranking) == 3 and sum(ranking) == pytest.approx(1.5))


@CASES
@given(name=st.sampled_from(list(CALL_FORMATS)), text=texts)
def test_any_turn_is_read_as_calls_that_json_can_hold(name, text):
    for call in CALL_FORMATS[name].parse(without_thought(text), SCHEMAS):
        assert isinstance(call.name, str)
        json.dumps(call.arguments)


# Bodies that are nearly those of a chat completion.
odd = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.lists(texts, max_size=2)
function = st.fixed_dictionaries({"name": odd}, optional={"arguments": odd})
calls = st.fixed_dictionaries({}, optional={"id": odd, "function": odd | function})
parts = st.fixed_dictionaries({"type": odd | st.just("text")}, optional={"text": odd})
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | odd},
    optional={
        "content": odd | st.lists(odd | parts, max_size=2),
        "tool_calls": odd | st.lists(odd | calls, max_size=2),
        "tool_call_id": odd,
    },
)
OTHERS = ("tools", "tool_choice", "max_tokens", "stream", "stop", "n", "stream_options")
bodies = st.fixed_dictionaries(
    {"messages": odd | st.lists(odd | messages, max_size=3)}, optional=dict.fromkeys(OTHERS, odd)
)


@CASES
@given(body=bodies)
def test_any_body_of_a_request_is_read_or_refused_with_the_status_of_a_client(body):
    try:
        request = read_request(body, lambda url: {"path": url}, shows_tools=True)
    except ApiError as error:
        assert 400 <= error.status < 500 and error.body()["error"]["message"]
    else:
        assert all(message.digest for message in request.messages)


@pytest.fixture(scope="module")
def rules():
    return rules_of(schemas=())


@CASES
@given(
    text=texts, name=texts, key=texts, value=st.recursive(texts, lambda inner: st.lists(inner, max_size=2))
)
def test_no_text_from_outside_is_a_special_token(rules, text, name, key, value):
    function = {"name": name, "description": text, "parameters": {"properties": {key: {"enum": [value]}}}}
    tools = [{"type": "function", "function": function}]
    harmless = [{"type": "function", "function": {"name": "a", "description": "a", "parameters": {}}}]

    def specials(token_ids):
        return [token for token in token_ids if token in rules.renderer._special_ids]

    row = rules.new_row([{"role": "user", "content": text}], None, "x", tools)
    plain = rules.new_row([{"role": "user", "content": "a"}], None, "x", harmless)
    end = rules.tokenizer.eos_token_id
    shown = rules.readable(Observation(text)).observation

    def following(call, observation):
        return rules.renderer.after_turn(end, [call], rules.renderer.messages([call], [observation]))

    answer = following(ToolCall(name, {}), shown)
    plain_answer = following(ToolCall("a", {}), Observation("a"))

    assert specials(row.token_ids) == specials(plain.token_ids)
    assert specials(answer) == specials(plain_answer)


# --- 7: a number from outside is checked where it enters

numbers = st.floats() | st.integers(-(10**400), 10**400) | st.decimals() | st.booleans()


def is_finite_in_float32(number):
    try:
        return abs(float(number)) <= FLOAT32
    except (OverflowError, ValueError):
        return False


@CASES
@given(number=numbers)
def test_a_reward_of_a_tool_is_taken_if_float32_holds_it(number):
    if is_finite_in_float32(number):
        assert plain_reward(number) == pytest.approx(float(number), rel=1e-6)
        assert as_observation(Observation("a", reward=number), AnswerLimits(9, "left")).reward is not None
    else:
        with pytest.raises(BadAnswerError, match="reward"):
            plain_reward(number)


@pytest.fixture(scope="module")
def score(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text("def score(items):\n    return [{'overall': item['value']} for item in items]\n")
    return load_reward_function(f"{path}:score").score


@CASES
@given(values=st.lists(numbers, min_size=2, max_size=2))
def test_a_score_is_taken_if_float32_holds_it(score, values):
    rows = [{"response": "a", "ground_truth": "1", "value": value} for value in values]

    if all(map(is_finite_in_float32, values)):
        assert [row["overall"] for row in score(rows)] == pytest.approx([float(value) for value in values])
    else:
        with pytest.raises(ValueError, match="overall"):
            score(rows)


# --- 11: what is not understood is refused

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
unknown = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=3, max_size=12).map(lambda key: f"zz_{key}")


@CASES
@given(key=unknown, value=st.integers(1, 9) | st.text(min_size=1) | st.lists(st.integers(), min_size=1))
def test_any_unknown_key_of_an_adapter_is_refused_by_name(key, value, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN | {key: value}))

    with pytest.raises(ValueError, match=f"`{key}`"):
        read_adapter_config(tmp_path, "x")


# --- 12: a logger loses one name, and everything else arrives


@CASES
@given(names=st.sets(st.text(min_size=1, max_size=8), max_size=5))
def test_any_name_of_a_metric_leaves_the_others_in_the_file(names, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    metrics = {f"reward/{name}": 1.0 for name in names} | {"loss": 2.0}

    with Tracker(["file"], Run("project", "experiment", folder, {})) as tracker:
        tracker.log(metrics, 1)

    (line,) = (folder / "experiment_log.jsonl").read_text().splitlines()
    assert json.loads(line)["loss"] == 2.0 and os.path.getsize(folder / "experiment_log.jsonl") > 0
