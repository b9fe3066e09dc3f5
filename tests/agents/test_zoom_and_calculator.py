# SPDX-License-Identifier: Apache-2.0
"""The shipped tools that need nothing but this process."""

import io

import pytest
from PIL import Image

from tests.agents.test_tool_pool import ask
from verl.agents.interface import CallRefusedError
from verl.agents.tools.shipped.calculator import calculator
from verl.agents.tools.shipped.zoom import Zoom
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(17.5 - 3) * 2**10 / sqrt(2)", "10499.1214871"),
        ("2^100", "1267650600228229401496703205376"),
        ("7 // 2 - -3 % 5", "1"),
        ("6 \u00f7 4 \u00d7 2 \u2212 1", "2"),
        ("factorial(20)", "2432902008176640000"),
        ("max(1, 2, round(2.6))", "3"),
        ("sin(pi / 2)", "1"),
        ("0.1 + 0.2", "0.3"),
        ("0.1 + 0.1 - 0.05", "0.15"),
        ("round(5, -10**12) + round(2.675, 2) + round(7, 10**12)", "9.67"),
    ],
)
def test_the_calculator_computes(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("9**9**9", "too large"),
        ("factorial(100000)", "small whole number"),
        ("10**4000 * 10**4000", "too large"),
        ("__import__('os').getpid()", "is not arithmetic"),
        ("pi.real", "is not arithmetic"),
        ("'a' * 10", "is not arithmetic"),
        ("x + 1", "'x' is not arithmetic; known are pi"),
        ("1 +", "not an arithmetic expression: invalid syntax"),
        ("(-8) ** 0.5", "is not real"),
        ("(" * 400 + "1" + ")" * 400, "not an arithmetic expression"),
        ("1" * 1001, "at most 1000 characters"),
        ("1 / 0", "division by zero"),
        ("10.0 ** 400", "not computed"),
        ("sqrt(-1)", "not computed"),
        ("sqrt()", "not computed"),
        ("round(2, 0.5)", "not computed"),
        ("2**16000", "not computed"),  # more digits than Python writes
    ],
)
def test_the_calculator_refuses_what_is_not_arithmetic_or_endless(expression, reason):
    with pytest.raises(CallRefusedError, match=reason):
        calculator(expression)


def quadrants(size=(40, 20)):
    """An image whose left half is red, and whose right half is green above blue."""
    image = Image.new("RGB", size, "red")
    image.paste("green", (size[0] // 2, 0, size[0], size[1] // 2))
    image.paste("blue", (size[0] // 2, size[1] // 2, size[0], size[1]))
    return image


def as_bytes(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def colors(image):
    return {color for _, color in image.getcolors()}


GREEN, BLUE = (0, 128, 0), (0, 0, 255)


@pytest.mark.parametrize(
    ("options", "box"),
    [
        ({}, [20, 0, 40, 10]),
        ({"units": "fractions"}, [0.5, 0, 1, 0.5]),
        ({"units": "thousandths"}, [500, 0, 1000, 500]),
        ({"max_pixels": 200}, [10, 0, 20, 5]),
        ({"min_pixels": 3200}, [40, 0, 80, 20]),
        ({}, [20, -7, 90, 10]),  # the part outside is cut off
    ],
)
def test_a_box_is_cropped_and_enlarged_in_any_units(options, box, tmp_path):
    path = tmp_path / "image.png"
    quadrants().save(path)
    zoom = Zoom(size=100, **options)

    for reference in (quadrants(), as_bytes(quadrants()), {"bytes": as_bytes(quadrants())}, str(path)):
        observation = zoom(zoom.create({"images": [reference]}), box)

        (part,) = observation.images
        assert (part.size, colors(part)) == ((100, 50), {GREEN})
    assert observation.text == "Image 2: this part of image 1."


def test_an_enlarged_part_can_be_enlarged_again():
    zoom = Zoom(size=100)
    images = zoom.create({"images": [Image.new("RGB", (9, 9)), quadrants()]})

    zoom(images, [20, 0, 40, 20], image=2)
    second = zoom(images, [0, 60, 100, 100], image=3)

    assert second.text == "Image 4: this part of image 3."
    assert colors(second.images[0]) == {BLUE}
    assert zoom.create({"images": [quadrants()]}) != images


def test_a_part_that_is_large_already_keeps_its_size():
    zoom = Zoom(size=10)

    assert zoom(zoom.create({"images": [quadrants()]}), [0, 0, 30, 20]).images[0].size == (30, 20)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"box": [0, 0, 1, 1], "image": 2}, "there is no image 2: there are 1"),
        ({"box": [0, 0, 1, 1], "image": 0}, "there is no image 0"),
        ({"box": [0, 0, 1]}, "a box has 4 edges"),
        ({"box": [9, 9, 5, 5]}, r"no area inside the image, whose width is 40 and height 20"),
        ({"box": [50, 0, 60, 9]}, "no area inside the image"),
        ({"box": [10**400, 0, 10**401, 9]}, "no area inside the image"),
        ({"box": [float("nan"), 0, float("-inf"), 9]}, "no area inside the image"),
    ],
)
def test_a_wrong_box_is_explained(call, reason):
    zoom = Zoom()

    with pytest.raises(CallRefusedError, match=reason):
        zoom(zoom.create({"images": [quadrants()]}), **call)


def test_a_box_that_no_vision_model_reads_is_refused():
    zoom = Zoom()

    with pytest.raises(ValueError, match="is too narrow"):
        zoom(zoom.create({"images": [Image.new("RGB", (2000, 9))]}), [0, 0, 2000, 1])


def test_options_of_zoom_are_checked():
    with pytest.raises(ValueError, match=r"`units` must be one of \['pixels', 'thousandths', 'fractions'\]"):
        Zoom(units="percent")


def test_a_mistake_of_the_policy_is_an_answer_and_no_failure_of_the_tool():
    with ToolPool(MultiTurnConfig(enable=True, tools=("calculator",))) as pool:
        pool.start("a", {})
        (answer,) = ask(pool, "a", ("calculator", {"expression": "1 / 0"}))

    assert answer.text == "not computed: division by zero" and not answer.failed
