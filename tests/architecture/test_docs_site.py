# SPDX-License-Identifier: Apache-2.0
"""The pages as a site: complete, without broken links, and without anything that comes from elsewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

from tests.architecture.source import ROOT, source_files
from tests.helpers.browser import open_browser

pytestmark = pytest.mark.nightly("docs", "mkdocs.yml", "scripts/docs_site.py", "README.md")

LOADED = {
    "img": "src",
    "script": "src",
    "source": "src",
    "iframe": "src",
    "link": "href",
}  # what a browser fetches
NAMES_ONLY = {"canonical", "next", "prev"}  # links that are not fetched
MARKDOWN_LINK = re.compile(r"\]\(([^)\s]+)\)")
LIST_IN_PARAGRAPH = re.compile(r"<p>(?:(?!</p>).)*\n\s*(?:[-*]|\d+\.) ", re.DOTALL)


class Targets(HTMLParser):
    """What a page loads, where its links lead, and what can be linked to in it."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.links, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors.add(values.get("id") or values.get("name"))
        if tag in LOADED and values.get("rel") not in NAMES_ONLY and values.get(LOADED[tag]):
            self.loaded.append(values[LOADED[tag]])
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; a page that mkdocs warns of fails all tests here, with the warnings."""
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return folder


def built(site):
    """The pages; the one for addresses that do not exist is served from any of them."""
    return [path for path in source_files(site, "*.html") if path.name != "404.html"]


@pytest.fixture(scope="module")
def pages(site):
    """Each page of the site, parsed."""
    return {
        path: Targets(path.read_text()) for path in source_files(site, "*.html") if path.name != "404.html"
    }


def test_every_page_of_docs_is_in_the_site(site):
    written = [path.relative_to(ROOT / "docs") for path in source_files(ROOT / "docs", "*.md")]

    assert len(written) > 20
    assert [str(path) for path in written if not (site / path.with_suffix(".html")).exists()] == []


def test_nothing_is_fetched_from_another_host(pages):
    foreign = {target for page in pages.values() for target in page.loaded if urlsplit(target).netloc}

    assert foreign == set()


def test_no_page_has_a_diagram_that_a_script_from_elsewhere_would_draw(site):
    assert [path.name for path in built(site) if 'class="mermaid"' in path.read_text()] == []


def test_every_link_leads_to_a_file_and_a_place_in_it(pages):
    broken = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            if not target.is_file() or (place and place not in pages[target].anchors):
                broken.append(f"{path.name}: {link}")

    assert broken == []


def test_each_file_of_the_repository_that_a_page_links_to_is_a_page_of_the_site(site):
    pages = source_files(ROOT / "docs", "*.md")
    links = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in pages
        for link in MARKDOWN_LINK.findall(page.read_text())
        if ":" not in link
    }
    linked = [path for path in links if path.is_file() and not path.is_relative_to(ROOT / "docs")]

    assert ROOT / "benchmarks" / "README.md" in linked
    for path in linked:
        name, title = f"{path.name}.html", path.name
        if path.suffix == ".md":  # a README is what a folder shows
            name = f"{'index' if path.stem == 'README' else path.stem}.html"
            title = path.read_text().splitlines()[0].lstrip("# ")
        assert title in (site / "repository" / path.relative_to(ROOT)).with_name(name).read_text(), path


def test_lists_are_lists_in_both_dialects_of_markdown(site):
    """A code host begins a list after any line, the site's Markdown only after an empty one."""
    assert [path.name for path in built(site) if LIST_IN_PARAGRAPH.search(path.read_text())] == []


def test_pages_beside_the_docs_link_to_files_and_headings_that_are_there():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        targets = [link for link in MARKDOWN_LINK.findall(page.read_text()) if not urlsplit(link).scheme]
        assert targets, page
        for target in targets:
            path, _, place = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), f"{page.name}: {target}"
            if place:
                assert place in headings(file.read_text()), f"{page.name}: {target}"


def headings(text):
    """The anchors of a page as code hosts make them: lower case, punctuation left out, spaces as hyphens."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.browser
@pytest.mark.parametrize("page", ["index.html", "algorithms/models.html"])
def test_search_works_from_a_folder(site, page):
    with open_browser() as browser:
        opened = browser.new_page()
        opened.goto((site / page).as_uri())
        opened.fill("input.md-search__input", "micro batch")

        opened.locator(".md-search-result__item").first.wait_for(state="attached", timeout=20_000)

        assert "matching documents" in opened.inner_text(".md-search-result__meta")
