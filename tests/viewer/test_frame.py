# SPDX-License-Identifier: Apache-2.0
"""The page's frame and curves in headless Chromium: address, colors, widths, axes, smoothing."""

import json
import math
import re
from itertools import combinations
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import expect

from tests.helpers.browser import wait_until
from tests.helpers.demo_runs import write_run
from tests.helpers.rollouts import write_steps
from tests.helpers.viewer import viewer
from verl.logger.base import Run
from verl.logger.file import FileLogger

pytestmark = pytest.mark.browser

RUNS = ("lr-1e-6", "lr-2e-6")
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_run(folder / RUNS[0], seed=1, best=0.78, pace=30)
    write_run(folder / RUNS[1], seed=2, best=0.93, pace=18, worker__actor__optim__lr=2e-6)
    write_steps(folder / RUNS[0], range(1, 3))
    with viewer(folder) as found:
        yield found


def chart_of(page, name):
    return page.locator(f'.area figure[data-title="{name}"]').first


def parameters(page):
    return parse_qs(urlsplit(page.url).fragment.partition("?")[2])


def log(folder, *steps):
    """A run with these metrics at steps 1, 2, ..."""
    logger = FileLogger(Run("demo", folder.name, folder))
    for step, metrics in enumerate(steps, start=1):
        logger.log(metrics, step)


def tick_texts(page, address, wanted):
    """Labels of the axes of all charts, as they are drawn: canvases have no text to read."""
    page.add_init_script(
        """const drawn = {}; window.drawn = drawn;
        const fill = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
            const title = this.canvas.closest("figure")?.dataset.title ?? "new";
            (drawn[title] ??= []).push([text, x - this.measureText(text).width, this.textAlign]);
            return fill.apply(this, arguments);
        };"""
    )
    page.goto(f"{address}#curves?metric={wanted}")
    expect(page.locator("figure canvas").first).to_be_visible()
    page.wait_for_function("Object.keys(window.drawn).length > 0")
    drawn = None
    while drawn != (drawn := page.evaluate("window.drawn")):  # until no more is drawn
        page.wait_for_timeout(300)
    return drawn


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_fits_the_screen_in_light_and_dark(page, address, scheme, size):
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme)
    for view in ("curves", "runs", "rollouts"):
        page.goto(f"{address}#{view}")
        expect(page.locator("nav a.open")).to_have_text(view)
        page.wait_for_timeout(300)
        widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert widths == [width, width], view
        ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert brightness(ground) > 0.9 if scheme == "light" else brightness(ground) < 0.1
    page.goto(f"{address}#curves?smooth=0.6")
    expect(chart_of(page, "reward/overall").locator("canvas")).to_be_visible()
    page.wait_for_timeout(300)


def brightness(color):
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3 / 255


def test_colors_can_be_switched_and_the_choice_is_kept(page, address):
    page.emulate_media(color_scheme="light")
    page.goto(address)
    button = page.get_by_role("button", name="Colors")
    line = chart_of(page, "reward/overall").locator("canvas")
    expect(line).to_be_visible()
    light = line.evaluate("canvas => canvas.toDataURL()")
    for choice, is_dark in (("light", False), ("dark", True)):
        button.click()
        expect(button).to_have_attribute("title", f"Colors: {choice}")
        ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (brightness(ground) < 0.5) is is_dark
    page.wait_for_function("old => document.querySelector('figure canvas').toDataURL() !== old", arg=light)

    page.reload()
    expect(button).to_have_attribute("title", "Colors: dark")
    assert brightness(page.evaluate("getComputedStyle(document.documentElement).backgroundColor")) < 0.1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colors_of_lines_differ_from_each_other_and_from_the_ground(page, address, scheme):
    page.emulate_media(color_scheme=scheme)
    page.goto(address)
    expect(page.locator("header")).to_be_visible()
    names = [*(f"--color-{index}" for index in range(12)), "--surface"]
    *colors, ground = page.evaluate(
        """names => names.map(name => {
            document.body.style.color = `var(${name})`;
            return getComputedStyle(document.body).color.match(/\\d+/g).map(Number);
        })""",
        names,
    )

    assert min(contrast(color, ground) for color in colors) > 2.9  # WCAG asks for 3 of graphical objects
    assert min(math.dist(oklab(a), oklab(b)) for a, b in combinations(colors, 2)) > 0.11


def linear(color):
    return [((c / 255 + 0.055) / 1.055) ** 2.4 if c > 10 else c / 255 / 12.92 for c in color]


def contrast(one, other):
    dark, light = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def oklab(color):
    """A color in a space where distances are as large as they look."""
    r, g, b = linear(color)
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def test_ten_runs_have_ten_colors_which_follow_their_names(page, address):
    page.goto(address)
    names = [f"run-{number}" for number in range(10)]
    colors_of = "async names => (await import('/colors.js')).colorsOf(names)"
    colors, of_first, of_last = (page.evaluate(colors_of, some) for some in (names, names[:3], names[7:]))

    assert len(set(colors.values())) == 10
    assert page.evaluate(colors_of, names[::-1]) == colors
    assert of_first.items() <= colors.items()  # a run more changes nothing
    assert all(color.startswith("var(--color-") for color in of_last.values())


def test_the_address_keeps_the_view_through_reload_back_and_forward(page, address):
    page.goto(address)
    page.get_by_label(RUNS[0]).uncheck()
    page.get_by_role("button", name="time").click()
    page.get_by_label("log axis").check()
    page.locator("input[name=smooth]").fill("0.7")
    page.locator("input[name=metrics]").fill("reward")
    expect(page.locator("figure")).to_have_count(5)
    expected = {"run": [RUNS[1]], "x": ["time"], "y": ["log"], "smooth": ["0.7"], "metric": ["reward"]}
    wait_until(page, lambda: parameters(page) == expected)  # what is typed reaches the address when it pauses

    page.reload()
    expect(page.locator("figure")).to_have_count(5)
    assert not page.get_by_label(RUNS[0]).is_checked() and page.get_by_label(RUNS[1]).is_checked()
    assert page.locator("input[name=metrics]").input_value() == "reward"
    assert page.locator("input[name=smooth]").input_value() == "0.7"
    expect(page.get_by_role("button", name="time")).to_have_attribute("aria-pressed", "true")

    page.get_by_role("link", name="rollouts").click()
    expect(page.locator("nav a.open")).to_have_text("rollouts")
    assert not page.get_by_label(RUNS[0]).is_checked()
    page.go_back()
    expect(page.locator("nav a.open")).to_have_text("curves")
    assert parameters(page) == expected
    page.go_forward()
    expect(page.locator("nav a.open")).to_have_text("rollouts")
    page.go_back()
    page.go_back()  # before "log axis", which took what was typed afterwards into its entry
    expect(page.get_by_label("log axis")).not_to_be_checked()
    expect(page.get_by_role("button", name="time")).to_have_attribute("aria-pressed", "true")


def test_a_link_names_runs_so_that_other_folders_do_not_change_it(page, tmp_path):
    for name in ("b", "c"):
        write_run(tmp_path / name, steps=3)
    with viewer(tmp_path) as address:
        page.goto(f"{address}#curves?run=c")
        expect(page.locator(".chip")).to_have_count(2)
        color = page.get_by_role("checkbox", name="c", exact=True).evaluate(
            "box => getComputedStyle(box).accentColor"
        )
    write_run(tmp_path / "a", steps=3)
    with viewer(tmp_path) as address:
        page.goto(f"{address}#curves?run=c")
        expect(page.locator(".chip")).to_have_count(3)
        checked = page.locator(".chip input").evaluate_all("boxes => boxes.map(box => box.checked)")
        assert checked == [False, False, True]
        assert (
            page.get_by_role("checkbox", name="c", exact=True).evaluate(
                "box => getComputedStyle(box).accentColor"
            )
            == color
        )
        expect(page.locator(".legend span").first).to_have_text("c")


def test_axes_read_for_tiny_and_large_values_and_for_constants(page, tmp_path):
    values = {"tiny": (1e-7, 4e-7), "large": (2_500_000.0, 12_000_000.0), "close": (0.99990, 0.99993),
              "zero": (0.0, 0.0), "constant": (1024.0, 1024.0), "negative": (-3e-5, 2e-5)}  # fmt: skip
    log(tmp_path, *({f"x/{name}": pair[step] for name, pair in values.items()} for step in range(2)))
    with viewer(tmp_path) as address:
        drawn = tick_texts(page, address, "x/")

    assert {
        name: [text for text, _, align in texts if align == "right"] for name, texts in drawn.items()
    } == {
        "x/tiny": ["1e-7", "2e-7", "3e-7", "4e-7"],
        "x/large": ["2.5M", "5.0M", "7.5M", "10.0M", "12.5M"],
        "x/close": ["0.99990", "0.99991", "0.99992", "0.99993"],
        "x/zero": ["-1.0", "-0.5", "0", "0.5", "1.0"],
        "x/constant": ["800", "1000", "1200"],
        "x/negative": ["-2e-5", "0", "2e-5"],
    }
    for texts in drawn.values():
        assert [text for text, _, align in texts if align == "center"] == ["1", "2"]  # steps are whole
        assert all(left >= 0 for _, left, _ in texts)  # none is cut


def test_smoothing_draws_the_average_over_the_faint_values(page, address, tmp_path):
    log(tmp_path, *({"reward/overall": float(value)} for value in (0, 1, 0, 1)))
    with viewer(tmp_path) as one:
        page.goto(f"{one}#curves?smooth=0.5")
        last = chart_of(page, "reward/overall").locator(".legend output")
        # Weights 1, 1/2, 1/4, 1/8 of 1, 0, 1, 0: 1.25 of 1.875.
        expect(last).to_have_text("0.6667")
        page.locator("input[name=smooth]").fill("0")
        expect(last).to_have_text("1")


def test_the_cursor_shows_the_values_of_its_step(page, tmp_path):
    log(tmp_path, *({"reward/overall": value} for value in (0.25, 0.5, 0.75)))
    with viewer(tmp_path) as address:
        page.goto(address)
        chart = chart_of(page, "reward/overall")
        expect(chart.locator(".legend output")).to_have_text("0.75")
        over = chart.locator(".u-over").bounding_box()
        page.mouse.move(over["x"] + over["width"] / 2, over["y"] + 40)
        expect(chart.locator(".legend output")).to_have_text("0.5")
        expect(chart.locator(".legend .place")).to_have_text("step 2")


def test_a_log_axis_says_what_it_leaves_out(page, tmp_path):
    log(tmp_path, *({"reward/overall": value} for value in (0.0, 0.001, 0.1, -1.0)))
    with viewer(tmp_path) as address:
        page.goto(f"{address}#curves?y=log")
        expect(chart_of(page, "reward/overall")).to_contain_text("2 values up to 0 not shown")


def test_areas_are_closed_but_for_the_key_metrics_and_phases_and_the_address_keeps_open_ones(page, address):
    page.goto(address)
    expect(page.locator(".area h2")).to_have_text(
        [
            re.compile(area)
            for area in ("Key", "Reward", "Validation", "Length", "Policy", "Engine", "Speed", "Seconds")
        ]
    )
    assert page.locator("[data-area='Key metrics'] figure").count() == 9
    assert page.locator("[data-area=Policy] figure").count() == 0
    page.get_by_role("button", name="Policy").click()
    expect(page.locator("[data-area=Policy] figure")).to_have_count(6)
    page.reload()
    expect(page.locator("[data-area=Policy] figure")).to_have_count(6)
    page.get_by_role("button", name="Policy").click()
    expect(page.locator("[data-area=Policy] figure")).to_have_count(0)


def test_twelve_phases_have_twelve_colors_which_are_the_same_in_every_run(page, address):
    page.goto(address)
    charts = [page.locator(f'figure[data-title="time of {name}"]') for name in RUNS]
    found = []
    for chart in charts:
        expect(chart.locator(".legend span")).to_have_count(12)
        names = chart.locator(".legend span").all_text_contents()
        colors = chart.locator(".legend i").evaluate_all(
            "all => all.map(i => getComputedStyle(i).backgroundColor)"
        )
        assert len(set(colors)) == 12
        found.append(dict(zip(names, colors, strict=True)))
    assert found[0] == found[1]


def test_the_table_of_runs_sorts_by_any_column_and_shows_the_options_that_differ(page, address):
    page.goto(f"{address}#runs")
    names = page.locator(".overview tbody td:first-child")
    expect(names).to_have_text(list(RUNS))
    page.get_by_role("button", name="best validation").click()
    expect(names).to_have_text([RUNS[1], RUNS[0]])
    page.get_by_role("button", name="best validation").click()
    expect(names).to_have_text(list(RUNS))
    wait_until(page, lambda: parameters(page) == {"by": ["val"], "up": ["yes"]})

    options = page.locator(".options tbody tr")
    expect(options).to_have_text(
        [re.compile("trainer.experiment_name"), re.compile("worker.actor.optim.lr.*1e-06.*2e-06")]
    )
    page.locator("input[name=all]").check()
    expect(options).to_have_count(8)
    page.locator("input[name=option]").fill("rollout")
    expect(options).to_have_count(2)
    page.reload()
    expect(options).to_have_count(2)


def test_metrics_are_downloaded_for_the_selected_runs(page, address):
    page.goto(f"{address}#runs?run={RUNS[1]}")
    with page.expect_download() as found:
        page.get_by_role("link", name="CSV").click()
    lines = Path(found.value.path()).read_text().splitlines()

    assert found.value.suggested_filename == "metrics.csv"
    assert len(lines) == 1 + 121 and all(line.startswith(f"{RUNS[1]},") for line in lines[1:])


def test_a_note_is_kept_in_the_run_and_shown_as_text(page, tmp_path):
    hostile = "<img src=x onerror='window.hacked = 1'>"
    for name in ("a", "b"):
        write_run(tmp_path / name, steps=3)
    with viewer(tmp_path) as address:
        page.goto(f"{address}#runs")
        card = page.locator(".card[data-run=b]")
        card.locator("textarea").fill(hostile)
        card.locator("input[name=tags]").fill(f"keep, {hostile}")
        card.get_by_role("button", name="Save").click()
        expect(page.locator(".overview tbody tr").nth(1).locator(".tag")).to_have_text(["keep", hostile])
        expect(card.get_by_role("button", name="Save")).to_have_count(0)
        page.reload()
        assert card.locator("textarea").input_value() == hostile
        assert page.locator(".card[data-run=a] textarea").input_value() == ""
        assert page.evaluate("window.hacked") is None

    assert json.loads((tmp_path / "b/notes.json").read_text()) == {"note": hostile, "tags": ["keep", hostile]}
    assert not (tmp_path / "a/notes.json").exists()
