# SPDX-License-Identifier: Apache-2.0
"""Make the mistakes of a new user with the real commands; measure the seconds and record the answers.

    python benchmarks/mistakes.py [--only NAME ...] [--needs nothing|model|ray] [--json FILE] [--show]

A mistake is a run that works, with something wrong in its files or arguments. `--needs nothing` leaves out
mistakes whose answer takes a model or Ray. The JSON file has the output of each and a `score` from 0 to 5,
for a reader to fill in. The exit status is 1 if an answer lacks a word that it must have, has one that
misleads, a traceback, or too many lines.
"""

import argparse
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from verl.distributed.gpus import shows_gpu

ROOT = Path(__file__).resolve().parents[1]
NEEDS = ("nothing", "model", "ray")  # each includes the ones before it
MAX_LINES = 12
LIMIT_S = 400
EMPTY_WEIGHTS = b"\x02" + bytes(7) + b"{}"  # of safetensors: the length of its header, and no tensor
SKIPPED = re.compile(r"in the configuration:|^\d\d:\d\d:\d\d INFO ")  # the first line follows
TRACEBACK, JARGON = "Traceback (most recent call last)", "<unicode string>"
TRAIN = ("-m", "verl.trainer.main", "config=run.yaml")
CHECK = (str(ROOT / "scripts/data_check.py"), "config=run.yaml")
VIEW = (str(ROOT / "scripts/rollout_viewer.py"),)
MODEL = "worker.actor.model.model_path"
REWARD_FILE = "worker.reward.reward_function=other.py:compute_score"

RUN = """\
data:
  train_files: train.jsonl
  val_files: val.jsonl
  prompt_key: problem
  answer_key: answer
  format_prompt: prompt.jinja
  max_prompt_length: 64
  max_response_length: 4
  rollout_batch_size: 8
  min_pixels: 784
  max_pixels: 50176
  filter_overlong_prompts_workers: 1
  num_workers: 0
algorithm:
  adv_estimator: grpo
  disable_kl: true
worker:
  actor:
    global_batch_size: 8
    micro_batch_size_per_device_for_update: 4
    micro_batch_size_per_device_for_experience: 4
    model:
      model_path: tiny-model
    fsdp:
      mp_param_dtype: fp32
  rollout:
    n: 2
    dtype: float32
    tensor_parallel_size: 1
    enforce_eager: true
  reward:
    reward_function: reward.py:compute_score
trainer:
  device: cpu
  n_gpus_per_node: 2
  max_steps: 1
  logger: [console, file]
  save_checkpoint_path: run
"""
REWARD = """\
REWARD_TYPE = "batch"


def compute_score(reward_inputs):
    return [{"overall": float(item["response"] == item["ground_truth"])} for item in reward_inputs]
"""
ROWS = "".join(json.dumps({"problem": f"What is {a} + 2?", "answer": str(a + 2)}) + "\n" for a in range(16))
MEDIA_ROW = {"problem": "Which color?", "answer": "red"}


def rows(**columns: object) -> str:
    """Return rows with further columns as JSON lines."""
    return "".join(json.dumps(MEDIA_ROW | columns) + "\n" for _ in range(16))


def reward(body: str, arguments: str = "reward_inputs") -> str:
    """Return a reward file whose function has this body."""
    return f'REWARD_TYPE = "batch"\n\n\ndef compute_score({arguments}):\n    {body}\n'


@dataclass(frozen=True)
class Mistake:
    """A run that works, with something wrong."""

    name: str
    arguments: tuple[str, ...] = ()  # `{port}` is one that is in use
    must_say: tuple[str, ...] = ()
    must_not_say: tuple[str, ...] = ()
    files: Mapping[str, str | bytes] = field(
        default_factory=dict
    )  # to write, in addition to those of the run
    edits: tuple[tuple[str, str], ...] = ()  # of `run.yaml`: old and new text
    command: tuple[str, ...] = TRAIN
    before: tuple[str, ...] | None = None  # arguments of a run that succeeds first
    needs: str = "nothing"
    may_trace: bool = False  # the user's own traceback is part of the answer
    may_succeed: bool = False  # the answer may be a warning


@dataclass(frozen=True)
class Answer:
    """The answer to a mistake."""

    name: str
    needs: str
    seconds: float
    cpu_seconds: float  # of the command and its processes: the same on a busy machine
    status: int | None  # None: stopped after the limit
    lines: int
    faults: list[str]
    output: str
    score: int | None = None  # 0 to 5, by a reader


def unknown(key: str, says: str, *not_says: str) -> Mistake:
    """Return the mistake of an option that does not exist."""
    return Mistake(f"unknown key {key}", (f"{key}=2",), (f"`{key}` is not an option", says), not_says)


def yaml_mistake(name: str, old: str, new: str, *says: str) -> Mistake:
    return Mistake(name, edits=((old, new),), must_say=("run.yaml, line ", *says), must_not_say=("token",))


KEYS = (
    unknown("workr.rollout.n", "did you mean `worker.rollout.n`?"),
    unknown("worker.actor.optim.learning_rate", "`worker.actor.optim.lr`", "padding_free"),
    unknown("worker.rollout.num_generations", "`worker.rollout.n`", "val_generations"),
    unknown("algorithm.beta", "`algorithm.kl_coef`", "worker.prime"),
    unknown("data.max_completion_length", "`data.max_response_length`", "max_prompt_length"),
    unknown("trainer.num_train_epochs", "`trainer.total_epochs`"),
    unknown("trainer.gradient_accumulation_steps", "no counterpart here"),
    unknown("worker.actor.ulysses_sequence_parallel_size", "`worker.actor.ulysses_size`", "tensor_parallel"),
    unknown("trainer.wandb", "`--help trainer` lists", "did you mean"),
)
VALUES = (
    Mistake(
        "wrong type", ("trainer.save_freq=often",), ("`trainer.save_freq` must be an integer", "'often'")
    ),
    Mistake(
        "batch that does not divide",
        ("data.rollout_batch_size=12",),
        ("`data.rollout_batch_size` (12)", "`worker.actor.global_batch_size` (8)", "=6", "=16"),
    ),
    Mistake(
        "one response for GRPO",
        ("worker.rollout.n=1", "worker.actor.global_batch_size=1"),
        ("1 problem", "`worker.rollout.n` must be at least 2"),
        ("micro_batch",),
    ),
    Mistake(
        "tensor parallelism beyond the processes",
        ("worker.rollout.tensor_parallel_size=2", "trainer.n_gpus_per_node=1"),
        ("`worker.rollout.tensor_parallel_size=1`",),
    ),
    Mistake(
        "GAE without critic",
        ("algorithm.adv_estimator=gae",),
        ("`worker.critic.model.model_path` must be set",),
    ),
    Mistake(
        "estimator misspelled", ("algorithm.adv_estimator=grpoo",), ("must be one of", "'grpo'", "'grpoo'")
    ),
    Mistake(
        "memory beyond the GPU",
        ("worker.rollout.gpu_memory_utilization=1.5",),
        ("`worker.rollout.gpu_memory_utilization` must be", "at most 1.0"),
    ),
    Mistake(
        "more processes than cores",
        ("trainer.n_gpus_per_node=4096",),
        ("`trainer.n_gpus_per_node` (4096)", "this machine has", "core"),
        ("micro_batch", "divisible"),
    ),
    Mistake(
        "more processes than cores, and all divides",
        (
            "trainer.n_gpus_per_node=4096",
            "data.rollout_batch_size=16384",
            "worker.actor.global_batch_size=16384",
        ),
        ("`trainer.n_gpus_per_node` (4096)", "this machine has"),
    ),
    Mistake(
        "logger without brackets",
        ("trainer.logger=console,file",),
        ("""trainer.logger='["console","file"]'""",),
    ),
    Mistake(
        "mapping without quotes",
        ("worker.reward.reward_function_kwargs={a:", "1}"),
        ("the shell", "worker.reward.reward_function_kwargs='{a: 1}'"),
    ),
    Mistake(
        "wandb is not installed",
        ("trainer.logger=[console,wandb]",),
        ("pip install wandb",),
        files={"wandb.py": "raise ModuleNotFoundError(\"No module named 'wandb'\", name='wandb')\n"},
    ),
    Mistake(
        "context of the model",
        ("data.max_response_length=5000", "worker.rollout.max_num_batched_tokens=8192"),
        ("`data.max_response_length` (5064) must be at most 4096", "`max_position_embeddings`"),
    ),
    Mistake("no GPU", ("trainer.device=cuda",), ("`trainer.device` (cuda) needs a GPU",)),
)
YAML = (
    yaml_mistake("tabs", "  n_gpus_per_node", "\tn_gpus_per_node", "starts with a tab"),
    yaml_mistake("wrong indent", "  max_steps", "   max_steps", "indented further than line"),
    yaml_mistake("indent of no line above", "  max_steps", " max_steps", "indented by 1 space"),
    yaml_mistake(
        "key twice", "  max_steps: 1", "  max_steps: 1\n  max_steps: 2", "`max_steps` is there already"
    ),
    yaml_mistake("open bracket", "[console, file]", "[console, file", "the [", "is not closed"),
    yaml_mistake("no space after the colon", "train_files: ", "train_files:", "needs `: `"),
    yaml_mistake("template in YAML", "prompt.jinja", "{{ content }}", "needs quotes"),
)
PATHS = (
    Mistake(
        "no config", command=(*TRAIN[:2], "config=rnu.yaml"), must_say=("no file", "did you mean ./run.yaml?")
    ),
    Mistake(
        "no training data", ("data.train_files=trainn.jsonl",), ("no file", "did you mean ./train.jsonl?")
    ),
    Mistake(
        "no validation data", ("data.val_files=missing/val.jsonl",), ("`data.val_files`: no file or folder",)
    ),
    Mistake(
        "no template", ("data.format_prompt=prompts.jinja",), ("no file", "did you mean ./prompt.jinja?")
    ),
    Mistake(
        "no reward file", ("worker.reward.reward_function=rewards.py:x",), ("did you mean ./reward.py?",)
    ),
    Mistake(
        "reward function misspelled",
        ("worker.reward.reward_function=reward.py:compute",),
        ("has no function 'compute'", "'compute_score'"),
    ),
    Mistake(
        "--config run.yaml",
        command=(*TRAIN[:2], "--config", "run.yaml"),
        must_say=("`--config` is not a switch",),
    ),
    Mistake("run.yaml alone", command=(*TRAIN[:2], "run.yaml"), must_say=("config=run.yaml",)),
    Mistake(
        "model misspelled",
        (f"{MODEL}=tiny-modell",),
        ("no folder", "did you mean ./tiny-model?"),
        ("huggingface.co",),
    ),
    Mistake(
        "model folder misspelled", (f"{MODEL}=./tiny-modell",), ("no folder", "did you mean ./tiny-model?")
    ),
    Mistake(
        "adapter as model",
        (f"{MODEL}=adapter",),
        ("is a LoRA adapter", "lora.path="),
        files={"adapter/adapter_config.json": '{"base_model_name_or_path": "tiny-model"}'},
    ),
    Mistake("folder without model", (f"{MODEL}=notes",), ("has no config.json",), files={"notes/a.txt": "a"}),
    Mistake(
        "model without weights",
        (f"{MODEL}=bare",),
        ("has no weights",),
        files={"bare/config.json": '{"max_position_embeddings": 4096}'},
    ),
    Mistake(
        "checkpoint folder that cannot be written",
        ("trainer.save_checkpoint_path=/proc/run",),
        ("must be a folder that can be written",),
    ),
    Mistake(
        "no run to view", ("runz",), ("no folder", "did you mean ./run?"), files={"run/a": ""}, command=VIEW
    ),
    Mistake("no run in a folder", (".",), ("no run in",), command=VIEW),
    Mistake(
        "port of the viewer in use",
        ("--port={port}", "run"),
        ("port {port} is not available", "--port=0"),
        files={"run/metrics.jsonl": "{}\n", "run/experiment_log.jsonl": "{}\n"},
        command=VIEW,
    ),
)
DATA = tuple(
    Mistake(name, arguments, says, files=files, command=command, needs="model", may_succeed=command is CHECK)
    for name, arguments, says, files, command in (
        (
            "prompt column missing",
            ("data.prompt_key=question",),
            ("`question`", "data.prompt_key"),
            {},
            TRAIN,
        ),
        ("answer column missing", ("data.answer_key=label",), ("`label`", "data.answer_key"), {}, TRAIN),
        (
            "image column has another name, with marker",
            (f"{MODEL}=tiny-vl", "data.train_files=media.jsonl"),
            ("image",),
            {"media.jsonl": rows(problem="<image>Which color?", image="red.png")},
            TRAIN,
        ),
        (
            "image column has another name, no marker",
            (f"{MODEL}=tiny-vl", "data.train_files=media.jsonl"),
            ("image",),
            {"media.jsonl": rows(image="red.png")},
            CHECK,
        ),
        (
            "image missing",
            (f"{MODEL}=tiny-vl", "data.train_files=media.jsonl"),
            ("gone.png",),
            {"media.jsonl": rows(problem="<image>Which color?", images=["gone.png"])},
            TRAIN,
        ),
        (
            "video cut off",
            (f"{MODEL}=tiny-vl", "data.train_files=media.jsonl"),
            ("cut.mp4",),
            {"media.jsonl": rows(problem="<video>Which?", videos=["cut.mp4"]), "cut.mp4": b"\0" * 100},
            TRAIN,
        ),
        ("template syntax", (), ("prompt.jinja", "line 1"), {"prompt.jinja": "{{ content "}, TRAIN),
        ("template with an undefined name", (), ("'contents'",), {"prompt.jinja": "{{ contents.x }}"}, TRAIN),
        ("prompt too long", ("data.max_prompt_length=4",), ("`data.max_prompt_length` (4)",), {}, TRAIN),
        (
            "JSON line broken",
            (),
            ("train.jsonl", "line 5"),
            {"train.jsonl": ROWS.replace('{"problem": "What is 4', '{"problem "What is 4')},
            TRAIN,
        ),
        (
            "Parquet corrupt",
            ("data.train_files=train.parquet",),
            ("train.parquet",),
            {"train.parquet": b"PAR1" + b"\0" * 200},
            TRAIN,
        ),
        (
            "more prompts in a step than rows",
            ("data.rollout_batch_size=64", "worker.actor.global_batch_size=64"),
            ("`data.rollout_batch_size` (64)", "16"),
            {},
            TRAIN,
        ),
    )
)
REWARDS = tuple(
    Mistake(name, (REWARD_FILE, *more), says, files={"other.py": file}, needs=needs, may_trace=True)
    for name, file, says, needs, more in (
        (
            "reward with TRL's signature",
            reward("return [0.0 for _ in completions]", "completions, **kwargs"),
            ("other.py",),
            "model",
            (),
        ),
        (
            "reward with verl's signature",
            reward("return 0.0", "data_source, solution_str, ground_truth, extra_info=None"),
            ("other.py", "compute_score"),
            "model",
            (),
        ),
        ("reward that does not import", "import no_such\n" + REWARD, ("other.py", "no_such"), "model", ()),
        ("reward raises", reward("return 1 / 0"), ("other.py", "division by zero"), "ray", ()),
        ("reward returns floats", reward("return [0.0 for _ in reward_inputs]"), ("overall",), "ray", ()),
        (
            "reward is NaN",
            reward("return [{'overall': float('nan')} for _ in reward_inputs]"),
            ("nan",),
            "ray",
            (),
        ),
        (
            "reward hangs",
            reward("import time; time.sleep(900)"),
            ("`worker.reward.timeout_s`",),
            "ray",
            ("worker.reward.timeout_s=5",),
        ),
    )
)
RUNS = (
    Mistake(
        "LoRA pattern that matches nothing",
        ("worker.actor.model.lora.rank=4", "worker.actor.model.lora.target_modules=q_prj"),
        ("`worker.actor.model.lora.target_modules`", "q_prj"),
        needs="model",
    ),
    Mistake(
        "port of a run's viewer in use",
        ("trainer.viewer_port={port}",),
        ("`trainer.viewer_port` ({port})",),
    ),
    Mistake(
        "resumed with other data",
        ("data.train_files=others.jsonl", "trainer.max_steps=2"),
        ("trainer.allow_changed_inputs",),
        files={"others.jsonl": ROWS.replace("What is", "How much is")},
        before=(),
        needs="ray",
    ),
)
MISTAKES = (*KEYS, *VALUES, *YAML, *PATHS, *DATA, *REWARDS, *RUNS)


def chosen(names: Sequence[str], needs: str) -> list[Mistake]:
    """Return the mistakes with one of these names, or all, that need no more than `needs`."""
    unknown_names = set(names) - {mistake.name for mistake in MISTAKES}
    if unknown_names:
        raise SystemExit(f"no mistake is called {sorted(unknown_names)}: see the tables in {__file__}")
    allowed = NEEDS[: NEEDS.index(needs) + 1]
    wanted = [each for each in MISTAKES if each.needs in allowed and (not names or each.name in names)]
    return [each for each in wanted if each.name != "no GPU" or not shows_gpu()]


def write_run(folder: Path, needs: str) -> None:
    """Write the run that works; without a need for it, the models have no usable weights."""
    texts = {"run.yaml": RUN, "reward.py": REWARD, "prompt.jinja": "{{ content }}"}
    for name, text in (texts | {"train.jsonl": ROWS, "val.jsonl": ROWS}).items():
        (folder / name).write_text(text)
    for name, family in (("tiny-model", "qwen2"), ("tiny-vl", "qwen2_5_vl")):
        if needs == "nothing":
            (folder / name).mkdir()
            (folder / name / "config.json").write_text('{"max_position_embeddings": 4096}')
            (folder / name / "model.safetensors").write_bytes(EMPTY_WEIGHTS)
        else:
            make = [sys.executable, str(ROOT / "scripts/make_tiny_model.py"), "--kind", family, "--out", name]
            subprocess.run(make, cwd=folder, check=True, capture_output=True)


def make(mistake: Mistake, working: Path) -> Answer:
    """Make a mistake in a copy of the run that works."""
    with (
        tempfile.TemporaryDirectory(prefix="mistake-") as name,
        closing(socket.create_server(("127.0.0.1", 0))) as busy,
    ):
        folder, port = Path(name), str(busy.getsockname()[1])
        shutil.copytree(working, folder, dirs_exist_ok=True)
        for file, content in mistake.files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        text = (folder / "run.yaml").read_text()
        for old, new in mistake.edits:
            assert text.count(old) == 1, f"{mistake.name}: {old!r} is not in run.yaml once"
            text = text.replace(old, new)
        (folder / "run.yaml").write_text(text)
        if mistake.before is not None:
            status, output, _ = run([*TRAIN, *mistake.before], folder)
            assert status == 0, f"{mistake.name}: the run before failed: {output[-2000:]}"
        command = [part.replace("{port}", port) for part in (*mistake.command, *mistake.arguments)]
        before = _cpu_seconds()
        status, output, seconds = run(command, folder)
    output = output.replace(str(folder), "FOLDER").replace(port, "{port}")
    lines = sum(bool(line.strip()) for line in output.splitlines())
    return Answer(
        name=mistake.name,
        needs=mistake.needs,
        seconds=round(seconds, 1),
        cpu_seconds=round(_cpu_seconds() - before, 1),
        status=status,
        lines=lines,
        faults=list(faults(mistake, status, output)),
        output=output,
    )


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(command: Sequence[str], folder: Path) -> tuple[int | None, str, float]:
    """Run a command of the project; return its exit status, output and seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return None, output, time.monotonic() - started
    return process.returncode, output, time.monotonic() - started


def faults(mistake: Mistake, status: int | None, output: str) -> Iterator[str]:
    """Yield what is wrong with an answer, as far as a program can see."""
    said = " ".join(output.split())
    if status is None:
        yield f"no answer after {LIMIT_S} s"
    if status == 0 and not mistake.may_succeed:
        yield f"exit status {status}"
    for word in mistake.must_say:
        if word not in said:
            yield f"does not say {word!r}"
    for word in (*mistake.must_not_say, JARGON, *(() if mistake.may_trace else (TRACEBACK,))):
        if word in said:
            yield f"says {word!r}"
    lines = sum(bool(line.strip()) for line in output.splitlines())
    if mistake.needs == "nothing" and lines > MAX_LINES and "is not a switch" not in said:
        yield f"{lines} lines"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="make these mistakes only")
    parser.add_argument("--needs", choices=NEEDS, default="ray", help="the most that a mistake may need")
    parser.add_argument("--json", type=Path, help="file for the answers")
    parser.add_argument("--show", action="store_true", help="print whole answers, not their first line")
    switches = parser.parse_args(arguments)
    answers = []
    with tempfile.TemporaryDirectory(prefix="mistakes-") as working:
        mistakes = chosen(switches.only, switches.needs)
        write_run(Path(working), max((each.needs for each in mistakes), key=NEEDS.index, default="nothing"))
        for mistake in mistakes:
            answers.append(answer := make(mistake, Path(working)))
            sys.stdout.write(_row(answer))
            for fault in answer.faults:
                sys.stdout.write(f"{'':20}FAULT: {fault}\n")
            sys.stdout.write("".join(f"{'':20}{line}\n" for line in shown(answer, whole=switches.show)))
            sys.stdout.flush()
    if switches.json:
        switches.json.write_text(json.dumps([asdict(answer) for answer in answers], indent=1) + "\n")
    wrong = sum(bool(answer.faults) for answer in answers)
    slow = sum(answer.seconds > 5 for answer in answers)
    sys.stdout.write(f"{len(answers)} mistakes, {slow} above 5 s, {wrong} with faults\n")
    return int(wrong > 0)


def _row(answer: Answer) -> str:
    return (
        f"{answer.seconds:6.1f} s ({answer.cpu_seconds:.1f} of CPU) {answer.lines:4d} lines  {answer.name}\n"
    )


def shown(answer: Answer, *, whole: bool) -> list[str]:
    lines = [line for line in answer.output.splitlines() if line.strip()]
    return lines if whole else [line[:160] for line in lines if not SKIPPED.search(line)][:1]


if __name__ == "__main__":
    sys.exit(main())
