# SPDX-License-Identifier: Apache-2.0
"""Run at the start of child processes: repair CUDA builds, then the environment's own sitecustomize."""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

HERE = Path(__file__).resolve().parent


def _run(spec: ModuleSpec | None) -> None:
    assert spec is not None and spec.loader is not None, "the file is there"
    module = module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)


_run(spec_from_file_location("_verl_cuda_builds", HERE.parent / "cuda_builds.py"))
sys.modules["_verl_cuda_builds"].repair_cuda_builds()

_others = [path for path in sys.path if path and Path(path).resolve() != HERE]
_own = PathFinder.find_spec("sitecustomize", _others)
if _own is not None:
    _run(_own)
