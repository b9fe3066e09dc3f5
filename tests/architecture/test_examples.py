# SPDX-License-Identifier: Apache-2.0
"""Every shipped example works as far as it can be tried without models and data."""

import os
import re
import shlex
import subprocess

import pytest
import yaml
from jinja2.sandbox import SandboxedEnvironment
from ray.runtime_env import RuntimeEnv

from examples.data_preprocess.common import make_parser
from scripts.convert_data import DATA_SETS
from tests.architecture.source import ROOT
from verl.trainer import sft
from verl.trainer.main import main

SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))
RUNTIME_ENV = ROOT / "examples" / "runtime_env.yaml"  # Ray's, not a config
FILES = sorted(
    path
    for path in (ROOT / "examples").rglob("*.yaml")
    if path != RUNTIME_ENV and path.parent.name != "prompt_files"
)
FINE_TUNING = {ROOT / "examples" / name for name in ("sft.yaml", "quickstart/cold_start.yaml")}
TRAINERS = {"main": main, "sft": sft.main}
TEMPLATES = sorted(
    path
    for path in (ROOT / "examples").rglob("*.jinja")
    if path.parent.name not in ("chat_template", "judge_prompt", "prompt_files")
)


def commands_of(script, written=None):
    """Each training of a script: its command and arguments, the script's variables filled in.

    `written` are the values of those that name what the script writes itself.
    """
    text = script.read_text().replace("\\\n", " ")
    variables = dict(re.findall(r"^(\w+)=(?:\$\{\w+:-)?([^\s}]+)", text, flags=re.MULTILINE))
    variables |= written or {}
    found = []
    for module, command in re.findall(r"^python3 -m verl\.trainer\.(\w+) (.*)$", text, flags=re.MULTILINE):
        for name, value in variables.items():
            command = command.replace(f"${{{name}}}", value)
        found.append((TRAINERS[module], [word for word in shlex.split(command) if word != "$@"]))
    return found


def command_of(script):
    """Return the arguments that a script gives to its only training."""
    ((_, arguments),) = commands_of(script)
    return arguments


def dry_run(script, folder, *overrides):
    """Plan every training of a script, what it writes before being in `folder`; returns the statuses."""
    text, written = script.read_text(), {"STAGE_1": str(folder)}
    written |= dict.fromkeys(re.findall(r"--output \$\{(\w+)\}", text), "owner/rows")
    for step in re.findall(r"\$\{STAGE_1\}/(global_step_\d+)", text):
        (folder / step / "actor").mkdir(parents=True, exist_ok=True)
    *first, (last, arguments) = commands_of(script, written)
    statuses = [command([*words, "--dry-run"]) for command, words in first]
    return [*statuses, last([*arguments, *overrides, "--dry-run"])]


@pytest.mark.nightly("examples", "verl/config", "verl/planning", "verl/trainer")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_example_script_passes_a_dry_run(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)

    assert set(dry_run(script, tmp_path)) == {0}, capsys.readouterr().err
    notes = re.findall("note: .*", capsys.readouterr().err)
    assert [note for note in notes if "is the number of processes on CPU" not in note] == []


PROGRAMS = """
set() { :; }
python3() { echo "$@"; }
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_example_script_takes_a_model_and_a_folder_of_videos_from_outside(script):
    def run(*arguments):
        command = ["bash", "-c", PROGRAMS + script.read_text(), str(script), *arguments]
        environment = {"PATH": os.environ["PATH"], "MODEL_PATH": "/my/model"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert "model_path=/my/model" in run()
    if "VIDEO_DIR" in script.read_text():
        last = run("/my/videos", "trainer.n_gpus_per_node=1").splitlines()[-1]
        assert "_dir=/my/videos" in last and last.endswith("trainer.n_gpus_per_node=1")
        assert run("--dry-run").splitlines()[-1].endswith("--dry-run")


def test_every_conversion_in_an_example_script_names_a_known_data_set_and_known_switches():
    texts = [script.read_text() for script in SCRIPTS]
    commands = re.findall(r"^python3 scripts/convert_data\.py (.*)$", "\n".join(texts), re.MULTILINE)

    assert commands
    for command in commands:
        make_parser(list(DATA_SETS.values()), "").parse_args(shlex.split(command))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_example_script_hands_on_what_its_user_adds(script):
    assert script.read_text().rstrip().endswith('"$@"')


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_every_example_config_passes_a_dry_run_once_model_and_data_are_named(file, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    reward = "worker.reward.reward_function=examples/reward_function/math.py:compute_score"
    command, needed = (sft.main, []) if file in FINE_TUNING else (main, [reward])
    inputs = [
        "worker.actor.model.model_path=owner/model",
        "data.train_files=owner/rows",
        "data.val_files=owner/rows",
    ]

    assert command([f"config={file}", *inputs, *needed, "--dry-run"]) == 0, capsys.readouterr().err


def test_the_runtime_environment_is_one_for_ray_and_takes_no_checkpoints_along():
    content = yaml.safe_load(RUNTIME_ENV.read_text())

    environment = RuntimeEnv(**content)  # checks names and types

    assert environment.env_vars() == content["env_vars"]
    assert {"/.git/", "/checkpoints/", "/outputs/"} <= set(content["excludes"])


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_every_template_renders_the_prompt(template):
    text = template.read_text()

    rendered = SandboxedEnvironment().from_string(text).render(content="How many?")

    assert "How many?" in rendered
    assert "{{" not in rendered and "\\n" not in text


def test_there_are_scripts_and_templates():
    assert SCRIPTS and TEMPLATES


def test_the_example_of_each_model_family_trains_the_model_that_the_page_names():
    text = (ROOT / "docs" / "models.md").read_text()
    rows = re.findall(r"\| `([^`]+/[^`]+)` \| `(examples/[^`]+\.sh)` \|", text)

    assert len(rows) >= 11
    for model, script in rows:
        assert f"worker.actor.model.model_path={model}" in command_of(ROOT / script), script
