# SPDX-License-Identifier: Apache-2.0
import logging

import pytest

from verl.utils.rank_logger import get_logger


def test_rank_zero_speaks_and_the_others_do_not(capsys, monkeypatch):
    logger = get_logger("verl.tests.some_module")
    monkeypatch.delenv("RANK", raising=False)  # an engine of an earlier test may have set it

    logger.info("outside of a group: x=%d", 1)
    monkeypatch.setenv("RANK", "0")
    logger.info("on rank zero")
    monkeypatch.setenv("RANK", "3")
    logger.warning("on rank three")

    printed = capsys.readouterr().err
    assert "INFO verl.tests.some_module: outside of a group: x=1\n" in printed
    assert "INFO [rank 0] verl.tests.some_module: on rank zero\n" in printed
    assert "three" not in printed


def test_all_ranks_speak_with_their_rank_when_asked_to(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")

    get_logger("verl.tests.other_module", all_ranks=True).info("hello")

    assert "[rank 3] verl.tests.other_module: hello\n" in capsys.readouterr().err


def test_every_line_is_written_once(capsys):
    for _ in range(3):
        logger = get_logger("verl.tests.third_module")

    logger.info("hello")

    assert capsys.readouterr().err.count("hello") == 1


def test_debug_lines_are_silent_by_default(capsys):
    get_logger("verl.tests.fourth_module").debug("hello")

    assert capsys.readouterr().err == ""


def test_the_level_is_read_from_the_environment_and_checked(monkeypatch):
    root = logging.getLogger("verl")
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "debug")
    get_logger("verl.tests.fifth_module")
    assert root.level == logging.DEBUG

    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "loud")
    with pytest.raises(ValueError, match=r"`VERL_LOGGING_LEVEL` must be one of .*, got 'LOUD'"):
        get_logger("verl.tests.fifth_module")
    root.setLevel(level)
