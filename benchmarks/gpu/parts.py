# SPDX-License-Identifier: Apache-2.0
"""The parts of `scripts/gpu_check.sh`, in order of value; which of them share a call; what they import.

To add a part, add an entry to `PARTS` whose program prints lines of `Report`.
"""

import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 2  # times the predicted seconds
CALL_S = 280  # three such calls and the start of the machine fit into 15 minutes

# Packages in addition to torch, torchvision and transformers, as pip names them. Only videos use more than a
# stub of av. vLLM 0.26 itself is too large to carry whole; it imports nothing else that it requires.
TRAINER = (
    *("omegaconf", "tensordict", "pyvers", "cloudpickle", "torchao", "av", "peft", "accelerate", "psutil"),
    *("aiohttp", "aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "multidict", "propcache", "yarl"),
)
TESTS = (*TRAINER, "pytest", "pluggy", "iniconfig")
ENGINE = (
    *TRAINER,
    *("annotated-types", "typing-inspection", "apache-tvm-ffi", "cachetools", "cbor2"),
    *("compressed-tensors==0.17.0", "distro", "fastapi", "jsonschema", "jsonschema-specifications"),
    *("referencing", "rpds-py", "llguidance", "loguru", "msgspec", "openai", "jiter", "openai-harmony"),
    *("partial-json-parser", "pybase64", "pydantic", "pydantic-core", "pydantic-extra-types", "pyzmq"),
    *("sniffio", "starlette", "xgrammar", "blake3"),
)

GPU_TESTS = {  # files of tests/gpu that one process of pytest runs
    "kernels": ("attention", "head"),
    "update": ("update", "optimizers", "offload", "experts"),
    "memory": ("memory",),
    "engine": ("rollout",),
    "links": ("weights",),  # two GPUs
}
# Without the options of the suite, which need plugins.
PYTEST = ("-p", "benchmarks.gpu.pytest_laws", "-o", "addopts=", "--continue-on-collection-errors", "-qm")


@dataclass(frozen=True)
class Part:
    """A program."""

    name: str
    predicted_s: int  # on an H100
    wheels: tuple[str, ...]
    headline: tuple[str, ...] = ()  # figures in the table
    call: int = 0  # that it belongs to; 0 is none

    def command(self, options: Namespace, models: Path) -> list[str]:
        kind, _, case = self.name.partition(".")
        if kind == "tests":
            files = [f"tests/gpu/test_{name}_cuda.py" for name in GPU_TESTS[case]]
            return [sys.executable, "-m", "pytest", *PYTEST, "not gpu" if options.tiny else "gpu", *files]
        given = ["--device", "cpu", "--tiny"] if options.tiny else []
        selected = ["--case", case] if case else []
        program = f"benchmarks.gpu.{kind}"
        return [sys.executable, "-m", program, "--models", str(models), *given, *selected]


SAMPLED = ("log_probs_difference_mean", "sync_1_gb_per_s", "generate_tokens_per_s")
RAN = ("run_s", "step_s", "log_probs_difference")
PARTS = (
    Part("kernels", 90, (), ("attention_grouped_heads_tflops", "head_update_s", "eager_head_update_s")),
    Part("memory", 100, TRAINER, ("load_pinned_gb_per_s", "moved_load_gb_per_s", "moved_offload_gb_per_s")),
    Part("update", 130, (), ("update_mfu", "shared_update_mfu", "update_peak_gib"), call=1),
    Part("tests.kernels", 60, TESTS),
    Part("tests.update", 90, TESTS, call=1),
    Part("tests.memory", 60, TESTS, call=1),
    Part("engine.plain", 110, ENGINE, SAMPLED),
    Part("engine.lora", 65, ENGINE, SAMPLED, call=2),
    Part("engine.moe", 65, ENGINE, SAMPLED, call=2),
    Part("command.steps", 70, ENGINE, RAN, call=2),
    Part("engine.head", 65, ENGINE, SAMPLED, call=2),
    Part("command.learning", 210, ENGINE, (*RAN, "accuracy_before", "accuracy_after"), call=3),
    Part("engine.reserved", 65, ENGINE, SAMPLED, call=3),
    Part("engine.top_p", 65, ENGINE, SAMPLED),
    Part("tests.engine", 120, (*ENGINE, *TESTS)),
    Part("tests.links", 90, TESTS),
)


def chosen_parts(only: str | None, call: int | None = None) -> list[Part]:
    """The parts that `--only` names, or those of `--call`; `engine` means all of its cases."""
    if only is None:
        return [part for part in PARTS if call in (None, part.call)]
    names = set(only.split(","))
    known = {name for part in PARTS for name in (part.name, part.name.partition(".")[0])}
    if names - known:
        raise SystemExit(f"gpu_check: unknown parts {sorted(names - known)}: choose from {sorted(known)}")
    return [part for part in PARTS if {part.name, part.name.partition(".")[0]} & names]
