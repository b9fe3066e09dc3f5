# SPDX-License-Identifier: Apache-2.0
"""Shared data files, and links to the origin of the clone, which pyproject.toml cannot declare."""

import re
import subprocess
from email.parser import HeaderParser
from pathlib import Path

from setuptools import setup

FOLDERS = ("examples", "scripts")
LEFT_OUT = ("scripts/docs_site.py",)  # which only builds the documentation
SSH = re.compile(r"(?:ssh://)?git@([^:/]+)[:/](.+)")
PAGES = {
    "Source": "",
    "Documentation": "/tree/main/docs",
    "Issues": "/issues",
    "Changelog": "/blob/main/CHANGELOG.md",
}
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")


def shared_files() -> list[tuple[str, list[str]]]:
    """Return each folder below the environment's `share`, with the files that go there."""
    by_folder: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.as_posix() not in LEFT_OUT:
                by_folder.setdefault(f"share/easy-verl/{path.parent.as_posix()}", []).append(path.as_posix())
    return [*by_folder.items()]


def address() -> str | None:
    """Return the web address of this repository: that of the clone's origin, or recorded in the sdist."""
    recorded = Path("PKG-INFO")
    if recorded.is_file():
        urls = HeaderParser().parsestr(recorded.read_text()).get_all("Project-URL", [])
        return next((url.partition(", ")[2] for url in urls if url.startswith("Source")), None)
    try:
        command = ["git", "remote", "get-url", "origin"]
        origin = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    origin = SSH.sub(r"https://\1/\2", origin).removesuffix(".git")
    return origin if origin.startswith("https://") else None


def readme(url: str | None) -> str:
    """Return the README with absolute links: a package index has none of the other files."""
    text = Path("README.md").read_text()
    if url is None:
        return text

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}{link[2]}({url}/{kind}/main/{link[3]})"

    return LINK.sub(absolute, text)


def main() -> None:
    url = address()
    setup(
        data_files=shared_files(),
        long_description=readme(url),
        long_description_content_type="text/markdown",
        project_urls={} if url is None else {name: url + page for name, page in PAGES.items()},
    )


main()
