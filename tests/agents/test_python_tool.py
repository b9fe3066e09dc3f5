# SPDX-License-Identifier: Apache-2.0
"""The python tool in the pool: a session for each conversation."""

from types import SimpleNamespace

import pytest

from tests.agents.test_tool_pool import ask, descendants, gone
from tests.helpers.media import image_bytes
from verl.agents.tools.shipped.python import Notebook, Python
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig
from verl.sandbox.outcome import Isolation
from verl.sandbox.runner import detect
from verl.sandbox.session import Cell

pytestmark = pytest.mark.skipif(
    detect()[0] is Isolation.NONE, reason="no isolation of programs works on this machine"
)


PICTURE = image_bytes(30, 20)


@pytest.fixture(scope="module")
def pool():
    kwargs = {"python": {"timeout_s": 5.0, "memory_mb": 1024}}
    with ToolPool(MultiTurnConfig(enable=True, tools=("python",), tool_kwargs=kwargs)) as pool:
        yield pool


def run(pool, key, code):
    (observation,) = ask(pool, key, ("python", {"code": code}))
    return observation


def test_variables_live_through_the_turns_of_one_conversation(pool):
    pool.start("a", {})
    pool.start("b", {})

    texts = [run(pool, key, code).text for key, code in [("a", "x = 6"), ("a", "x * 7"), ("b", "x")]]

    assert texts[:2] == ["(no output)", "42\n"]
    assert texts[2].endswith("NameError: name 'x' is not defined\n")


def test_a_figure_is_an_image(pool):
    pytest.importorskip("matplotlib")
    pool.start("figure", {})

    observation = run(pool, "figure", "from PIL import Image; Image.new('RGB', (3, 2))")

    assert (observation.text, len(observation.images)) == ("", 1)


def test_code_that_ends_its_program_loses_the_variables_and_is_no_failure_of_the_tool(pool):
    pool.start("c", {})
    run(pool, "c", "x = 1")

    ended = run(pool, "c", "import os; os._exit(1)")

    assert ended.text == "The code was ended: it ended its own process. All variables are lost."
    assert not ended.failed
    assert run(pool, "c", "2").text == "2\n"


def test_a_picture_that_is_too_large_is_refused(pool):
    pool.start("d", {})

    observation = run(pool, "d", "from PIL import Image; Image.new('1', (10_000, 10_000))")

    expected = (
        "The figures are lost: the code sent an image of 10000 x 10000 pixels, at most 67108864 pixels."
    )
    assert (observation.text, observation.failed) == (expected, False)


@pytest.mark.parametrize("image", [b"", b"no image", b"\x89PNG\r\n\x1a\n", PICTURE[:60]])
def test_figures_that_the_code_forged_are_no_failure_of_the_tool(image):
    session = SimpleNamespace(run=lambda code, max_images: Cell("printed", [image] * 30))
    notebook = Notebook(Python())
    notebook._session = session

    observation = notebook.run("code")

    assert observation.text.startswith("printed\nThe figures are lost: the code sent an image that cannot be")
    assert not observation.failed


def test_no_more_figures_are_taken_than_were_asked_for():
    notebook = Notebook(Python(max_images=2))
    notebook._session = SimpleNamespace(run=lambda code, max_images: Cell("", [PICTURE] * 30))

    assert [image.size for image in notebook.run("code").images] == [(30, 20)] * 2


def test_the_end_of_a_conversation_ends_its_program(pool):
    import os

    before = {*descendants(os.getpid())}
    pool.start("e", {})
    run(pool, "e", "1")
    programs = {*descendants(os.getpid())} - before
    assert len(programs) >= 4  # guardian, tool, launcher and program

    pool.end("e")

    assert gone(programs)


def test_options_are_checked_at_the_start():
    with pytest.raises(ValueError, match=r"Limits.memory_mb` must be positive"):
        Python(memory_mb=0)
