# SPDX-License-Identifier: Apache-2.0
"""What is asked of GPUs before a run: driver, build of torch, architecture, memory. See `diagnosis.py`."""

import subprocess
import sys
from collections.abc import Sequence

from verl.cli.diagnosis import Finding, Level
from verl.distributed.gpus import Gpu

USED_SHARE = 0.1  # of a GPU's memory: more belongs to another program
IMPORTS = ("torch", "transformers", "ray", "vllm")
IMPORT_TIMEOUT_S = 300
IMPORT_CODE = """
import sys, verl
for name in sys.argv[1:]:
    print(name, flush=True)
    __import__(name)
"""


def check_gpus(gpus: Sequence[Gpu], device: str, num_wanted: int) -> list[Finding]:
    """Whether torch can compute on the GPUs, and whether they are free.

    Args:
        gpus: What the driver shows.
        device: `trainer.device`.
        num_wanted: GPUs that a run takes on this machine, at most.
    """
    try:
        import torch  # noqa: PLC0415 - a torch that cannot be imported is a finding
    except (ImportError, OSError) as error:
        return [Finding("gpus", Level.FAIL, f"torch: {error}", "install torch anew, see the README")]
    if not gpus and not torch.cuda.is_available():
        level = Level.FAIL if device == "cuda" else Level.OK
        remedy = "set trainer.device=cpu, or install the driver" if device == "cuda" else ""
        return [Finding("gpus", level, "none that the driver shows: runs use the CPU", remedy)]
    driver = gpus[0].driver if gpus else "unknown"
    found = f"{', '.join(gpu.name for gpu in gpus)}; driver {driver}, torch for CUDA {torch.version.cuda}"
    if device == "cpu":
        return [Finding("gpus", Level.OK, f"{found}; not used: trainer.device=cpu")]
    if torch.version.cuda is None:
        return [Finding("gpus", Level.FAIL, found, "pip install -e '.[gpu]' into a new environment")]
    if not torch.cuda.is_available():
        remedy = "a newer driver (`nvidia-smi` names the CUDA it serves), or unset CUDA_VISIBLE_DEVICES"
        return [Finding("gpus", Level.FAIL, f"{found}; torch sees none", remedy)]
    findings = [Finding("gpus", Level.OK, found)]
    if torch.cuda.device_count() < num_wanted:
        remedy = "lower `trainer.n_gpus_per_node`, or unset CUDA_VISIBLE_DEVICES"
        found = f"{torch.cuda.device_count()} usable, a run takes {num_wanted} on each node"
        findings.append(Finding("number of gpus", Level.FAIL, found, remedy))
    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    findings.append(_check_architectures(capabilities, torch.cuda.get_arch_list()))
    return [*findings, _check_memory(gpus)]


def _check_architectures(capabilities: Sequence[tuple[int, int]], built_for: Sequence[str]) -> Finding:
    unknown = sorted({one for one in capabilities if not is_built_for(one, built_for)})
    if not unknown:
        return Finding("gpu architecture", Level.OK, f"compute capability {sorted(set(capabilities))}")
    found = f"compute capability {unknown}, torch was built for {list(built_for)}"
    return Finding(
        "gpu architecture", Level.FAIL, found, "a torch that was built for this GPU, or another GPU"
    )


def is_built_for(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Whether one of `sm_80`, `compute_90`, ... runs on a GPU of this compute capability.

    Machine code (`sm`) runs on the same generation from its own version on, `compute` is compiled for any
    later one. A letter behind the number (`sm_90a`) means this version alone.
    """
    for name in built_for:
        kind, _, digits = name.partition("_")
        number = digits.rstrip("af")
        version = (int(number[:-1]), int(number[-1]))
        is_later = capability >= version and (kind == "compute" or capability[0] == version[0])
        if capability == version or (is_later and number == digits):
            return True
    return False


def _check_memory(gpus: Sequence[Gpu]) -> Finding:
    used = [
        f"{gpu.used_mib / 1024:.0f} of {gpu.memory_mib / 1024:.0f} GiB of GPU {index}"
        for index, gpu in enumerate(gpus)
        if gpu.used_mib > USED_SHARE * gpu.memory_mib
    ]
    if used:
        remedy = "end the programs that `nvidia-smi` lists, or choose GPUs with CUDA_VISIBLE_DEVICES"
        return Finding("gpu memory", Level.WARN, f"in use: {', '.join(used)}", remedy)
    sizes = ", ".join(f"{gpu.memory_mib / 1024:.0f} GiB" for gpu in gpus)
    return Finding("gpu memory", Level.OK, f"free: {sizes or 'not told by the driver'}")


def check_imports(modules: Sequence[str] = IMPORTS) -> Finding:
    """Whether the heavy packages can be imported, tried in a process of its own."""
    command = [sys.executable, "-c", IMPORT_CODE, *modules]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        found = f"no answer within {IMPORT_TIMEOUT_S} s"
        return Finding("imports", Level.FAIL, found, "look at the disk that the environment lies on")
    if tried.returncode == 0:
        return Finding("imports", Level.OK, ", ".join(modules))
    begun = [line for line in tried.stdout.splitlines() if line in modules]
    reason = (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
    remedy = f"python3 -c 'import verl, {begun[-1] if begun else 'torch'}' shows all of it"
    return Finding("imports", Level.FAIL, f"{begun[-1] if begun else 'verl'}: {reason}", remedy)
