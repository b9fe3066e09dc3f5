# SPDX-License-Identifier: Apache-2.0
"""The files of docs/extensions.md pass their checks and do what the page says; a run uses all of them."""

import csv
import json
import re

import pytest
import torch

from tests.helpers.extensions import minimal_arguments
from tests.helpers.quickstart import make_folder
from tests.helpers.training import ROOT, quickstart_arguments, read_metrics, start_training
from verl.algorithms.advantage_types import AdvantageInputs
from verl.algorithms.policy_loss_types import PolicyLossInputs
from verl.algorithms.token_selection import SelectionInputs, selection_of
from verl.config.model import OptimConfig
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config, walk_options
from verl.logger.base import Run
from verl.logger.tracker import Tracker
from verl.models.families.registry import TYPES
from verl.optim.build import build_optimizer
from verl.optim.schedules import build_scheduler
from verl.trainer.extensions.checks import KINDS, check_extensions
from verl.utils.registry import Registry

PAGE = (ROOT / "docs" / "extensions.md").read_text()
SECTIONS = dict(re.findall(r"^## (An? .+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))
FILE = re.compile(r"```python\n(# (\w+\.py)\n.*?)```", re.DOTALL)
SETTING = re.compile(r"`((?:algorithm|data|worker|trainer)[\w.]+=\S+\.py:\w+\]?)`")
SETTINGS = {title: SETTING.findall(body) for title, body in SECTIONS.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with all files of the page."""
    folder = tmp_path_factory.mktemp("extensions")
    for content, name in FILE.findall(PAGE):
        (folder / name).write_text(content)
    return folder


@pytest.fixture
def own(files):
    """Return what `file.py:NAME` of the page is."""
    return lambda spec: Registry("an option")[f"{files}/{spec}"]


@pytest.fixture(autouse=True)
def restored_families():
    saved = dict(TYPES)
    yield
    TYPES.clear()
    TYPES.update(saved)


def test_the_page_has_one_file_and_one_setting_for_each_kind():
    kinds = {entry.key: entry.info.extension for entry in walk_options(PPOConfig)}
    named = [kinds[setting.partition("=")[0]] for (setting,) in SETTINGS.values()]

    assert sorted(named) == sorted(KINDS)
    assert all(
        name in SETTINGS[title][0] for title, body in SECTIONS.items() for _, name in FILE.findall(body)[:1]
    )
    linked = re.findall(r"^\| \[(.+?)\]\(#", PAGE, flags=re.MULTILINE)
    assert [title[0].lower() + title[1:] for title in SECTIONS] == linked


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Arguments whose model and rows are there: a data set is checked with its first row."""
    folder = make_folder(tmp_path_factory.mktemp("questions"))
    return [
        *minimal_arguments(folder),
        f"worker.actor.model.model_path={folder / 'model'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'val.jsonl'}",
        "data.prompt_key=problem",
    ]


@pytest.mark.parametrize("title", SECTIONS)
def test_the_file_of_a_section_passes_its_check(title, files, arguments, monkeypatch):
    monkeypatch.chdir(files)
    (setting,) = SETTINGS[title]

    check_extensions(load_config(PPOConfig, [*arguments, setting]))


def test_the_config_of_the_page_is_accepted(files, tmp_path, monkeypatch):
    monkeypatch.chdir(files)
    (config,) = re.findall(r"```yaml\n(# run.yaml\n.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "run.yaml").write_text(config)

    check_extensions(load_config(PPOConfig, [f"config={tmp_path}/run.yaml", *minimal_arguments(tmp_path)]))


def test_the_needs_of_the_page_are_those_of_the_config():
    from verl.config.algorithm import ESTIMATOR_NEEDS

    assert re.findall(r'^\| `"(\w+)"`', PAGE, flags=re.MULTILINE) == list(ESTIMATOR_NEEDS)


def test_the_estimator_subtracts_the_median_of_its_group(own):
    rewards = torch.tensor([[0.0, 1.0], [0.0, 2.0], [9.0, 0.0]])  # returns 1, 2, 9
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])

    found = own("group_median.py:group_median")(
        AdvantageInputs(rewards, mask, group_ids=torch.tensor([0, 0, 0]))
    )

    assert found.advantages.tolist() == [[-1, -1], [0, 0], [7, 0]]


def test_the_loss_has_the_gradient_of_the_policy_gradient_at_ratio_one(own):
    log_probs = torch.zeros(1, 2, requires_grad=True)
    mask, advantages = torch.tensor([[1, 0]]), torch.tensor([[3.0, 5.0]])

    loss = own("soft_clip.py:soft_clip")(PolicyLossInputs(log_probs, torch.zeros(1, 2), advantages, mask))
    loss.per_token.sum().backward()

    assert loss.per_token.tolist() == [[0, 0]] and log_probs.grad.tolist() == [[-3, 0]]


def test_the_loss_that_selects_halves_the_gradient_of_the_selected_tokens(own, files, tmp_path):
    spec = f"{files}/confident.py:leave_confident"
    check_extensions(load_config(PPOConfig, [*minimal_arguments(tmp_path), f"worker.actor.loss_type={spec}"]))
    loss = own("confident.py:leave_confident")
    old = torch.tensor([[-3.0, -2.0, -1.0]])
    tokens = SelectionInputs(*old, *old, *old, torch.zeros(3).long(), torch.arange(3), seed=0)
    selected = selection_of(spec, loss)(tokens)
    log_probs = old.clone().requires_grad_()
    inputs = PolicyLossInputs(log_probs, old, torch.ones(1, 3), torch.ones(1, 3).long(), selected[None])

    loss(inputs).per_token.sum().backward()

    assert selected.tolist() == [False, False, True]
    assert log_probs.grad.tolist() == [[-1.0, -1.0, -0.5]]


def test_the_kl_is_quadratic_near_zero_and_linear_far_away(own):
    assert own("huber.py:huber")(torch.tensor([0.5, -4.0])).tolist() == [0.125, 3.5]


def test_the_schedule_restarts_four_times(own, files):
    config = OptimConfig(lr=2.0, lr_scheduler_type=f"{files}/warm_restarts.py:warm_restarts")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    scheduler = build_scheduler(optimizer, config, training_steps=16)
    rates = []
    for _ in range(8):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()

    quarter = [2.0, 1 + 2**-0.5, 1.0, 1 - 2**-0.5]
    assert rates == pytest.approx(quarter * 2)


def test_the_optimizer_steps_by_the_sign(files):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    config = OptimConfig(lr=0.1, strategy=f"{files}/lion.py:lion", weight_decay=0.0)
    optimizer = build_optimizer(model, config)

    model(torch.tensor([[3.0, -0.2]])).sum().backward()
    optimizer.step()

    assert model.weight.tolist()[0] == pytest.approx([0.9, 1.1])


def test_the_logger_writes_a_table(files, tmp_path):
    with Tracker([f"{files}/metrics_table.py:MetricsTable"], Run("p", "e", tmp_path)) as tracker:
        tracker.log({"reward/overall": 0.5}, step=1)

    assert (tmp_path / "metrics.csv").read_text().split() == ["1,reward/overall,0.5"]


@pytest.mark.slow  # two runs; each file passes its check in every suite
@pytest.mark.heavy
def test_one_run_uses_every_file_of_the_page_and_resumes(files, tmp_path):
    folder = make_folder(tmp_path / "data", "qwen2_5_vl", train=12)
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["model_type"] == "qwen2_5_vl"
    config |= {"model_type": "my_vl", "architectures": ["MyVL"]}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    # In one file a row's answer is longer than the dataset accepts.
    lines = (folder / "train.jsonl").read_text().splitlines()
    long = json.loads(lines[0]) | {"answer": "a color that has a long name"}
    (folder / "train.jsonl").write_text("\n".join([*lines, json.dumps(long)]) + "\n")
    loggers = f"trainer.logger=[file,{files}/metrics_table.py:MetricsTable]"
    # A run takes one of tools, an environment and an agent, and tests/trainer has runs of each.
    used = [setting for (setting,) in SETTINGS.values() if "[" not in setting and "multi_turn" not in setting]
    own = [setting.replace("=", f"={files}/", 1) for setting in used]
    output = tmp_path / "run"
    arguments = [
        *quickstart_arguments(folder, folder / "model", *own, loggers),
        *("algorithm.disable_kl=false", "algorithm.use_kl_loss=true", "trainer.val_freq=-1"),
        *("trainer.val_before_train=false", "trainer.save_freq=3", f"trainer.save_checkpoint_path={output}"),
    ]

    first = start_training(*arguments, "trainer.max_steps=3")
    assert first.returncode == 0, first.stderr[-6000:]
    (files / "soft_clip.py").write_text((files / "soft_clip.py").read_text() + "# changed\n")
    second = start_training(*arguments, "trainer.max_steps=4")
    assert second.returncode == 0, second.stderr[-6000:]

    metrics = read_metrics(output)
    assert sorted(metrics) == [1, 2, 3, 4]
    assert all({"actor/far", "actor/kl_loss"} <= entry.keys() for entry in metrics.values())
    rates = [metrics[step]["actor/lr"] for step in (1, 2, 3)]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.25e-3])  # a third of four periods for each step
    table = list(csv.reader((output / "metrics.csv").open()))
    assert {int(step) for step, _, _ in table} == {1, 2, 3, 4}
    assert "rows=12" in first.stderr  # without the long answer
    assert re.search(r"cut off: \d+ of \d+ responses", first.stdout + first.stderr)
    assert "a file of the run changed since the checkpoint" in second.stderr
    assert f"({files}/soft_clip.py:soft_clip)" in second.stderr
