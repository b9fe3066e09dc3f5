# SPDX-License-Identifier: Apache-2.0
"""The table of responses and the page of one prompt in a real browser."""

import csv
import json
import re

import pytest
from playwright.sync_api import expect

from tests.helpers.browser import open_browser
from tests.helpers.media import save_video
from tests.helpers.rollouts import rollout, with_media
from tests.helpers.viewer import viewer
from tests.viewer.test_page import HOSTILE
from verl.viewer.rollout_store import RolloutStore

pytestmark = pytest.mark.browser

MARKDOWN = rf"""# Area of a *right* triangle

The sides are \(a = 5\) and $b_1 = 12$, so **half** of `a * b`:

$$\frac{{5 \cdot 12}}{{2}} = 30$$

1. one
2. two
   - inner

| side | length |
|---|---|
| a | 5 |

```html
<b>not bold</b>
```

{HOSTILE}
[click](javascript:window.hacked=3) ![pixel](http://evil.example/pixel.png) <javascript:alert(1)>
$\href{{javascript:window.hacked=4}}{{x}}$ $\includegraphics{{http://evil.example/x.png}}$ cost $5 or $6
"""
LONG = "word " * 1000
NO_OVERFLOW = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture
def open_page(browser):
    """Open pages of a size and theme; the test fails on an error or a request to another server."""
    faults, contexts = [], []

    def make(width=1280, theme="light"):
        context = browser.new_context(viewport={"width": width, "height": 860}, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on("request", lambda sent: faults.append(sent.url) if "//127.0.0.1:" not in sent.url else None)
        return page

    yield make
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def page(open_page):
    return open_page()


def messages(question):
    turns = [("system", "Be brief."), ("user", question)]
    return json.dumps([{"role": role, "content": text} for role, text in turns])


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    folder = tmp_path_factory.mktemp("films")
    save_video(folder / "7.mp4", 56, 56, num_frames=8)
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory, films):
    """A run of three steps with two prompts each, one with media, and two validations of one prompt."""
    folder = tmp_path_factory.mktemp("project") / "first run"
    store = RolloutStore(folder)
    media = with_media(folder)
    film = media["media"][1] | {"times": [0.0, 0.5, 1.0], "source": str(films / "7.mp4")}
    media["media"] = [media["media"][0], film]
    texts = [MARKDOWN, LONG, "short<|im_end|>"]
    for step in (1, 2, 3):
        rows = []
        for group in range(2):
            question = f"Where is the square in picture {step}{group}?"
            prompt = f"<|im_start|>user\n{question}<|im_end|>"
            more = {"prompt": prompt, "messages": messages(question)} | (media if group else {})
            rows += [
                rollout(step, group, sample, response=text, score=[0.2, 0.9, 0.5][sample], **more)
                for sample, text in enumerate(texts)
            ]
        store.write(step, rows)
        if step > 1:
            question = "Which one is left?"
            row = rollout(step, 0, 0, prompt=question, messages=messages(question), score=step / 4)
            row |= {"group": f"val{step}-0-0", "advantages": None, "old_log_probs": None, "advantage": None}
            store.write(step, [row], "validation")
    return folder


@pytest.fixture(scope="module")
def address(project, films):
    with viewer(project, options=["--videos", str(films)]) as found:
        yield found


def total(page):
    return page.locator(".pager output")


def open_group(page, address, group="train/3/step3-0-0", query=""):
    page.goto(f"{address}#group/first%20run/{group}{query}")
    expect(page.locator(".prompt")).to_be_visible()


def test_filters_and_order_are_kept_by_back_and_by_a_link(page, open_page, address):
    page.goto(f"{address}#rollouts")
    expect(total(page)).to_have_text("1 to 20 of 20")
    page.locator("input[name=text]").fill("picture")
    page.locator("input[name=score_min]").fill("0.4")
    page.locator("select[name=kind]").select_option("train")
    expect(total(page)).to_have_text("1 to 12 of 12")
    page.get_by_role("button", name="score").click()
    page.locator(".rollouts tbody tr").first.click()
    expect(page.locator(".prompt")).to_be_visible()
    page.go_back()

    for one in (page, other := open_page()):
        if one is other:
            other.goto(address)
            other.goto(page.url)
        expect(total(one)).to_have_text("1 to 12 of 12")
        expect(one.locator("input[name=text]")).to_have_value("picture")
        expect(one.locator("input[name=score_min]")).to_have_value("0.4")
        expect(one.locator("select[name=kind]")).to_have_value("train")
        expect(one.locator("th[aria-sort=descending]")).to_contain_text("score")
    page.get_by_role("button", name="clear filters").click()
    expect(total(page)).to_have_text("1 to 20 of 20")


def test_rows_show_their_prompts_without_template_and_a_thumbnail(page, address):
    page.goto(f"{address}#rollouts?kind=train&step_min=3")

    prompts = page.locator(".prompt-cell span")
    expect(prompts).to_have_text(
        ["Where is the square in picture 30?"] * 3 + ["Where is the square in picture 31?"] * 3
    )
    expect(page.locator(".prompt-cell img")).to_have_count(3)
    assert page.locator(".prompt-cell img").first.evaluate(
        "image => image.decode().then(() => image.naturalWidth)"
    )
    expect(page.locator(".rollouts .badge")).to_have_count(0)
    expect(page.locator(".response-cell").nth(2)).to_have_text("short")
    page.locator("select[name=kind]").select_option("validation")
    expect(page.locator(".rollouts .badge")).to_have_text(["val"])


def test_a_range_of_a_histogram_becomes_a_filter(page, address):
    page.goto(f"{address}#rollouts?kind=train")
    expect(total(page)).to_have_text("1 to 18 of 18")
    box = page.locator('[data-title="score"] .plot').bounding_box()
    place = box["y"] + box["height"] / 2
    expect(page.locator('[data-title="score"] .axis span')).to_have_text(["0.2", "0.4", "0.6", "0.8"])

    page.mouse.move(box["x"] + box["width"] * 0.6, place)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 1, place, steps=4)
    page.mouse.up()

    expect(total(page)).to_have_text("1 to 6 of 6")
    bounds = [float(page.locator(f"input[name=score_{end}]").input_value()) for end in ("min", "max")]
    assert bounds == pytest.approx([0.62, 0.9], abs=0.01)


def test_the_rows_that_pass_are_exported(page, address):
    page.goto(f"{address}#rollouts?kind=validation")
    expect(total(page)).to_have_text("1 to 2 of 2")

    with page.expect_download() as begun:
        page.get_by_role("link", name="CSV").click()
    with begun.value.path().open(newline="") as file:
        assert [(row["kind"], row["score"]) for row in csv.DictReader(file)] == [
            ("validation", "0.5"),
            ("validation", "0.75"),
        ]
    with page.expect_download() as begun:
        page.get_by_role("link", name="JSONL").click()
    lines = begun.value.path().read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 3]


def test_keys_move_search_list_themselves_and_lead_back(page, address):
    page.goto(f"{address}#rollouts?kind=train&step_min=3")
    expect(total(page)).to_have_text("1 to 6 of 6")
    page.keyboard.press("/")
    expect(page.locator("input[name=text]")).to_be_focused()
    page.keyboard.type("jk?")  # text, not keys
    expect(page.locator("input[name=text]")).to_have_value("jk?")
    expect(page.locator("dialog")).to_have_count(0)
    page.locator("input[name=text]").fill("")
    page.keyboard.press("Escape")
    expect(page.locator("input[name=text]")).not_to_be_focused()
    expect(total(page)).to_have_text("1 to 6 of 6")
    for key in "jjk":
        page.keyboard.press(key)
    expect(page.locator("tr.current .prompt-cell")).to_contain_text("picture 30")
    page.keyboard.press("Enter")

    expect(page.locator(".prompt")).to_contain_text("picture 30")
    expect(page.locator(".steppers small")).to_have_text("prompt 1 of 2")
    page.keyboard.press("j")
    expect(page.locator(".prompt")).to_contain_text("picture 31")
    page.keyboard.press("j")  # there is no other
    expect(page.locator(".steppers small")).to_have_text("prompt 2 of 2")
    page.keyboard.press("k")
    expect(page.locator(".prompt")).to_contain_text("picture 30")
    page.keyboard.press("?")
    expect(page.locator("dialog.keys")).to_contain_text("next prompt of the table")
    page.keyboard.press("j")  # not behind the dialog
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    expect(page.locator(".prompt")).to_contain_text("picture 30")
    page.keyboard.press("Escape")
    expect(total(page)).to_have_text("1 to 6 of 6")


def test_long_responses_are_folded(page, address):
    open_group(page, address)
    article = page.locator("article").nth(1)
    text = article.locator("pre")

    assert len(text.inner_text()) < 1500
    article.get_by_role("button", name="show all 5,000 characters").click()
    expect(text).to_have_text(LONG.strip())
    article.get_by_role("button", name="show less").click()
    assert len(text.inner_text()) < 1500


def test_responses_are_ordered_and_the_extremes_stand_side_by_side(page, address):
    open_group(page, address)
    scores = page.locator("article .score")
    expect(scores).to_have_text(["0.200", "0.900", "0.500"])
    page.locator("select[name=by]").select_option("best first")
    expect(scores).to_have_text(["0.900", "0.500", "0.200"])

    page.get_by_role("button", name="best and worst").click()

    expect(page.locator("article h3 .badge")).to_have_text(["best", "worst"])
    best, worst = (article.bounding_box() for article in page.locator("article").all())
    assert best["y"] == worst["y"] and best["x"] + best["width"] < worst["x"]
    expect(page).to_have_url(re.compile("pair=1"))
    page.reload()
    expect(scores).to_have_text(["0.900", "0.200"])


def test_roles_are_labels_and_the_template_is_a_switch(page, address):
    open_group(page, address)
    prompt = page.locator(".prompt")

    expect(prompt.locator(".turn .badge")).to_have_text(["system", "user", "ground truth"])
    expect(prompt).not_to_contain_text("<|im_start|>")
    page.get_by_role("button", name="with template").click()
    expect(prompt).to_contain_text("<|im_start|>user")


def test_markdown_and_formulas_are_drawn_and_hostile_text_stays_text(page, address):
    open_group(page, address, query="?look=markdown")
    article = page.locator("article").first

    expect(article.locator("math")).to_have_count(3)
    expect(article.locator("mfrac")).to_have_count(1)
    expect(article.locator(".markdown h3 em")).to_have_text("right")
    expect(article.locator("strong")).to_have_text("half")
    expect(article.locator("ol > li")).to_have_count(2)
    expect(article.locator("ol ul li")).to_have_text("inner")
    expect(article.locator("td")).to_have_text(["a", "5"])
    expect(article.locator("pre.code")).to_have_text("<b>not bold</b>")
    expect(article).to_contain_text(HOSTILE)
    expect(article).to_contain_text("click javascript:window.hacked=3")
    expect(article).to_contain_text("<javascript:alert(1)>")
    expect(article).to_contain_text("cost $5 or $6")
    assert article.locator("a, img, script, iframe, [onerror], [href], [src], b:not(.badge)").count() == 0
    assert page.evaluate("window.hacked") is None


def test_a_click_enlarges_an_image_and_frames_have_times(page, address):
    open_group(page, address, "train/3/step3-0-1")
    picture = page.locator("[data-kind=image] .picture img")
    small = picture.bounding_box()["width"]
    picture.click()
    large = page.locator("dialog.lightbox img")
    expect(large).to_be_visible()
    fitted = large.bounding_box()["width"]
    assert fitted > 1.5 * small
    large.click()
    page.wait_for_function("width => document.querySelector('dialog img').clientWidth > width", arg=fitted)
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    expect(page.locator(".prompt")).to_be_visible()

    frames = page.locator("[data-kind=video] .picture")
    expect(frames.locator("span")).to_have_text(["0.00 s", "0.50 s", "1.00 s"])
    frames.nth(1).click()
    expect(page.locator("dialog output")).to_have_text("2 of 3")
    page.keyboard.press("ArrowRight")
    expect(page.locator("dialog output")).to_have_text("3 of 3")
    expect(page.locator("dialog")).to_contain_text("1.00 s")
    page.keyboard.press("Escape")
    video = page.locator("video")
    assert "/videos/0/train/3/1/" in video.get_attribute("src")
    assert page.evaluate("src => fetch(src).then(answer => answer.status)", video.get_attribute("src")) in (
        200,
        206,
    )


def test_a_prompt_is_followed_over_the_steps(page, address):
    open_group(page, address, "validation/3/val3-0-0", "?steps=1")

    rows = page.locator(".over-steps tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.locator("td:nth-child(2)")).to_have_text(["0.750", "0.500"])
    expect(page.locator(".over-steps canvas")).to_be_visible()
    rows.nth(1).locator("a").click()
    expect(page.locator(".group-bar strong")).to_have_text("first run, step 2")
    page.get_by_role("button", name="tokens", exact=True).click()
    expect(page.locator("select[name=coloring] option")).to_have_text(["rollout log-prob"])


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen_in_light_and_dark(open_page, address, width, theme):
    page = open_page(width, theme)
    page.goto(f"{address}#rollouts?step_min=3&kind=train")
    expect(total(page)).to_have_text("1 to 6 of 6")
    assert page.evaluate(NO_OVERFLOW)
    for query in ("", "?look=markdown&pair=1", "?look=tokens", "?steps=1"):
        open_group(page, address, "train/3/step3-0-1", query)
        expect(page.locator("article").first).to_be_visible()
        assert page.evaluate(NO_OVERFLOW), query
    channels = page.locator("article").first.evaluate(
        "card => getComputedStyle(card).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    )
    assert (sum(channels) < 200) == (theme == "dark")
