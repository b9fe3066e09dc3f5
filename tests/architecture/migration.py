# SPDX-License-Identifier: Apache-2.0
"""The tables of the page for users of verl: `python3 -m tests.architecture.migration` rewrites them."""

from tests.architecture.source import ROOT
from verl.config.hints.renamed_keys import VERL_KEYS

PAGE = ROOT / "docs" / "migration" / "verl.md"


def tables() -> str:
    """Return a table for each section of verl's keys, in Markdown."""
    text = ""
    for heading, table in VERL_KEYS.data["keys"].items():
        text += f"\n### {heading}\n\n| {VERL_KEYS.program} | here | |\n|---|---|---|\n"
        for key in table:
            option, note = VERL_KEYS.keys[key]
            text += f"| `{key}` | {f'`{option}`' if option else 'none'} | {note} |\n"
    return text


if __name__ == "__main__":
    introduction = PAGE.read_text(encoding="utf-8").partition("\n### ")[0]
    PAGE.write_text(introduction + tables(), encoding="utf-8")
