# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: headless Chromium, driven by playwright, with the command's server."""

import re
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from playwright.sync_api import expect

from tests.helpers.browser import wait_until
from tests.helpers.rollouts import rollout, with_media, write_log, write_steps
from tests.helpers.viewer import ROOT, viewer
from verl.viewer.rollout_store import RolloutStore

pytestmark = pytest.mark.browser

HOSTILE = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
HUGE = HOSTILE + "\x00\x1b[31m\ufffd\u202e" + "long " * 200_000
LOAD_S = 3.0  # limit for 100,000 rollouts


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Two runs that differ in their rewards; the second has media and a hostile step."""
    folder = tmp_path_factory.mktemp("project")
    write_log(folder / "first", range(1, 31))
    write_log(folder / "second", range(1, 21), offset=0.4)
    write_steps(folder / "first", range(1, 31))
    write_steps(folder / "second", range(1, 3), **with_media(folder / "second"))
    hostile = {"prompt": HUGE, "response": HUGE, "tokens": [HOSTILE] * 5000, "data_source": HOSTILE}
    lists = {name: [-1.0] * 5000 for name in ("rollout_log_probs", "old_log_probs", "advantages")}
    row = rollout(
        3, 0, 0, ground_truth=HOSTILE, finish_reason=HOSTILE, token_ids=[7] * 5000, **hostile, **lists
    )
    medium = {"kind": HOSTILE, "source": HOSTILE, "files": [], "problem": HOSTILE}
    row |= {"reward_values": {HOSTILE: 1.0}, "media": [medium], "num_media": 1}
    RolloutStore(folder / "second").write(3, [row | {"group": HOSTILE}])
    return folder


@pytest.fixture(scope="module")
def address(project):
    with viewer(project) as found:
        yield found


def total(page):
    return page.locator(".pager output")


def test_curves_of_both_runs_are_drawn_and_a_run_can_be_hidden(page, address):
    page.goto(address)

    chart = page.locator('figure[data-title="reward/overall"]')
    expect(chart.locator("canvas")).to_be_visible()
    expect(chart.locator(".legend span")).to_have_text(["first", "second"])
    expect(page.locator('figure[data-title="time of first"] .legend span')).to_have_text(
        ["gen", "update_actor"]
    )
    first, second = (color_of(page, name) for name in ("first", "second"))
    colors = chart.locator("canvas").evaluate(COLORS_OF_CANVAS)
    assert first != second and {first, second} <= set(colors)  # both lines are there in their colors

    page.get_by_label("second").uncheck()
    expect(chart.locator(".legend span")).to_have_text(["first"])
    assert second not in chart.locator("canvas").evaluate(COLORS_OF_CANVAS)
    page.locator("input[name=metrics]").fill("timing_s/g")
    expect(page.locator("figure")).to_have_count(1)


def color_of(page, run):
    """The color of a run's chip, as `COLORS_OF_CANVAS` has it."""
    chip = page.locator(".chip", has_text=run).locator("input")
    return ",".join(re.findall(r"\d+", chip.evaluate("box => getComputedStyle(box).accentColor")))


COLORS_OF_CANVAS = """canvas => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const found = new Set();
    for (let i = 0; i < pixels.length; i += 4)
        if (pixels[i + 3] === 255) found.add(pixels.slice(i, i + 3).join());
    return [...found];
}"""


def test_the_table_filters_sorts_and_paginates(page, address):
    page.goto(f"{address}#rollouts")
    expect(total(page)).to_have_text("1 to 100 of 257")  # 30 steps of 8, 2 of 8, and one
    page.get_by_role("button", name="next").click()
    expect(total(page)).to_have_text("101 to 200 of 257")

    page.locator("input[name=score_min]").fill("0.5")
    page.locator("input[name=step_max]").fill("2")
    expect(total(page)).to_have_text("1 to 16 of 16")
    page.locator("input[name=text]").fill("question 1 of step 2")
    expect(total(page)).to_have_text("1 to 4 of 4")
    page.get_by_role("button", name="tokens").click()
    expect(page.locator(".rollouts tbody td:nth-child(5)")).to_have_text(["8", "8", "6", "6"])
    page.get_by_role("button", name="tokens").click()
    expect(page.locator(".rollouts tbody td:nth-child(5)")).to_have_text(["6", "6", "8", "8"])
    page.locator("select[name=media]").select_option("yes")
    expect(page.locator(".rollouts tbody td:nth-child(1)")).to_have_text(["second", "second"])
    page.locator("input[name=score_min]").fill("")
    expect(total(page)).to_have_text("1 to 4 of 4")


def test_a_group_shows_prompt_image_frames_and_its_responses_side_by_side(page, address):
    page.goto(f"{address}#rollouts")
    page.locator("select[name=media]").select_option("yes")
    page.locator("input[name=step_max]").fill("1")
    expect(total(page)).to_have_text("1 to 8 of 8")
    page.locator(".rollouts tbody tr").first.click()

    expect(page.locator(".prompt")).to_contain_text("Where is the square? Question 0 of step 1.")
    expect(page.locator("[data-kind=image] img")).to_have_count(1)
    expect(page.locator("[data-kind=video] img")).to_have_count(3)
    for image in page.locator("img").all():
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 320
    articles = page.locator("article")
    expect(articles).to_have_count(4)
    boxes = [article.bounding_box() for article in articles.all()]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
    expect(articles.first.locator("h3 .score")).to_have_text("1")
    expect(articles.first.locator(".facts")).to_have_text("advantage 0.500 · 6 tokens · stop · format 1")
    expect(page.locator(".group-bar strong")).to_have_text("second, step 1")


def test_tokens_are_colored_by_the_selected_value(page, tmp_path):
    values = {
        "old_log_probs": [-0.0, -2.5, -9.0],
        "rollout_log_probs": [-0.0] * 3,
        "advantages": [1.0, 0.0, -1.0],
    }
    RolloutStore(tmp_path).write(1, [rollout(1, 0, 0, tokens=["a", "b", "c"], token_ids=[1, 2, 3], **values)])
    with viewer(tmp_path) as address:
        page.goto(f"{address}#group/{tmp_path.name}/train/1/step1-0-0?look=tokens")
        tokens = page.locator("article pre span")

        def alphas():
            styles = [
                token.evaluate("span => getComputedStyle(span).backgroundColor") for token in tokens.all()
            ]
            return [float(re.findall(r"[\d.]+", style)[3]) for style in styles]

        expect(tokens).to_have_text(["a", "b", "c"])
        assert alphas() == pytest.approx([0, 0.375, 0.75], abs=0.01)  # 0, half and all of 5 nats, of 0.75
        assert "old log-prob -2.5" in tokens.nth(1).get_attribute("title")
        page.locator("select[name=coloring]").select_option("rollout log-prob")
        assert alphas() == [0, 0, 0]
        page.locator("select[name=coloring]").select_option("advantage")
        assert alphas() == pytest.approx([0.75, 0, 0.75], abs=0.01)


def test_hostile_texts_are_shown_as_text(page, address):
    page.goto(f"{address}#rollouts")
    page.locator("input[name=text]").fill("window.hacked")
    expect(page.locator(".rollouts tbody tr")).to_have_count(1)
    expect(page.locator(".rollouts tbody td.text").first).to_contain_text(HOSTILE)
    page.locator(".rollouts tbody a").click()

    article = page.locator("article")
    expect(page.locator(".prompt pre").first).to_contain_text(HOSTILE)
    expect(article.locator("pre")).to_contain_text(HOSTILE)
    page.get_by_role("button", name="tokens", exact=True).click()
    expect(article.locator("pre span").first).to_have_text(HOSTILE)
    expect(article.locator("pre span")).to_have_count(2000)
    expect(page.locator(".medium")).to_contain_text(f"(not shown: {HOSTILE})")
    page.get_by_role("button", name="all 5000 tokens").click()
    expect(article.locator("pre span")).to_have_count(5000)
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, article script, img[src=x]").count() == 0
    assert page.locator("script").count() == 3  # the page's own


def test_the_page_follows_a_running_run(page, tmp_path):
    write_log(tmp_path, range(1, 3))
    write_steps(tmp_path, range(1, 3))
    with viewer(tmp_path) as address:
        page.goto(f"{address}#rollouts")
        expect(total(page)).to_have_text("1 to 16 of 16")
        write_steps(tmp_path, range(3, 5))
        expect(total(page)).to_have_text("1 to 32 of 32")
        write_log(tmp_path, range(3, 5))
        page.get_by_role("link", name="curves").click()
        expect(page.locator('figure[data-title="reward/overall"] canvas')).to_be_visible()
        expect(page.locator(".state")).to_have_text("ended")
        with locked_by_a_run(tmp_path):
            expect(page.locator(".state")).to_have_text("live")
            expect(page.locator(".chip .dot")).to_be_visible()
        expect(page.locator(".state")).to_have_text("ended")

    expect(page.locator(".state")).to_have_text("server not responding")


def test_new_data_does_not_change_a_zoomed_chart(page, tmp_path):
    write_log(tmp_path, range(1, 41))
    with viewer(tmp_path) as address:
        page.goto(address)
        assert "token" not in page.url
        chart = page.locator('figure[data-title="reward/overall"]')
        over = chart.locator(".u-over").bounding_box()
        whole = picture_of(chart)
        place = over["y"] + over["height"] / 2
        page.mouse.move(over["x"] + over["width"] * 0.25, place)
        page.mouse.down()
        page.mouse.move(over["x"] + over["width"] * 0.5, place, steps=4)
        page.mouse.up()
        wait_until(page, lambda: picture_of(chart) != whole)
        zoomed = picture_of(chart)
        with page.expect_response(lambda answer: "/metrics" in answer.url):
            write_log(tmp_path, range(41, 81))
        page.wait_for_timeout(500)  # to draw it

        assert whole != picture_of(chart) == zoomed  # the new steps are outside of the zoomed range
        chart.locator(".u-over").dblclick()
        wait_until(page, lambda: picture_of(chart) not in (whole, zoomed))  # now they are visible


@contextmanager
def locked_by_a_run(folder):
    """The lock of a run in a process of its own; the run ends as after its last step."""
    code = (
        "import sys; from types import SimpleNamespace\n"
        "from verl.trainer.run.run_lock import locked_run_folder\n"
        f"with locked_run_folder(SimpleNamespace(checkpoint_folder={str(folder)!r})):\n"
        "    print('locked', flush=True); sys.stdin.read()"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout.readline() == "locked\n"
    try:
        yield run
    finally:
        run.stdin.close()
        assert run.wait(60) == 0


def picture_of(chart):
    return chart.locator("canvas").evaluate("canvas => canvas.toDataURL()")


@pytest.mark.slow
def test_a_hundred_thousand_rollouts_open_within_three_seconds(page, tmp_path):
    write_steps(tmp_path, range(1, 783), groups=16, n=8)  # 128 in a step
    with viewer(tmp_path) as address:
        start = time.perf_counter()
        page.goto(f"{address}#rollouts")
        expect(total(page)).to_have_text("1 to 100 of 100,096")
        opened = time.perf_counter() - start
        page.locator("input[name=score_min]").fill("0.5")
        expect(total(page)).to_have_text("1 to 100 of 50,048")
        start = time.perf_counter()
        page.locator("input[name=text]").fill("question 7 of step 500")
        expect(total(page)).to_have_text("1 to 4 of 4")
        searched = time.perf_counter() - start

    assert opened < LOAD_S and searched < LOAD_S, (opened, searched)
