# SPDX-License-Identifier: Apache-2.0
"""What the documentation says is so: names, options, commands, links, messages and examples."""

import ast
import re
import shlex
import subprocess
from functools import cache

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.architecture.source import ROOT, source_files, tree_of
from tests.architecture.test_examples import dry_run
from verl.algorithms.advantages import ADV_ESTIMATORS
from verl.algorithms.aggregation import AGGREGATIONS
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.algorithms.resampling import RESAMPLING_METHODS
from verl.batch_keys import BATCH_KEYS
from verl.config.hints.renamed_keys import VERL_KEYS
from verl.config.ppo import PPOConfig
from verl.config.schema import walk_options
from verl.config.sft import SFTConfig
from verl.rewards.function import load_reward_function
from verl.trainer.main import main

README = ROOT / "README.md"
DOCS = [README, *sorted((ROOT / "docs").rglob("*.md"))]
REGISTRIES = [ADV_ESTIMATORS, POLICY_LOSSES, AGGREGATIONS, KL_ESTIMATORS, RESAMPLING_METHODS]
CODE_BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
OPTION = re.compile(r"(?<![\w./])(?:data|algorithm|worker|trainer)(?:\.[a-z]\w*)+(?![\w(/])")
MAKE_TARGET = re.compile(r"(?:`|^|python3\.12 )make ([a-z-]+)", re.MULTILINE)
REPOSITORY_FILE = re.compile(r"`((?:docs|examples|scripts|tests|benchmarks)/[\w./]+\.\w+)`")
MESSAGE = re.compile(r"^> (.+)$", re.MULTILINE)
MACHINE_PATH = re.compile("/(work|root)/")
SCRIPT = re.compile(  # of an installed command
    r"^ *python3 (?:-m verl\.trainer\.(?:main|sft)|"
    r"scripts/(?:diagnose|print_cfg|data_check|reward_check|model_merger|rollout_viewer|make_tiny_model)\.py)\b",
    re.MULTILINE,
)
RIGHT = ("5", "2 + 3 is 5.", "The answer is 5.0")  # responses to a question whose answer is 5
WRONG = ("The answer is 25", "5 and then 4", "1,005", "five", "")
SHIPPED = ("*.py", "*.md", "*.yaml", "*.toml", "*.sh", "*.jinja", "Makefile", "Dockerfile", "run")
FOLDERS = ("verl", "tests", "examples", "scripts", "benchmarks", "docs", ".ci")


def name_of(path):
    return path.name


def blocks(path, language):
    """The code blocks of a language."""
    return [body for kind, body in CODE_BLOCK.findall(path.read_text()) if kind == language]


@cache
def entries():
    """The entries of the algorithms' pages: option -> name -> text."""
    pages = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "algorithms").glob("*.md")))
    sections = re.findall(r"^## `([\w.]+)`\n(.*?)(?=^##? |\Z)", pages, flags=re.DOTALL | re.MULTILINE)
    return {
        option: dict(re.findall(r"^### `([\w+]+)`\n(.*?)(?=^### |\Z)", body, flags=re.DOTALL | re.MULTILINE))
        for option, body in sections
    }


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda one: one.option)
def test_every_registered_name_has_an_entry_and_every_entry_a_name(registry):
    assert sorted(entries()[registry.option]) == registry.names()


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda one: one.option)
def test_every_entry_has_a_command(registry):
    texts = entries()[registry.option]

    assert [name for name, text in texts.items() if "```bash\nbash examples/" not in text] == []


def test_the_key_table_is_that_of_the_protocol():
    rows = []
    for key in BATCH_KEYS.values():
        shapes = [f"({', '.join(map(str, dims))}{',' * (len(dims) == 1)})" for dims in key.dims]
        rows.append(f"| `{key.name}` | {' or '.join(shapes)} | {key.kind} | {key.writer} | {key.readers} |")

    text = (ROOT / "docs" / "dataflow.md").read_text()

    assert [row for row in rows if row not in text] == []


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_relative_links_lead_somewhere(path):
    targets = [
        link for link in LINK.findall(path.read_text()) if not link.startswith(("http://", "https://"))
    ]

    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_files_of_the_repository_are_there(path):
    named = set(REPOSITORY_FILE.findall(path.read_text()))

    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("path", [path for path in DOCS if path.stem != "log"], ids=name_of)
def test_commands_have_the_names_that_they_are_installed_by(path):
    shown = "\n".join([*blocks(path, "bash"), *blocks(path, "shell")])

    assert SCRIPT.findall(shown) == []


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_every_option_that_is_named_exists(path):
    entries = [*walk_options(PPOConfig), *walk_options(SFTConfig)]
    known = {entry.key for entry in entries}
    aliases = {e.key: f"{e.key.rpartition('.')[0]}.{e.info.alias}" for e in entries if e.info.alias}
    known |= {
        alias + key.removeprefix(name)
        for name, alias in aliases.items()
        for key in known
        if key == name or key.startswith(f"{name}.")
    }
    known |= set(VERL_KEYS.keys) if path.parent.name == "migration" else set()
    mappings = tuple(f"{entry.key}." for entry in entries if isinstance(entry.default, dict))
    named = {key for key in OPTION.findall(path.read_text()) if not key.endswith(".py")}

    assert sorted(key for key in named if key not in known and not key.startswith(mappings)) == []


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_every_make_target_that_is_named_exists(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))

    assert set(MAKE_TARGET.findall(path.read_text())) - targets == set()


def test_make_help_lists_each_target_in_a_group():
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    groups = [group.splitlines() for group in shown.strip().split("\n\n")]
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split()

    assert sorted(line.split()[0] for _, *targets in groups for line in targets) == sorted(phony)
    assert all(not title.startswith(" ") and len(targets) <= 12 for title, *targets in groups)


@pytest.mark.parametrize(
    "path",
    [README, *(pytest.param(path, marks=pytest.mark.nightly("docs", "verl/config")) for path in DOCS[1:])],
    ids=name_of,
)
def test_example_commands_pass_a_dry_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    commands = [
        shlex.split(line)
        for body in blocks(path, "bash")
        for line in body.splitlines()
        if line.startswith("bash examples/") and "old/" not in line  # a folder of the user's
    ]
    for _, script, *arguments in commands:
        overrides = [argument for argument in arguments if "=" in argument]  # not a script's own, a folder
        assert set(dry_run(ROOT / script, tmp_path, *overrides)) == {0}, capsys.readouterr().err


def test_the_readmes_own_files_work(tmp_path, monkeypatch, capsys):
    named = re.compile(r"(?:# |\{# )((?:reward\.py|prompt\.jinja|run\.yaml))\b")
    for _, body in CODE_BLOCK.findall(README.read_text()):
        if match := named.match(body):
            (tmp_path / match[1]).write_text(body)
    (row,) = re.findall(r'`(\{"problem": .*?\})`', README.read_text())
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / name).write_text(f"{row}\n" * 64)  # the prompts of a step
    monkeypatch.chdir(tmp_path)

    assert main(["config=run.yaml", "--dry-run"]) == 0, capsys.readouterr().err
    template = ImmutableSandboxedEnvironment().from_string((tmp_path / "prompt.jinja").read_text())
    assert template.render(content="2 + 3?").startswith("2 + 3? Think")
    reward = load_reward_function("reward.py:compute_score")
    scores = reward.score([{"response": response, "ground_truth": "5"} for response in (*RIGHT, *WRONG)])
    assert [one["overall"] for one in scores] == [1.0] * len(RIGHT) + [0.0] * len(WRONG)


def test_every_reward_function_in_the_docs_scores(tmp_path):
    bodies = [
        body for body in blocks(ROOT / "docs" / "data_and_rewards.md", "python") if "REWARD_TYPE" in body
    ]
    types = []
    for body in bodies:
        file = tmp_path / "reward.py"
        file.write_text(body)
        reward = load_reward_function(f"{file}:compute_score")
        answers = ("5", "4", "25")  # as text, 5 is in 25
        right, *wrong = reward.score([{"response": answer, "ground_truth": "5"} for answer in answers])
        assert right["overall"] > max(score["overall"] for score in wrong)
        types.append(reward.reward_type)
    assert types == ["batch", "sequential", "sequential", "dataproto"]


@cache
def source_texts():
    """Every string of the source, with `...` where a value is put in."""
    texts = []
    for path in source_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_every_message_that_is_explained_is_one_that_the_source_has():
    messages = MESSAGE.findall((ROOT / "docs" / "troubleshooting.md").read_text())
    pieces = [
        piece.strip() for message in messages for piece in message.replace("\\`", "`").split("...") if piece
    ]

    assert len(messages) >= 10
    assert [piece for piece in pieces if not any(piece in text for text in source_texts())] == []


def test_nothing_names_a_path_of_the_machine_it_was_written_on():
    files = [
        path for pattern in SHIPPED for folder in FOLDERS for path in source_files(ROOT / folder, pattern)
    ]
    files += [path for pattern in SHIPPED for path in ROOT.glob(pattern) if path.is_file()]

    found = [str(path.relative_to(ROOT)) for path in set(files) if MACHINE_PATH.search(path.read_text())]

    assert sorted(found) == []
