# SPDX-License-Identifier: Apache-2.0
import pytest

from verl.utils.host_memory import available_bytes, container_limit


@pytest.fixture
def meminfo(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  4000 kB\nMemFree:  10 kB\nMemAvailable:  3000 kB\n")
    return file


def test_without_a_container_it_is_what_the_machine_has_left(meminfo, tmp_path):
    assert available_bytes(meminfo, tmp_path) == 3000 * 1024


def test_a_container_leaves_its_limit_less_what_it_holds(meminfo, tmp_path):
    (tmp_path / "memory.max").write_text("2000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 300000\n")

    assert container_limit(tmp_path) == 2000000
    assert available_bytes(meminfo, tmp_path) == 2000000 - (900000 - 300000)


def test_a_container_without_limit_counts_for_nothing(meminfo, tmp_path):
    (tmp_path / "memory.max").write_text("max\n")

    assert container_limit(tmp_path) is None
    assert available_bytes(meminfo, tmp_path) == 3000 * 1024
