# SPDX-License-Identifier: Apache-2.0
import pytest

from verl.workers.rollout.vllm import vllm_import


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.32.1rc1.dev5+cpu"])
def test_supported_versions_are_accepted(version):
    vllm_import.check_version(version)


@pytest.mark.parametrize("version", ["0.25.2", "0.33.0", "1.0.0"])
def test_other_versions_are_refused_with_an_install_command(version):
    with pytest.raises(
        RuntimeError, match=rf"vLLM {version} is not supported.*pip install 'vllm>=0\.26,<0\.33'"
    ):
        vllm_import.check_version(version)


def test_the_environment_keeps_the_users_values_except_for_multiprocessing(monkeypatch):
    monkeypatch.setattr(vllm_import.os, "environ", environ := {"VLLM_LOGGING_LEVEL": "DEBUG"})
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    environ["RANK"] = "3"

    vllm_import.set_environment("cpu")

    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert (environ["RANK"], environ["LOCAL_RANK"]) == ("3", "0")
