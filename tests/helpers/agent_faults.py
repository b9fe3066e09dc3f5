# SPDX-License-Identifier: Apache-2.0
"""A tiny policy that draws its turns at random from about twenty calls, each with a fault of its own.

Its tokenizer has a token for each call, and nearly all of its probability is on them, in equal parts.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.faults.runs import Run
from tests.helpers.agent_runs import write_dots
from tests.helpers.quickstart import COLORS
from tests.helpers.training import ROOT, quickstart_arguments
from verl.models.tiny import save_tiny_model

LIMIT_S = 10.0  # of a call; no good one takes a second, except on a machine that is overloaded
MEMORY_GB = 0.5

TOOLS = '''
import ctypes, io, os, signal, struct, subprocess, sys, time, zlib

from PIL import Image

from verl.agents.interface import Observation


def fault(kind: str):
    """Do something.

    Args:
        kind: Function of this file.
    """
    with open(__file__ + ".calls", "a") as file:
        file.write(kind + "\\n")
    return globals()[kind]()

def good():
    return "fine"

def hang():
    time.sleep(100_000)

def complain():
    raise ValueError("bad day " * 100_000)

def leave():
    os._exit(3)

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def crash():
    ctypes.string_at(0)

def fill_memory():
    data = []
    while True:
        data.append(bytearray(1 << 28))

def long():
    return "a" * 5_000_000 + "z" * 5_000_000

def thing():
    return object()

def endless_reward():
    return Observation("much", reward=float("nan"))

def damaged_image():
    return Observation("see", images=[b"no image"])

def large_image():
    """Return a PNG of 200 bytes with 10 gigapixels."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    start = bytes([137, 80, 78, 71, 13, 10, 26, 10])
    return Observation("see", images=[start + chunk(b"IHDR", header) + chunk(b"IEND", b"")])

def exit_politely():
    sys.exit("bye")

def interrupt():
    raise KeyboardInterrupt

def leave_a_child():
    subprocess.Popen(["sleep", "100000"], start_new_session=True)
    return "it runs on"

def flood():
    for _ in range(1000):
        print("x" * 10_000, flush=True)
    return "written"

def close_files():
    os.closerange(0, 4096)
    return "closed"


class Unmade:
    """A state that cannot be made."""

    name = "unmade"

    def create(self, row):
        raise KeyError("no such row")

    def __call__(self, state) -> str:
        """Never called."""
        return "made"

    def close(self, state):
        pass


class Kept:
    """A state that does not close."""

    name = "kept"

    def create(self, row):
        return {}

    def __call__(self, state) -> str:
        """Answer."""
        return "kept"

    def close(self, state):
        raise OSError("stuck")
'''


def written(name: str, **arguments: Any) -> str:
    """Return a call as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


FAILING = {  # faults of tools and the reasons given, as patterns
    "hang": rf"fault did not answer within {LIMIT_S:g} s",
    "complain": "fault failed: ValueError: bad day",
    "leave": "fault exited with status 3",
    "kill": "fault was killed by SIGKILL",
    "crash": "fault was killed by SIGSEGV",
    # filling it takes longer than the limit on a machine that is overloaded
    "fill_memory": f"fault (failed: it needs more than the 0.5 GiB|did not answer within {LIMIT_S:.0f} s)",
    "thing": "fault returned object, not text",
    "endless_reward": "fault returned a reward that is no finite number in float32: nan",
    "damaged_image": "fault returned an image that cannot be read",
    "large_image": "fault returned an image",
    "exit_politely": "fault failed: SystemExit: bye",
    "interrupt": "fault failed: KeyboardInterrupt",
    "close_files": "fault ",
    "unmade": "unmade failed: KeyError: 'no such row'",
}
ANSWERED = {  # the tool, or what the policy wrote, is not to blame for more than the answer says
    "good": "fine",
    "long": "aaa",
    "leave_a_child": "it runs on",
    "flood": "written",
    "kept": "kept",
}
REFUSED = {  # mistakes of the policy
    "no_tool": "Error: There is no tool 'blame'",
    "no_json": "Error: the text after <tool_call> is no JSON object",
    "no_kind": "Error: fault was not called: `kind` is missing",
    "wrong_kind": "Error: fault was not called: `kind` must be string",
}
OWN_CALLS = {
    "unmade": written("unmade"),
    "kept": written("kept"),
    "no_tool": written("blame", kind="good"),
    "no_json": '<tool_call>\n{"name": "fault", "arguments": {kind}\n</tool_call>',
    "no_kind": written("fault"),
    "wrong_kind": written("fault", kind=3),
}
REASONS = FAILING | ANSWERED | REFUSED
CALLS = {kind: OWN_CALLS.get(kind, written("fault", kind=kind)) for kind in REASONS}
KINDS = {text: kind for kind, text in CALLS.items()}


def save_policy(folder: Path, texts: tuple[str, ...], seed: int = 0) -> Path:
    """Write a model whose turns are one of these texts each, all about as likely."""
    save_tiny_model(folder, "qwen2_5_vl", seed=seed, added_tokens=texts)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert all(len(end) == 1 for end in ends), "each text is one token"
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["eos_token_id"] += [end for [end] in ends]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    file = folder / "model.safetensors"
    weights = load_file(file)
    [name] = [name for name in weights if name.endswith("embed_tokens.weight")]  # the head's too
    direction = torch.nn.functional.normalize(torch.ones(weights[name].shape[1]), dim=0)
    rows = [end for [end] in ends]
    weights[name][rows] *= 0.3  # they differ little
    weights[name] += 32 * direction  # what every position has in common, its output too
    weights[name][rows] += direction
    save_file(weights, file, metadata={"format": "pt"})
    return folder


REWARD = """
REWARD_TYPE = "sequential"


def compute_score(entry):
    return {"overall": 1.0 + sum(map(ord, entry["response"])) % 7, "calls": len(entry["tool_calls"])}
"""


def save_files(folder: Path, texts: tuple[str, ...]) -> Path:
    """Write model, rows, tools and reward function of runs that meet faults."""
    save_policy(folder / "model", texts)
    write_dots(folder, "train", 12, 1)
    write_dots(folder, "val", 4, 2)
    (folder / "tools.py").write_text(TOOLS)
    (folder / "score.py").write_text(REWARD)
    return folder


WITH_TOOLS = tuple(CALLS.values()) + tuple(COLORS)[:1]


def options_of(folder: Path) -> list[str]:
    """Options that name the tools."""
    tools = ",".join(f"{folder / 'tools.py'}:{name}" for name in ("fault", "Unmade", "Kept"))
    return [f"worker.rollout.multi_turn.tools=[{tools}]"]


def num_calls(folder: Path) -> int:
    """Return the number of calls that reached the tool `fault` in all runs of a folder."""
    file = folder / "tools.py.calls"
    return len(file.read_text().splitlines()) if file.exists() else 0


def start(folder: Path, output: Path, *options: str, env: dict[str, str] | None = None) -> Run:
    """Start a run of two processes and two steps."""
    return Run(output, arguments_of(folder, *options), env=env)


def arguments_of(folder: Path, *options: str) -> list[str]:
    """Return the arguments of a run of two processes and two steps."""
    return quickstart_arguments(
        folder,
        folder / "model",
        f"data.max_pixels={56 * 56}",
        f"data.override_chat_template={ROOT / 'examples/chat_template/tiny_tools.jinja'}",
        "data.max_prompt_length=64",
        "data.max_response_length=320",
        "worker.rollout.limit_images=2",
        "worker.rollout.n=8",
        "worker.rollout.name=hf",
        "worker.rollout.multi_turn.enable=true",
        "worker.rollout.multi_turn.max_assistant_turns=3",
        "worker.rollout.multi_turn.max_tokens_per_turn=1",
        "worker.rollout.multi_turn.max_tool_response_length=100",
        "worker.rollout.multi_turn.tool_concurrency=16",
        f"worker.rollout.multi_turn.tool_timeout_s={LIMIT_S}",
        f"worker.rollout.multi_turn.tool_memory_limit_gb={MEMORY_GB}",
        f"worker.reward.reward_function={folder / 'score.py'}:compute_score",
        "data.rollout_batch_size=8",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "trainer.save_freq=1",
        "trainer.save_limit=-1",
        "trainer.max_steps=2",
        *options,
    )
