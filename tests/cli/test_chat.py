# SPDX-License-Identifier: Apache-2.0
"""Talking to tiny models: the prompts of training, streamed, from a terminal and from a pipe."""

import io
import os
import pty
import subprocess
import sys

import pytest
from PIL import Image

from tests.helpers.light_process import run_light
from tests.helpers.training import ROOT
from verl.cli.chat import main
from verl.cli.chat_session import UNFINISHED, Conversation, decoded
from verl.config.data import DataConfig
from verl.data.chat_template import ChatTemplate
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.prompt_template import PromptFormat
from verl.data.readers import load_processor, load_tokenizer
from verl.data.rl_dataset import RLHFDataset
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.engines import standalone_engine
from verl.workers.rollout.interface import RolloutRequest, SamplingOptions

RUN = "import sys; from verl.cli.chat import main; sys.exit(main(sys.argv[1:]))"
GREEDY = SamplingOptions(temperature=0.0, max_tokens=6)
PIXELS = MediaOptions(784, 50176)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A text model and one that reads images, with a picture."""
    folder = tmp_path_factory.mktemp("chat")
    for family in ("qwen2", "qwen2_5_vl"):
        save_tiny_model(folder / family, family)
    Image.new("RGB", (56, 56), "red").save(folder / "red.png")
    return folder


@pytest.fixture(scope="module")
def talk(models):
    """Open conversations with the models; engines are shared."""
    engines, opened = {}, []

    def start(family="qwen2", sampling=GREEDY, template=None, **options):
        path = str(models / family)
        if family not in engines:
            opened.append(standalone_engine("hf", path, device="cpu", dtype="fp32", max_length=160, seed=1))
            engines[family] = opened[-1].__enter__()
        processor = load_processor(path)
        chat_template = ChatTemplate(load_tokenizer(path), processor and processor.chat_template)
        media = processor and MediaLoader(processor, PIXELS)
        prompt_format = PromptFormat(template)
        return Conversation(
            engines[family], load_tokenizer(path), chat_template, media, prompt_format, sampling, **options
        )

    yield start
    for engine in opened:
        engine.__exit__(None, None, None)


def response_of(conversation):
    return conversation.messages[-1]["content"]


@pytest.mark.parametrize(
    "options", [GREEDY, SamplingOptions(temperature=0.7, top_p=0.9, max_tokens=9, seed=3)]
)
def test_a_stream_has_the_tokens_of_the_engines_own_sampling(talk, options):
    engine = talk().engine
    request = RolloutRequest("one", [40, 41, 42])

    (finished,) = (response for batch in engine.generate([request], options) for response in batch)

    assert list(engine.stream(request, options)) == finished.token_ids
    assert len(finished.token_ids) > 1


def test_a_conversation_continues_with_what_was_said_until_it_is_reset(talk):
    conversation = talk(system="Answer in one word.")

    first = "".join(conversation.ask("red"))
    prompts = conversation.tokenizer.decode(conversation._request().prompt_token_ids)
    second = "".join(conversation.ask("blue"))

    assert [message["role"] for message in conversation.messages] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert "Answer in one word." in prompts and "red" in prompts
    assert [conversation.messages[2]["content"], response_of(conversation)] == [first, second]
    conversation.reset()
    assert [message["role"] for message in conversation.messages] == ["system"]
    assert "".join(conversation.ask("red")) == first  # nothing of the earlier conversation is left


@pytest.mark.nightly("verl/data")
def test_the_prompt_of_a_message_with_an_image_is_that_of_the_same_row_in_training(talk, models, tmp_path):
    template = tmp_path / "prompt.jinja"
    template.write_text("{{ content }} One word.")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        f'{{"prompt": "<image>Which color?", "answer": "red", "images": ["{models / "red.png"}"]}}\n'
    )
    path = str(models / "qwen2_5_vl")
    processor = load_processor(path)
    config = DataConfig(format_prompt=str(template), max_prompt_length=64, filter_overlong_prompts_workers=1)
    dataset = RLHFDataset(
        str(rows), load_tokenizer(path), processor, config, media=MediaLoader(processor, PIXELS)
    )
    conversation = talk("qwen2_5_vl", template=str(template))

    conversation.add_media("image", str(models / "red.png"))
    list(conversation.ask("Which color?"))
    conversation.messages.pop()  # the response
    request = conversation._request()

    assert request.prompt_token_ids == dataset[0]["raw_prompt_ids"]
    assert [image.getpixel((5, 5)) for image in request.media.images] == [(255, 0, 0)]


def test_what_cannot_be_answered_is_removed(talk, models):
    conversation = talk("qwen2_5_vl")
    with pytest.raises(ValueError, match=r"no-such\.png"):
        conversation.add_media("image", "no-such.png")
    conversation.add_media("image", str(models / "red.png"))
    with pytest.raises(ValueError, match="no room for a response"):
        list(conversation.ask("red " * 200))

    assert conversation.messages == [] and not any(conversation.references.values())
    assert "".join(conversation.ask("red"))
    with pytest.raises(ValueError, match="this model reads no images"):
        talk().add_media("image", str(models / "red.png"))


def test_a_response_that_is_left_is_kept_as_far_as_it_was_read(talk):
    conversation = talk()
    whole = list(conversation.ask("red"))
    conversation.reset()

    pieces = conversation.ask("red")
    first = next(pieces)
    pieces.close()

    assert len(whole) > 1 and first == whole[0] == response_of(conversation)


def test_a_character_of_several_tokens_waits_for_its_last_one():
    parts = {(1,): "a", (1, 2): f"a{UNFINISHED}", (1, 2, 3): "aé", (1, 2, 3, 4): f"aé{UNFINISHED}"}

    assert list(decoded(iter([[1], [2], [3], [4]]), lambda ids: parts[tuple(ids)])) == ["a", "é", UNFINISHED]


def run_piped(monkeypatch, capsys, text, *arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    status = main([*map(str, arguments), "--temperature", "0", "--max-tokens", "4", "--min-pixels", "784"])
    return status, *capsys.readouterr()


def test_a_pipe_is_answered_line_by_line_with_nothing_else_on_stdout(monkeypatch, capsys, models, talk):
    conversation = talk(sampling=SamplingOptions(temperature=0.0, max_tokens=4))
    expected = ["".join(conversation.ask(text)) for text in ("red", "blue")]

    status, out, _ = run_piped(
        monkeypatch, capsys, "red\n\nblue\n/reset\nred\n/quit\nblue\n", models / "qwen2"
    )

    assert status == 0
    assert out == "".join(f"{text}\n" for text in [*expected, expected[0]])


def test_lines_that_cannot_be_answered_are_told_and_decide_the_exit_status(monkeypatch, capsys, models):
    text = f"/imag x\n/image\n/image {models / 'red.png'}\n/help\nWhich color?\n"

    status, out, told = run_piped(monkeypatch, capsys, text, models / "qwen2_5_vl")

    assert status == 2
    assert "/imag is no command" in told and "/image needs the path of a file" in told
    assert "begin a new conversation" in told
    assert len(out.splitlines()) == 1  # the message with the image


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./no-such-model"], "no folder"),
        (["Qwen/Qwen3-4B", "--format-prompt", "no.jinja"], "no file no.jinja"),
        (["Qwen/Qwen3-4B", "--temperature", "-1"], "`--temperature` must be at least 0"),
    ],
)
def test_wrong_arguments_are_told_before_torch_is_imported(arguments, message, tmp_path):
    code = f"{RUN.replace('sys.exit', 'status = ')}; sys.exit(status + ('torch' in sys.modules))"

    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path,
        stdin=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    assert run.returncode == 2 and message in run.stderr  # 3 if torch was imported


def test_an_engine_that_is_not_installed_is_told_with_the_remedy(models, monkeypatch, capsys):
    monkeypatch.setattr("verl.utils.version_check.ENGINE_PACKAGES", {"sglang": ("no-such-package",)})

    assert main([str(models / "qwen2"), "--engine", "sglang"]) == 1
    assert "sglang: found no installation, needed ==0.5.21" in capsys.readouterr().err


def test_help_imports_little():
    code = "from verl.cli.chat import main; main(['--help'])"

    assert "--max-tokens" in run_light(code, most_modules=600).stdout


@pytest.mark.nightly
def test_a_terminal_gets_a_prompt_and_ends_with_ctrl_d(models):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, models / "qwen2", "--max-tokens", "3"], cwd=ROOT,
        stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "dumb"}, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    for wanted, typed in ((b"> ", b"red\n"), (b"\n> ", b"\x04")):
        mark = len(seen)
        while wanted not in seen[mark:]:
            seen += os.read(ours, 1 << 12)
        os.write(ours, typed)

    assert process.wait(timeout=600) == 0
    assert b"loading the model" in seen and b"/help lists commands" in seen
    os.close(ours)


@pytest.mark.nightly("verl/workers/rollout")
@pytest.mark.heavy
def test_vllm_answers_as_transformers_do(models, talk):
    conversation = talk(sampling=SamplingOptions(temperature=0.0, max_tokens=4))
    expected = ["".join(conversation.ask(text)) for text in ("red", "blue")]

    options = ["--engine", "vllm", "--temperature", "0", "--max-tokens", "4"]
    run = subprocess.run(
        [sys.executable, "-c", RUN, models / "qwen2", *options],
        input="red\nblue\n", capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip

    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.splitlines() == expected
