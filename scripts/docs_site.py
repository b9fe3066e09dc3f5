# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs that add the repository's files to the site if a page links to them.

On a code host, a link from a page to an example or the README works. The site has docs/ only, and clones of
the repository have no common address to link to. So each linked file is added: Markdown as it is, any other
file as a page that shows its text.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LOG = "log.md"
FOLDER = "repository"  # of the added pages, in the site
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".yml": "yaml",
    ".yaml": "yaml",
    ".toml": "toml",
    ".json": "json",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each linked file outside docs/, and for files that it links to in turn."""
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    while waiting:
        for target in linked_files(waiting.pop()):
            uri = site_uri(target)
            if files.get_file_from_path(uri) is None:
                text, inclusion = page_text(target), InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, uri, content=text, inclusion=inclusion))
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files of the repository to their pages in the site; keep the log out of the search."""
    if page.file.src_uri == LOG:
        page.meta["search"] = {"exclude": True}  # it names everything, and explains nothing
    source = source_path(page.file.src_uri)
    if source.suffix != ".md":
        return markdown

    def in_site(link: re.Match) -> str:
        target = (source.parent / link[1]).resolve()
        if not target.is_file():
            return link[1]
        return relpath(site_uri(target), PurePosixPath(page.file.src_uri).parent)

    return LINK.sub(in_site, markdown)


def linked_files(page: Path) -> list[Path]:
    """List the files outside docs/ that a Markdown page links to; other files link to nothing."""
    if page.suffix != ".md" or not page.exists():
        return []
    targets = [(page.parent / link).resolve() for link in LINK.findall(page.read_text())]
    return [target for target in targets if target.is_file() and not target.is_relative_to(DOCS)]


def site_uri(target: Path) -> str:
    """Return the path of a repository file in the site, such as `repository/examples/config.yaml.md`."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    path = target.relative_to(ROOT).as_posix()
    return f"{FOLDER}/{path}" if target.suffix == ".md" else f"{FOLDER}/{path}.md"


def source_path(uri: str) -> Path:
    """Return the repository file that a page of the site shows."""
    if not uri.startswith(f"{FOLDER}/"):
        return DOCS / uri
    path = ROOT / uri.removeprefix(f"{FOLDER}/")
    return path if path.exists() else path.with_suffix("")


def page_text(target: Path) -> str:
    """Return the page of a file: itself, or its text below its name. Search skips such pages."""
    head = "---\nsearch: {exclude: true}\n---\n\n"
    text = target.read_text()
    if target.suffix == ".md":
        return head + text
    fence = "~~~~"
    language = LANGUAGES.get(target.suffix, "text")
    return f"{head}# `{target.relative_to(ROOT)}`\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"
