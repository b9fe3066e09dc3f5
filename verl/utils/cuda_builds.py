# SPDX-License-Identifier: Apache-2.0
"""Make CUDA builds of torchvision, torchaudio and torchcodec harmless next to a CPU-only torch.

The package index has one Linux wheel of each, linked to CUDA. Next to a CPU-only torch, importing torchvision
(and so transformers' models and image processors) fails on the missing operator `torchvision::nms`, and
importing torchaudio or torchcodec (and so vLLM) on `libc10_cuda.so`.

Commands, tests and benchmarks call `repair_cuda_builds` before they import transformers. Where needed, it
replaces Python's path finder; in child processes (Ray's workers, vLLM's helpers) through `PYTHONPATH`.

`verl-doctor --repair` repairs an environment: a path file in its site-packages replaces the path finder of
every process, so that plain transformers loads exported models. `make install` runs it.
"""

import mmap
import os
import re
import sys
import sysconfig
import warnings
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

HIDDEN = ("torchaudio", "torchcodec")  # not found, as if they were not installed
CUDA_LIBRARIES = (b"libc10_cuda.so", b"libtorch_cuda.so", b"libcudart.so")
OPERATORS = {  # declared before torchvision is executed; its transforms, all that is needed, are pure torch
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
CHILD_SITE = Path(__file__).parent / "child_site"  # holds a `sitecustomize.py` for child processes
REMEDY = "install a CPU build of torchvision, or run `verl-doctor --repair` once"
UNREPAIRED = (
    "torchvision was built for CUDA and torch for CPUs, so transformers cannot load models or image"
    f" processors: {REMEDY}"
)
PATH_FILE = "easy_verl_cuda_builds.pth"
# Run at each start of Python: reads this file without the package around it, and nothing where it is gone.
AT_START = """
import importlib.util, os
if os.path.isfile({file!r}):
    spec = importlib.util.spec_from_file_location("_verl_cuda_builds", {file!r})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.replace_path_finder()
"""


def repair_cuda_builds() -> None:
    """Make the packages importable, or hide them, in this process and its children; imports nothing heavy."""
    repaired = child_environment()
    if not repaired:
        return
    os.environ |= repaired
    replace_path_finder()


def replace_path_finder() -> None:
    """Have this process look at the packages when it imports them; nothing is read before."""
    for position, finder in enumerate(sys.meta_path):
        if isinstance(finder, type) and finder.__name__ == PathFinder.__name__:
            sys.meta_path[position] = RepairingFinder(finder)


def repair_environment(folder: Path | None = None) -> bool:
    """Write the path file where it is needed, else delete it; return whether it is needed.

    `folder` holds the installed packages; None is that of this environment.
    """
    file = (folder or Path(sysconfig.get_paths()["purelib"])) / PATH_FILE
    is_needed = bool(child_environment())
    if is_needed:
        written = file.with_suffix(".new")
        code = AT_START.format(file=str(Path(__file__).resolve()))
        written.write_text(f"import sys; exec({code!r})\n")  # Python runs lines that begin with `import`
        written.rename(file)
    else:
        file.unlink(missing_ok=True)
    return is_needed


def child_environment() -> dict[str, str]:
    """Return the variables that repair a child process; Ray's workers on other nodes do not inherit them."""
    if not any(map(is_broken, ("torchvision", *HIDDEN))):
        return {}
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys([str(CHILD_SITE), *paths]))}


def is_broken(package: str) -> bool:
    """Return whether a package is linked to CUDA while torch is CPU-only. Imports neither."""
    return _torch_is_cpu_only() and _is_linked_to_cuda(package)


def warn_if_broken() -> None:
    """Warn, with a remedy, if a script has imported transformers before anything could be repaired."""
    is_repaired = any(isinstance(finder, RepairingFinder) for finder in sys.meta_path)
    if not is_repaired and is_broken("torchvision"):
        warnings.warn(UNREPAIRED, stacklevel=3)


class RepairingFinder:
    """Find modules as the path finder does, except for packages that cannot work here."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_repaired = name in ("torchvision", *HIDDEN) and path is None and is_broken(name)
        if is_repaired and name in HIDDEN:
            return None
        spec = self.finder.find_spec(name, path, target)
        if is_repaired:
            spec.loader = OperatorsFirstLoader(spec.loader)
        return spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)  # find_distributions, invalidate_caches


class OperatorsFirstLoader:
    """Load torchvision with its own loader after declaring its operators."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def exec_module(self, module: ModuleType) -> None:
        declare_torchvision_operators()
        assert module.__spec__ is not None, "a module that is imported has a spec"
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)  # create_module


@lru_cache(maxsize=1)
def declare_torchvision_operators() -> Any:
    """Declare the operators that torchvision's Python code registers shapes for; they have no kernel."""
    import torch  # noqa: PLC0415 - takes seconds; the caller imports torchvision, which imports torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in OPERATORS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    return library  # the cache keeps it alive, and so the declarations


@lru_cache
def _torch_is_cpu_only() -> bool:
    """Read from torch's version file: importing torch takes seconds."""
    folder = _folder("torch")
    file = folder and folder / "version.py"
    if file is None or not file.is_file():
        return False
    return not re.search(r"^(cuda|hip|rocm|xpu)\b[^=\n]*=\s*['\"]", file.read_text(), re.MULTILINE)


@lru_cache
def _is_linked_to_cuda(package: str) -> bool:
    folder = _folder(package)
    return folder is not None and any(_names_a_cuda_library(file) for file in sorted(folder.rglob("*.so")))


def _names_a_cuda_library(file: Path) -> bool:
    if file.stat().st_size == 0:
        return False
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return any(content.find(library) >= 0 for library in CUDA_LIBRARIES)


def _folder(package: str) -> Path | None:
    spec = PathFinder.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
