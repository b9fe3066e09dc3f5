# SPDX-License-Identifier: Apache-2.0
"""CUDA builds next to a CPU-only torch, in fresh processes, with made-up packages and with the real ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.models.tiny import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
REPORT = """
import importlib.metadata, importlib.util, json, os, subprocess, sys
def found(name):
    return importlib.util.find_spec(name) is not None
def imported(name):
    try:
        return getattr(__import__(name), "state", "no state")
    except ImportError as error:
        return type(error).__name__
report = {
    "found": {name: found(name) for name in ("torchvision", "torchaudio", "torchcodec")},
    "imported": {name: imported(name) for name in ("torchvision", "torchaudio", "torchcodec")},
    "version": importlib.metadata.version("torchaudio"),
    "own": "own_sitecustomize" in sys.modules,
}
"""


def make_site(folder, *, torch_cuda, linked_to_cuda):
    """A folder of packages that behave like the real ones: CUDA builds raise unless torch has CUDA."""
    for name in ("torch", "torchvision", "torchaudio", "torchcodec"):
        (folder / name).mkdir(parents=True)
        library = b"\x7fELF" + (b"libc10_cuda.so" if linked_to_cuda else b"libc10.so")
        (folder / name / "_C.so").write_bytes(library)
    version = f"cuda: 'str | None' = {torch_cuda!r}\nhip: 'str | None' = None\n"
    (folder / "torch" / "version.py").write_text(version)
    (folder / "torch" / "__init__.py").write_text(
        "from types import SimpleNamespace\n"
        "class Library:\n"
        "    def __init__(self, name, kind): self.name = name\n"
        "    def define(self, schema): setattr(getattr(ops, self.name), schema.split('(')[0], schema)\n"
        "library = SimpleNamespace(Library=Library)\n"
        "ops = SimpleNamespace(torchvision=SimpleNamespace())\n"
    )
    needs = f"{linked_to_cuda!r} and not {torch_cuda!r}"
    (folder / "torchvision" / "__init__.py").write_text(
        f"import torch\nif {needs}: torch.ops.torchvision.nms\nstate = sorted(vars(torch.ops.torchvision))\n"
    )
    for name in ("torchaudio", "torchcodec"):
        code = f"state = 'works'\nif {needs}: raise OSError('libc10_cuda.so')\n"
        (folder / name / "__init__.py").write_text(code)
    info = folder / "torchaudio-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchaudio\nVersion: 1.2.3\n")
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['own_sitecustomize'] = sys\n")
    return folder


def run(code, *paths, options=()):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, *options, "-c", code]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


REPAIR = "from verl.utils.cuda_builds import repair_cuda_builds; repair_cuda_builds()\n"
IN_A_CHILD = "print(subprocess.check_output([sys.executable, '-c', CODE], text=True))"


@pytest.mark.parametrize("where", ["this process", "a child that does not know verl"])
def test_cuda_builds_are_repaired_or_hidden_if_torch_is_cpu_only(where, tmp_path):
    site = make_site(tmp_path, torch_cuda=None, linked_to_cuda=True)
    ending = "print(json.dumps(report))"
    code = REPAIR + REPORT + ending
    if where != "this process":
        code = REPAIR + f"CODE = {REPORT + ending!r}\nimport subprocess, sys\n" + IN_A_CHILD

    report = json.loads(run(code, site, ROOT))

    assert report["found"] == {"torchvision": True, "torchaudio": False, "torchcodec": False}
    hidden = "ModuleNotFoundError"
    assert report["imported"] == {"torchvision": ["nms", "qnms"], "torchaudio": hidden, "torchcodec": hidden}
    assert report["version"] == "1.2.3"  # the metadata of installed packages stay readable
    assert report["own"]  # the environment's own sitecustomize has run, in the child too


@pytest.mark.parametrize(("torch_cuda", "linked_to_cuda"), [(None, False), ("13.0", True)])
def test_builds_that_fit_torch_are_left_alone(torch_cuda, linked_to_cuda, tmp_path):
    site = make_site(tmp_path, torch_cuda=torch_cuda, linked_to_cuda=linked_to_cuda)

    report = json.loads(run(REPAIR + REPORT + "print(json.dumps(report))", site, ROOT))

    assert all(report["found"].values())
    assert report["imported"] == {"torchvision": [], "torchaudio": "works", "torchcodec": "works"}


def test_importing_the_package_imports_neither_torch_nor_torchvision():
    code = REPAIR + "import sys; print({'torch', 'torchvision', 'numpy'} & set(sys.modules))"

    assert run(code, ROOT).strip() == "set()"


def test_importing_the_package_leaves_the_import_machinery_alone(tmp_path):
    site = make_site(tmp_path, torch_cuda=None, linked_to_cuda=True)
    code = "import os, sys; before = list(sys.meta_path), dict(os.environ); import verl\n"
    code += "print(before == (sys.meta_path, dict(os.environ)))"

    assert run(code, site, ROOT).strip() == "True"


@pytest.mark.parametrize(("linked_to_cuda", "is_warned"), [(True, True), (False, False)])
def test_a_script_that_imports_transformers_first_is_told_what_to_do(linked_to_cuda, is_warned, tmp_path):
    site = make_site(tmp_path, torch_cuda=None, linked_to_cuda=linked_to_cuda)
    (site / "transformers.py").touch()
    code = "import warnings\nwith warnings.catch_warnings(record=True) as caught:\n"
    code += "    import transformers, verl\nprint([str(one.message) for one in caught])"

    told = run(code, site, ROOT, options=["-S"])  # without what repairs this environment
    assert ("run `verl-doctor --repair` once" in told) == is_warned


@pytest.mark.parametrize(("torch_cuda", "is_written"), [(None, True), ("13.0", False)])
def test_a_repaired_environment_repairs_processes_that_do_not_import_the_package(
    torch_cuda, is_written, tmp_path
):
    site = make_site(tmp_path / "site", torch_cuda=torch_cuda, linked_to_cuda=True)
    (site / "easy_verl_cuda_builds.pth").write_text("import a_stale_file\n")
    run(
        "from pathlib import Path; from verl.utils.cuda_builds import repair_environment\n"
        f"assert repair_environment(Path({str(site)!r})) == {is_written}",
        site,
        ROOT,
    )

    start = f"import site; site.addsitedir({str(site)!r})\n"
    report = json.loads(run(f"{start}{REPORT}print(json.dumps(report))", site))

    assert (site / "easy_verl_cuda_builds.pth").exists() == is_written
    assert report["imported"]["torchvision"] == (["nms", "qnms"] if is_written else [])
    assert report["found"]["torchaudio"] != is_written


def test_the_path_file_of_a_deleted_clone_does_nothing(tmp_path):
    site = make_site(tmp_path / "site", torch_cuda=None, linked_to_cuda=True)
    clone = tmp_path / "cuda_builds.py"
    clone.write_text((ROOT / "verl/utils/cuda_builds.py").read_text())
    code = (
        "from pathlib import Path; from cuda_builds import repair_environment\n"
        f"repair_environment(Path({str(site)!r}))"
    )
    run(code, tmp_path, site)
    clone.unlink()

    assert run(f"import site; site.addsitedir({str(site)!r}); print('runs')", site).strip() == "runs"


LOADED = """
import sys
import transformers
assert "verl" not in sys.modules
for name, folder in zip(("CausalLM", "ImageTextToText", "MultimodalLM"), sys.argv[1:]):
    model = getattr(transformers, "AutoModelFor" + name).from_pretrained(folder)
    transformers.AutoProcessor.from_pretrained(folder)
    print(type(model).__name__)
"""


def test_plain_transformers_loads_models_of_text_images_and_audio_in_this_environment(tmp_path):
    folders = [str(save_tiny_model(tmp_path / kind, kind)) for kind in ("qwen3", "qwen2_5_vl", "qwen2_audio")]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", LOADED, *folders]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    assert result.returncode == 0, f"{result.stderr}\n`verl-doctor --repair` mends it"
    assert result.stdout.split() == [
        "Qwen3ForCausalLM", "Qwen2_5_VLForConditionalGeneration", "Qwen2AudioForConditionalGeneration",
    ]  # fmt: skip


@pytest.mark.nightly
def test_the_installed_torchvision_works_in_a_process_that_only_inherits_the_environment():
    code = (
        "import torchvision, torch\n"
        "from torchvision.transforms.v2 import functional as F\n"
        "print(F.resize(torch.zeros(1, 3, 8, 8), [4, 4]).shape[-1])"
    )

    start = REPAIR + f"import subprocess, sys\nCODE = {code!r}\n"

    assert run(start + IN_A_CHILD, ROOT).strip().splitlines()[-1] == "4"
