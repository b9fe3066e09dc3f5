# SPDX-License-Identifier: Apache-2.0
"""An option takes a function of a file, which is parsed and never run, and whose needs rules read."""

import subprocess
import sys

import pytest

from tests.helpers.extensions import minimal_arguments
from verl.config.files.paths import declared_needs
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, load_config
from verl.config.text import help_text

FILE = """\
raise RuntimeError("this file must not be run by a config")


@needs("values", "group")
def with_critic(inputs): ...


def plain(inputs): ...


class Own: ...


family = Own()
"""


@pytest.fixture
def minimal(tmp_path):
    return minimal_arguments(tmp_path)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return path


def problems(arguments):
    with pytest.raises(ConfigError) as raised:
        load_config(PPOConfig, arguments)
    return raised.value.problems


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("algorithm.adv_estimator", "plain"),
        ("algorithm.kl_penalty", "plain"),
        ("worker.actor.loss_type", "plain"),
        ("worker.actor.optim.strategy", "plain"),
        ("worker.actor.optim.lr_scheduler_type", "plain"),
        ("worker.rollout.name", "Own"),
        ("data.dataset", "Own"),
        ("worker.actor.model.family", "family"),
    ],
)
def test_an_option_takes_a_name_of_a_file_and_makes_its_path_absolute(
    option, name, file, minimal, monkeypatch
):
    monkeypatch.chdir(file.parent)
    config = load_config(PPOConfig, [*minimal, f"{option}=./own.py:{name}"])

    value = config
    for part in option.split("."):
        value = getattr(value, part)
    assert value == f"{file}:{name}"


def test_loggers_may_be_names_and_classes_of_files_together(file, minimal):
    config = load_config(PPOConfig, [*minimal, f"trainer.logger=[console,{file}:Own]"])

    assert config.trainer.logger == ("console", f"{file}:Own")


def test_a_misspelt_name_lists_the_names_of_the_file_and_suggests_one(file, minimal):
    (problem,) = problems([*minimal, f"worker.actor.loss_type={file}:plainn"])

    assert problem == (
        f"`worker.actor.loss_type`: {file} defines no 'plainn'; it defines ['with_critic', 'plain', 'Own'];"
        f" did you mean `{file}:plain`?"
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{file}", "must name a function or class of {file}: `{file}:NAME` with one of"),
        ("{file}x:plain", "must be one of ["),
        ("{folder}/none.py:plain", ": no file {folder}/none.py"),
        ("plainn", "must be one of ["),
    ],
)
def test_what_is_no_name_of_a_file_is_an_error_of_the_option(value, said, file, minimal):
    names = {"file": file, "folder": file.parent}
    (problem,) = problems([*minimal, "worker.actor.loss_type=" + value.format(**names)])

    assert problem.startswith("`worker.actor.loss_type`") and said.format(**names) in problem


def test_a_file_that_is_not_python_is_told_with_its_line(file, minimal):
    file.write_text("def plain(:\n")

    (problem,) = problems([*minimal, f"worker.actor.loss_type={file}:plain"])

    assert problem == f"`worker.actor.loss_type`: {file}, line 1: invalid syntax"


def test_an_option_without_built_in_names_takes_only_files(minimal):
    assert problems([*minimal, "data.dataset=rows"]) == ["`data.dataset` must be `file.py:NAME`, got 'rows'"]


def test_rules_about_estimators_follow_the_declared_needs(file, minimal):
    estimator = f"{file}:with_critic"
    found = problems([*minimal, f"algorithm.adv_estimator={estimator}", "worker.rollout.n=1"])

    assert any("`worker.critic.model.model_path` must be set" in one for one in found)
    assert any("`worker.rollout.n` must be at least 2" in one and estimator in one for one in found)
    plain = load_config(PPOConfig, [*minimal, f"algorithm.adv_estimator={file}:plain", "worker.rollout.n=1"])
    assert not plain.algorithm.use_critic and not plain.algorithm.use_prime


def test_prime_runs_with_an_estimator_of_a_file(file, minimal):
    file.write_text('@verl.needs("process_rewards")\ndef own(inputs): ...\n')
    config = load_config(PPOConfig, [*minimal, f"algorithm.adv_estimator={file}:own"])

    assert config.algorithm.use_prime and "prime" in config.trained_roles


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('@needs("value")', "must declare needs among ['group', 'values'"),
        ("@needs(*NAMES)", "takes plain text, because the file is not run when a config is read; got *NAMES"),
        (
            '@needs("reward_components", "process_rewards")',
            "must not need both `reward_components` and `process_rewards`",
        ),
    ],
)
def test_needs_that_mean_nothing_are_problems(line, said, file, minimal):
    file.write_text(f"{line}\ndef own(inputs): ...\n")
    keys = "algorithm.gdpo_reward_keys=[accuracy]"

    found = problems([*minimal, keys, f"algorithm.adv_estimator={file}:own"])

    assert any(said in one for one in found), found


def test_needs_are_read_from_the_decorator(file):
    assert declared_needs(f"{file}:with_critic") == {"values", "group"}
    assert declared_needs(f"{file}:plain") == frozenset()


def test_the_help_says_that_a_file_is_accepted():
    assert "sppo, or FILE.py:NAME" in help_text(PPOConfig, "worker.actor.loss_type")


def test_a_dry_run_does_not_run_the_file(file, minimal):
    code = "import sys; from verl.trainer.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = [*minimal, f"algorithm.adv_estimator={file}:plain", "--dry-run"]

    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert f"adv_estimator: {file}:plain" in done.stdout.replace('"', "")
