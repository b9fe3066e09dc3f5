# SPDX-License-Identifier: Apache-2.0
import sys

import pytest

from verl.utils.registry import Registry, needs


def test_a_registered_function_is_found_by_name_and_unchanged():
    losses = Registry("worker.actor.loss_type")

    @losses.register("plain")
    def plain():
        return 1

    assert losses["plain"] is plain and plain() == 1
    assert losses.names() == ["plain"] and "plain" in losses


def test_an_unknown_name_lists_the_known_ones_and_names_the_option():
    losses = Registry("worker.actor.loss_type")
    losses.register("b")(print)
    losses.register("a")(print)

    with pytest.raises(ValueError, match=r"`worker.actor.loss_type` must be one of \['a', 'b'\], got 'c'"):
        losses["c"]


def test_a_name_is_registered_once():
    losses = Registry("worker.actor.loss_type")
    losses.register("a")(print)

    with pytest.raises(ValueError, match="'a' is registered twice"):
        losses.register("a")(len)


def test_a_name_may_be_a_function_of_a_file_which_is_run_once(tmp_path):
    losses = Registry("worker.actor.loss_type")
    path = tmp_path / "own.py"
    path.write_text("from helper_of_own import two\n\n\ndef own():\n    return two\n")
    (tmp_path / "helper_of_own.py").write_text("two = 2\n")

    own = losses[f"{path}:own"]

    assert own() == 2 and losses[f"{path}:own"] is own
    assert sys.modules[own.__module__].own is own  # pickle finds it
    assert f"{path}:own" not in losses and losses.names() == []


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path):
    losses = Registry("worker.actor.loss_type")
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "own.py").write_text(f"def own():\n    return {number}\n")
    found = [losses[f"{tmp_path}/{number}/own.py:own"] for number in (1, 2)]

    assert [function() for function in found] == [1, 2]
    assert len({function.__module__ for function in found}) == 2


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        (None, "own", "`worker.actor.loss_type`: no file .* on this node: with several nodes, it must be in"),
        ("def own(): ...\n", "other", "`worker.actor.loss_type`: .*file.py defines no 'other'"),
        (
            "1 / 0\n",
            "own",
            "`worker.actor.loss_type`: importing .*file.py failed: ZeroDivisionError.*file.py:1",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_of_the_option(content, name, said, tmp_path):
    path = tmp_path / "file.py"
    if content is not None:
        path.write_text(content)

    with pytest.raises((ValueError, FileNotFoundError), match=said):
        Registry("worker.actor.loss_type")[f"{path}:{name}"]


def test_needs_leave_a_function_as_it_is():
    @needs("group", "values")
    def own():
        return 3

    assert own() == 3 and own.needs == {"group", "values"}
