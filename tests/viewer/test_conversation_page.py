# SPDX-License-Identifier: Apache-2.0
"""Conversations in a real browser: turns, calls, answers with pictures, and what is trained."""

import csv
import json

import pytest
from playwright.sync_api import expect

from tests.helpers.rollouts import conversation, rollout, with_media
from tests.helpers.viewer import viewer
from tests.viewer.test_page import HOSTILE
from verl.viewer.rollout_store import RolloutStore

NONE = "\N{EN DASH}"

pytestmark = pytest.mark.browser


def unmade(columns):
    """End a conversation after its first turn, whose picture the policy does not see, and mask it."""
    turn = columns["turns"][0]
    [seen] = turn["observations"]
    turns = [turn | {"is_shown": False, "observations": [seen | {"media": []}]}]
    turns.append(columns["turns"][1] | {"observations": [], "text": HOSTILE})
    more = {"num_turns": 2, "num_failures": 0, "stop_reason": "images", "is_masked": True}
    return columns | more | {"turns": turns, "is_trained": [False] * len(columns["tokens"])}


def forgetful(folder):
    """Let an agent begin a second context after the first turn, with a picture and edited history."""
    talk, picture = conversation(folder), with_media(folder)["media"][0]
    told = [
        {"role": "system", "content": HOSTILE},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Look again."}]},
    ]
    first = {"start": 0, "num_turns": 1, "num_opening": 1, "tools": "[]", "media": []}
    second = {"start": 5, "num_turns": 2, "num_opening": 2, "tools": "[]", "media": [picture]}
    contexts = [
        first | {"messages": json.dumps([{"role": "user", "content": "Where?"}])},
        second | {"messages": json.dumps([*told, {"role": "assistant", "content": "left"}])},
    ]
    return talk | {"contexts": contexts}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A run of one step: two conversations about a picture, and two responses without tools."""
    folder = tmp_path_factory.mktemp("project") / "run"
    asked = json.dumps([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]}])
    media = with_media(folder)
    picture = {"media": media["media"][:1], "num_media": 1, "messages": asked}
    talks = [conversation(folder), unmade(conversation(folder))]
    rows = [rollout(1, 0, sample, **picture | talk) for sample, talk in enumerate(talks)]
    RolloutStore(folder).write(1, rows + [rollout(1, 1, sample) for sample in range(2)])
    own = json.dumps([{"role": "user", "content": "Where?"}])
    agents = [rollout(2, 0, sample, **forgetful(folder)) for sample in range(2)]
    agents[0]["messages"], agents[1]["messages"] = asked, own
    RolloutStore(folder).write(2, agents)
    with viewer(folder) as found:
        yield found


@pytest.fixture
def article(page, address):
    """The first conversation."""
    page.goto(f"{address}#group/run/train/1/step1-0-0")
    expect(page.locator("article")).to_have_count(2)
    return page.locator("article").first


def test_turns_show_text_calls_and_answers_with_their_pictures(page, article):
    said, seen = article.locator(".said"), article.locator(".seen")
    expect(said).to_have_count(3)
    expect(said.locator("> pre.plain")).to_have_text(
        ["I look closer.", "How far left is it, in words?", "It is **left**."]
    )
    expect(article.locator(".call b:first-child")).to_have_text(["zoom", "python", "zom"])
    expect(article.locator(".call pre").first).to_have_text("box: [30, 80, 130, 160]")
    assert article.locator(".call pre").nth(1).inner_text().splitlines() == [
        "code: for edge in (40, 100):", "    print(edge / 320)",
    ]  # fmt: skip
    expect(said.nth(0)).to_contain_text("3 tokens · reward 0.500 · 0.250 s")
    expect(seen).to_have_count(3)
    expect(seen.nth(1)).to_contain_text("1.500 s")
    expect(seen.nth(2)).to_contain_text("There is no tool 'zom'")
    expect(article.locator(".seen .badge.bad")).to_have_text(["failed"])
    assert seen.first.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 300
    expect(article.locator(".facts").first).to_contain_text("3 turns · 3 calls · 1 failed")
    expect(article.locator(".end")).to_have_text("ended: the policy answered")
    seen.first.locator(".picture").click()
    expect(page.locator("dialog.lightbox img")).to_be_visible()
    page.keyboard.press("Escape")
    page.locator(".controls").evaluate("controls => scrollTo(0, controls.offsetTop - 60)")


def test_text_that_is_not_trained_looks_different_and_a_legend_says_so(page, article):
    legend = article.locator(".trained-legend span")
    expect(legend).to_have_text(["trained: 8 tokens", "not trained: 4 tokens"])
    hatched = "part => getComputedStyle(part).backgroundImage.includes('repeating-linear-gradient')"
    assert [part.evaluate(hatched) for part in article.locator(".said, .seen").all()] == [
        False, True, False, True, False, False,  # the one that failed is red
    ]  # fmt: skip
    page.get_by_role("button", name="tokens", exact=True).click()
    expect(article.locator(".tokens .untrained")).to_have_text(["seen", "part", "no", "tool"])
    expect(article.locator(".trained-legend")).to_be_visible()
    assert "not trained" in article.locator(".tokens .untrained").first.get_attribute("title")


def test_a_masked_conversation_says_so_and_which_calls_and_pictures_it_lacks(page, article):
    masked = page.locator("article").nth(1)

    expect(masked.locator("h3 .badge.bad")).to_have_text("masked")
    expect(masked.locator(".trained-legend")).to_have_text("not trained: 12 tokens")
    expect(masked.locator(".said.trained")).to_have_count(0)
    expect(masked.locator(".seen")).to_contain_text("not shown to the policy · 1 picture not kept")
    expect(masked.locator(".call .badge")).to_have_text(["not made", "not made"])
    expect(masked.locator(".end")).to_have_text("ended: its images reached the limit")
    expect(masked.locator(".said").nth(1)).to_contain_text(HOSTILE)
    assert page.evaluate("window.hacked") is None


def test_each_context_of_an_agent_begins_with_its_messages_and_pictures(page, address):
    page.goto(f"{address}#group/run/train/2/step2-0-0")
    expect(page.locator("article")).to_have_count(2)
    first, second = page.locator("article").all()

    expect(first.locator(".context")).to_have_text(["context 1 of 2", "context 2 of 2"])
    expect(first.locator(".facts").first).to_contain_text("2 contexts")
    opening = first.locator(".opening")
    expect(opening.locator(".badge")).to_have_text(["system", "user"])
    expect(opening).to_contain_text(HOSTILE)
    expect(opening).to_contain_text("Look again.")
    assert opening.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 320
    parts = ["context", "opening", "said", "seen"]
    found = [part.get_attribute("class").split() for part in first.locator(".context, .said, .seen").all()]
    order = [next(name for name in parts if name in one) for one in found]
    assert order[:5] == ["context", "said", "seen", "context", "opening"]
    # Its prompt is not the one above the responses.
    expect(second.locator(".opening")).to_have_count(2)
    expect(second.locator(".opening").first).to_contain_text("Where?")
    assert page.evaluate("window.hacked") is None


def test_markdown_of_turns_is_drawn(page, address):
    page.goto(f"{address}#group/run/train/1/step1-0-0?look=markdown")

    expect(page.locator("article").first.locator(".said strong")).to_have_text("left")


def test_responses_without_tools_have_no_turns_and_no_legend(page, address):
    page.goto(f"{address}#group/run/train/1/step1-0-1")
    expect(page.locator("article")).to_have_count(2)

    expect(page.locator("article .said, article .trained-legend, article .badge.bad")).to_have_count(0)
    expect(page.locator("article pre.plain").first).to_have_text("the red square is left of")


def test_conversations_are_filtered_sorted_and_exported_by_turns_calls_and_failures(page, address):
    page.goto(f"{address}#rollouts")
    total = page.locator(".pager output")
    expect(total).to_have_text("1 to 6 of 6")
    page.get_by_role("button", name="turns", exact=True).click()
    expect(page.locator("td.turns")).to_have_text(["3", "3", "3", "2", NONE, NONE])
    expect(page.locator("td.finish .badge")).to_have_text(["masked"])
    page.locator("input[name=num_failures_min]").fill("1")
    expect(total).to_have_text("1 to 3 of 3")
    page.locator("input[name=num_failures_min]").fill("")
    page.locator("select[name=stop_reason]").select_option("images")
    expect(total).to_have_text("1 to 1 of 1")
    expect(page.locator("td.turns")).to_have_text(["2"])

    with page.expect_download() as begun:
        page.get_by_role("link", name="JSONL").click()
    [row] = map(json.loads, begun.value.path().read_text().splitlines())
    assert (row["num_turns"], row["stop_reason"], row["is_masked"]) == (2, "images", True)
    assert row["turns"][0]["calls"] == [{"name": "zoom", "arguments": '{"box": [30, 80, 130, 160]}'}]
    with page.expect_download() as begun:
        page.get_by_role("link", name="CSV").click()
    with begun.value.path().open(newline="") as file:
        [row] = csv.DictReader(file)
    assert json.loads(row["turns"])[0]["observations"][0]["text"] == "The part, enlarged."


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_conversation_fits_the_screen(browser, address, width, theme):
    context = browser.new_context(viewport={"width": width, "height": 860}, color_scheme=theme)
    page = context.new_page()
    for place in (
        "group/run/train/1/step1-0-0",
        "group/run/train/2/step2-0-0",
        "group/run/train/1/step1-0-0?look=tokens",
        "rollouts",
    ):
        page.goto(f"{address}#{place}")
        expect(page.locator("article, .rollouts tbody tr").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), place
    context.close()
