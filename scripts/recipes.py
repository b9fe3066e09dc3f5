# SPDX-License-Identifier: Apache-2.0
"""Run the recipes of docs/recipes, and write their figures and curves into the pages.

    python scripts/recipes.py [NAME ...] [--folder outputs/recipes]

A recipe is a page. Its first block of shell commands is run as it is there, with `--folder` at its end; NAME
is the page's. The last line that it prints is JSON, with the held-out accuracies before and after as
`val_before` and `val_after`, and by step as `curve`. The script writes the table and the picture of the page,
and its line of docs/recipes/index.md.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES, PICTURES = ROOT / "docs" / "recipes", ROOT / "docs" / "images" / "recipes"
INDEX = "index"
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
BEGIN, END = "<!-- scripts/recipes.py writes from here -->", "<!-- to here -->"
COLUMNS = "before | after | steps | minutes"


class Outcome(NamedTuple):
    """The result of a recipe: held-out accuracy before and after training and by step, and the duration."""

    before: float
    after: float
    minutes: float
    curve: dict[int, float]

    @property
    def figures(self) -> str:
        """Return cells of a table under `COLUMNS`."""
        return f"{self.before:.2f} | {self.after:.2f} | {max(self.curve)} | {self.minutes:.0f}"


def names() -> list[str]:
    """Return the recipes in the order of the index."""
    return re.findall(r"^\| \[[^]]+\]\((\w+)\.md\)", page_of(INDEX).read_text(), re.MULTILINE)


def page_of(name: str) -> Path:
    return PAGES / f"{name}.md"


def command_of(name: str) -> str:
    """Return the shell commands of a recipe."""
    found = BLOCK.search(page_of(name).read_text())
    if found is None:
        raise ValueError(f"{page_of(name)} has no block of shell commands")
    return found[1].rstrip()


def run(name: str, folder: Path, arguments: Sequence[str] = ()) -> Outcome:
    """Run a recipe in a folder, with further arguments of its last command."""
    start = time.monotonic()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = f'set -eo pipefail\n{command_of(name)} --folder "$0" "$@"'
    command, line = ["bash", "-c", script, folder, *arguments], ""
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            sys.stdout.write(line)
            sys.stdout.flush()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command_of(name))
    return read_outcome(line, (time.monotonic() - start) / 60)


def read_outcome(line: str, minutes: float) -> Outcome:
    """Read the last line that a recipe printed; raise a ValueError if it has no whole outcome."""
    try:
        found = json.loads(line)
        curve = {int(step): float(accuracy) for step, accuracy in found["curve"].items()}
        outcome = Outcome(float(found["val_before"]), float(found["val_after"]), minutes, curve)
    except (ValueError, LookupError, TypeError, AttributeError):
        outcome = Outcome(math.nan, math.nan, minutes, {})
    if not outcome.curve or not all(map(math.isfinite, [*outcome[:2], *outcome.curve.values()])):
        rule = "JSON with the numbers `val_before` and `val_after`, and by step `curve`"
        raise ValueError(f"its last line must be {rule}, got {line.strip()[:200]!r}")
    return outcome


def draw(outcome: Outcome, path: Path) -> None:
    """Plot the curve of a recipe as an SVG, the same for the same curve."""
    import matplotlib  # noqa: PLC0415 - `--help` should not wait for it

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": path.stem, "svg.fonttype": "none"}  # text, not its outlines
    from matplotlib import pyplot  # noqa: PLC0415 - after the backend is chosen

    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    axes.plot(list(outcome.curve), list(outcome.curve.values()), marker="o", color="#1f77b4")
    axes.set(xlabel="step", ylabel="held-out accuracy", ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write(name: str, outcome: Outcome) -> None:
    """Write the figures of a recipe into its page, and into its line of the index."""
    draw(outcome, PICTURES / f"{name}.svg")
    table = f"| {COLUMNS} |\n|---|---|---|---|\n| {outcome.figures} |"
    picture = f"![Held-out accuracy by step](../images/recipes/{name}.svg)"
    page, index = page_of(name), page_of(INDEX)
    page.write_text(replaced(page.read_text(), f"{table}\n\n{picture}"))
    line = re.compile(rf"^(\| \[[^]]+\]\({name}\.md\) \|[^|]*\|[^|]*)\|.*$", re.MULTILINE)
    index.write_text(line.sub(rf"\1| {outcome.figures} |", index.read_text()))


def replaced(text: str, content: str) -> str:
    """Return a text with other content between the markers."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{content}\n\n{END}{tail}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(names())}")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "recipes")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(names()))
    if unknown:
        parser.error(f"no recipe {', '.join(unknown)}; there are {', '.join(names())}")
    for name in options.names or names():
        print(f"\n== {name}", flush=True)
        try:
            outcome = run(name, options.folder.resolve() / name)
        except (subprocess.CalledProcessError, ValueError) as error:  # the recipe has said why it failed
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        write(name, outcome)
        print(f"{name}: {outcome.before:.2f} -> {outcome.after:.2f} in {outcome.minutes:.0f} min", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
