# SPDX-License-Identifier: Apache-2.0
"""`docs/start.md` does what it says: its files and commands, in its order, from an empty folder.

The page is the only place where they are. The test brings nothing, as a reader does, and looks at what the
page promises.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import HTTPCookieProcessor, ProxyHandler, build_opener

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from tests.architecture.source import ROOT
from verl.checkpoint.manifest import MANIFEST
from verl.logger.file import read_log

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

PAGE = ROOT / "docs" / "start.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"(?:# |\{# )([\w.]+\.(?:py|jinja|yaml))\b")
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+\S*")
NOT_RUN = {"shell": "make install", "csv": "image,question,answer"}  # what such blocks hold
RUN = Path("colours", "checkpoints", "colours", "first")
TRAIN = "verl-train config=run.yaml"


def environment():
    """As after `. .venv/bin/activate`; a Ray cluster of somebody else on this machine is not joined."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}


def run(command, folder):
    """Run a line as a shell does; returns what it printed."""
    result = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment(), capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    return result.stdout


def ask_server(command, folder):
    """Start a command that serves, fetch the page from the address it prints, end it with Ctrl-C."""
    server = subprocess.Popen(
        command.split(), cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        line = next(line for line in server.stdout if ADDRESS.search(line))
        browser = build_opener(HTTPCookieProcessor(), ProxyHandler({}))  # the address hands out a cookie
        with browser.open(ADDRESS.search(line)[0], timeout=60) as answer:
            return answer.read().decode()
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0


def follow(folder):
    """Do what the page says, in its order; returns what each command printed."""
    printed = {}
    for language, body in BLOCK.findall(PAGE.read_text()):
        if name := FILE_NAME.match(body):
            (folder / name[1]).write_text(body)
            continue
        if language in NOT_RUN:
            assert body.startswith(NOT_RUN[language]), f"{language} blocks are not run: {body}"
            continue
        assert language == "bash", f"neither a file nor a command: {language}\n{body}"
        for command in body.strip().splitlines():
            assert command not in printed, f"twice on the page: {command}"
            if command.startswith("cd "):
                folder = folder / command.removeprefix("cd ")
                continue
            printed[command] = (ask_server if "--port" in command else run)(command, folder)
    return printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("newcomer")


@pytest.fixture(scope="module")
def printed(folder):
    return follow(folder)


def output_of(printed, beginning, *words):
    """What the one command printed that begins and goes on like this."""
    (text,) = [
        text
        for command, text in printed.items()
        if command.startswith(beginning) and all(word in command for word in words)
    ]
    return text


def test_the_folder_is_shown_as_it_is(folder, printed):
    page, made = PAGE.read_text(), folder / "colours"

    assert "verl-train config=run.yaml" in output_of(printed, "verl-init")
    for name in ("train.csv", "val.csv", "images", "prompt.jinja", "reward.py", "run.yaml", "tiny-model"):
        assert f"`{name}`" in page and (made / name).exists()
    shown = re.search(r"^```csv\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    assert (made / "train.csv").read_text().replace("\r", "").startswith(shown)


def test_the_checks_before_the_run_say_what_the_page_says(folder, printed):
    plan = output_of(printed, "verl-train", "--dry-run")
    rewards = output_of(printed, "verl-reward-check")

    assert re.search(r"plan of a training step\n(.*\n)*  sequences +256 ", plan)
    assert "  worker.rollout.dtype=fp32\n" in plan
    assert "64 rows, 64 used" in output_of(printed, "verl-data-check")
    assert (folder / "colours" / "outputs" / "data_check" / "train_0.png").exists()
    for sample, score in (("ground truth", 1), ("empty", 0), ("wrong", 0)):
        assert re.search(rf"row 0, {sample}: overall {score} ", rewards)


def test_the_run_writes_metrics_rollouts_and_checkpoints_and_goes_on_where_it_stopped(folder, printed):
    steps = [entry["step"] for entry in read_log(folder / RUN)]

    assert "\nfinished 20 steps in " in printed[f"{TRAIN} trainer.max_steps=20"]
    assert "\nfinished steps 21 to 40 in " in printed[TRAIN]
    assert steps == list(range(41))  # 0: the validation before
    assert (folder / RUN / "rollouts" / "step_40.parquet").exists()
    for step in (20, 40):
        assert (folder / RUN / f"global_step_{step}" / MANIFEST).exists()


def test_the_model_learns_within_the_steps_of_the_page(folder, printed):
    log = {entry["step"]: entry for entry in read_log(folder / RUN)}

    assert log[0]["val/accuracy_reward"] == 0
    assert log[1]["reward/overall"] < 0.2
    assert log[40]["reward/overall"] > 0.5
    assert log[40]["val/accuracy_reward"] > 0.5


def test_the_summary_and_the_page_show_the_run(printed):
    summary = printed["verl-view checkpoints --text"]

    assert "40 of 40" in summary and "val reward" in summary and "best" in summary
    assert "<html" in output_of(printed, "verl-view", "--port").lower()


def test_the_exported_model_answers_as_the_trained_one_did(folder, printed):
    exported = folder / RUN / "global_step_40" / "actor" / "huggingface"
    validated = pq.read_table(folder / RUN / "rollouts" / "validation_40.parquet").to_pylist()
    (picture,) = re.findall(r"'/image images/(\S+)'", PAGE.read_text())

    assert picture == "val_00.png", "the first row, whose response is the first that is recorded"
    assert output_of(printed, "printf", "verl-chat").strip() == validated[0]["response"].strip()
    assert "model written to" in output_of(printed, "verl-merge")
    assert AutoModelForImageTextToText.from_pretrained(exported).config.model_type == "qwen2_5_vl"
    assert "<|image_pad|>" in AutoProcessor.from_pretrained(exported).tokenizer.get_vocab()


def test_rows_of_ones_own_are_trained_on_and_spelled(folder, printed):
    own = folder / "colours" / "checkpoints" / "colours" / "own"
    tokenizer = AutoTokenizer.from_pretrained(folder / "colours" / "own-model")

    assert [entry["step"] for entry in read_log(own)] == list(range(21))
    assert [len(tokenizer.encode(answer)) for answer in ("yes", "no")] == [1, 1]
    assert "20 of 20" in printed["verl-view checkpoints/colours/own --text"]
