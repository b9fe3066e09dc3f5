# SPDX-License-Identifier: Apache-2.0
"""`docs/start.md` does what it says: its files and commands, in its order, in a folder with ten images.

The page is the only place where they stand. The test brings what a reader brings, images and a table, and
looks at what the page promises.
"""

import csv
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import HTTPCookieProcessor, ProxyHandler, build_opener

import pytest
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.architecture.source import ROOT
from verl.checkpoint.manifest import MANIFEST
from verl.logger.file import read_log

pytestmark = pytest.mark.heavy

PAGE = ROOT / "docs" / "start.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"(?:# |\{# )([\w.]+\.(?:py|jinja|yaml))\b")
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+\S*")
NOT_RUN = {
    "shell": "make install",
    "text": "images/0.png",
    "csv": "image,question,answer",
}  # what such blocks hold
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 210, 50)}
QUESTION = "What colour is the circle?"
RUN = Path("checkpoints", "start", "first")


def bring_data(folder):
    """The user's data: ten circles and a table of questions about them."""
    (folder / "images").mkdir()
    rows = []
    for number in range(10):
        colour = list(COLOURS)[number % len(COLOURS)]
        image = Image.new("RGB", (56, 56), "white")
        ImageDraw.Draw(image).ellipse((8, 8, 48, 48), fill=COLOURS[colour])
        image.save(folder / "images" / f"{number}.png")
        rows.append({"image": f"{number}.png", "question": QUESTION, "answer": colour})
    with (folder / "questions.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


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
            printed[command] = (ask_server if "--port" in command else run)(command, folder)
    return printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("newcomer")
    bring_data(folder)
    return folder


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


def test_the_checks_before_the_run_say_what_the_page_says(folder, printed):
    plan = output_of(printed, "verl-train", "--dry-run")
    rewards = output_of(printed, "verl-reward-check")

    assert re.search(r"plan of a training step\n(.*\n)*  sequences +64 ", plan)
    assert "8 rows, 8 used" in output_of(printed, "verl-data-check")
    assert (folder / "outputs" / "data_check" / "train_0.png").exists()
    for sample, score in (("ground truth", 1), ("empty", 0), ("wrong", 0)):
        assert re.search(rf"row 0, {sample}: overall {score} ", rewards)


def test_the_run_writes_metrics_rollouts_and_checkpoints_and_goes_on_where_it_stopped(folder, printed):
    steps = [entry["step"] for entry in read_log(folder / RUN)]

    assert "\nfinished 20 steps in " in printed["verl-train config=run.yaml config=tiny.yaml"]
    assert steps == list(range(41))  # 0: the validation before
    assert (folder / RUN / "rollouts" / "step_40.parquet").exists()
    for step in (10, 20, 30, 40):
        assert (folder / RUN / f"global_step_{step}" / MANIFEST).exists()


def test_the_model_learns_from_eight_images(folder, printed):
    log = {entry["step"]: entry for entry in read_log(folder / RUN)}

    assert log[0]["val/accuracy_reward"] == 0
    assert log[1]["reward/overall"] < 0.2
    assert log[40]["reward/overall"] > 0.3
    assert log[40]["val/accuracy_reward"] >= 0.5


def test_the_summary_and_the_page_show_the_run(printed):
    summary = output_of(printed, "verl-view", "--text")

    assert "40 of 40" in summary and "val reward" in summary and "best" in summary
    assert "<html" in output_of(printed, "verl-view", "--port").lower()


def test_the_exported_model_answers_as_the_trained_one_did(folder, printed):
    exported = folder / RUN / "global_step_40" / "actor" / "huggingface"
    (validated,) = (
        entry
        for entry in re.split(r"\n\n(?=\[step\])", (folder / RUN / "generations.log").read_text())
        if entry.startswith("[step] 40\n") and "[ground_truth] green\n" in entry  # the image 9
    )
    response = re.search(r"^\[response\] *(.*)$", validated, re.MULTILINE)[1].strip()

    assert f"answer: {response}\n" in output_of(printed, "python3 ask.py")
    assert "model written to" in output_of(printed, "verl-merge")
    assert AutoModelForImageTextToText.from_pretrained(exported).config.model_type == "qwen2_5_vl"
    assert "<|image_pad|>" in AutoProcessor.from_pretrained(exported).tokenizer.get_vocab()
