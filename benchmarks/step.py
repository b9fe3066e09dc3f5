# SPDX-License-Identifier: Apache-2.0
"""Time of a GRPO step compared with its bare parts.

    python benchmarks/step.py [--rounds 3] [--prompts 8 --responses 8 --tokens 128] [a.b=c ...]

A 35-million-parameter Qwen2 with random weights (vocabulary 32,000) on two CPU processes, bf16 compute, KL to
a reference, one update. After every step the bare parts run on the same sequences in the same worker
processes (`bare_parts.py`), so that other load on the machine affects both equally; figures are medians over
the rounds. The bare parts are those of a step as the algorithm is written: generation, a forward pass for
the old log-probs and one for the reference's, and the update. The trainer takes the old log-probs from the
update; a second ratio leaves their pass out of the bare parts too. The last line is JSON.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import sub
from pathlib import Path
from statistics import median
from typing import Any

from bare_parts import BareWorker

from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.data.readers import load_tokenizer
from verl.models.tiny import save_tiny_model
from verl.single_controller.ray.cluster import connect
from verl.trainer.kinds import text
from verl.trainer.metrics import StageTimer
from verl.trainer.ray_trainer import RayPPOTrainer
from verl.trainer.run.run_once import open_trainer

HERE = Path(__file__).resolve().parent
PROCESSES = 2
TARGET = 0.9  # a step takes at most this many times the sum of its bare parts
PROMPT_TOKENS = 22
MODEL = dict(
    vocab_size=32_000, hidden_size=512, intermediate_size=1088, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, initializer_range=0.02,
)  # fmt: skip
# The stages of a step with engine or model work, and the bare part that each is compared with.
BARE = {"gen": "vLLM generates", "old": "forward", "ref": "forward", "update_actor": "forward + backward"}

Seconds = dict[str, float]


def make_data(folder: Path, num_prompts: int) -> None:
    """Write the model and prompts of `PROMPT_TOKENS` tokens each."""
    save_tiny_model(folder / "model", "qwen2", **MODEL)
    tokenizer = load_tokenizer(str(folder / "model"))
    words = ["red", "green", "blue", "yellow", "circle", "square", "triangle", "one", "two", "three", "four"]
    rows = []
    for index in range(num_prompts):
        rotated = words[index % len(words) :] + words[: index % len(words)]
        rows.append(
            {
                "problem": prompt_of_length(tokenizer, rotated, PROMPT_TOKENS),
                "answer": words[index % len(words)],
            }
        )
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompt_of_length(tokenizer: Any, words: list[str], num_tokens: int) -> str:
    """Return words that make a prompt of exactly `num_tokens` tokens, including the chat template."""

    def length(text: str) -> int:
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return len(tokenizer.encode(rendered, add_special_tokens=False))

    text = words[0]
    while length(text) < num_tokens:
        fitting = [word for word in [*words, "a"] if length(f"{text} {word}") <= num_tokens]
        text = f"{text} {fitting[len(text) % len(fitting)]}"
    assert length(text) == num_tokens, f"no words make a prompt of {num_tokens} tokens"
    return text


def arguments_of_run(folder: Path, options: argparse.Namespace) -> list[str]:
    return [
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'train.jsonl'}",
        "data.prompt_key=problem",
        "data.answer_key=answer",
        "data.format_prompt=null",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={options.tokens}",
        f"data.rollout_batch_size={options.prompts}",
        "data.val_batch_size=-1",
        "data.filter_overlong_prompts=false",
        "data.num_workers=0",
        "algorithm.use_kl_loss=true",
        f"worker.actor.global_batch_size={options.prompts}",
        f"worker.actor.micro_batch_size_per_device_for_update={options.micro_batch}",
        f"worker.actor.micro_batch_size_per_device_for_experience={options.micro_batch}",
        f"worker.actor.model.model_path={folder / 'model'}",
        "worker.actor.model.enable_gradient_checkpointing=false",
        "worker.rollout.tensor_parallel_size=1",
        f"worker.rollout.n={options.responses}",
        "worker.rollout.ignore_eos=true",
        f"worker.reward.reward_function={HERE / 'bench_reward.py'}:compute_score",
        "worker.reward.num_cpus=1",
        "trainer.device=cpu",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={PROCESSES}",
        "trainer.max_steps=1000",
        "trainer.logger=[file]",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.save_checkpoint_path={folder / 'run'}",
        "trainer.find_last_checkpoint=false",
        *options.overrides,
    ]


@contextlib.contextmanager
def running(folder: Path, options: argparse.Namespace) -> Iterator[RayPPOTrainer]:
    """Start the trainer of the benchmark in a cluster of its own."""
    config = load_config(PPOConfig, arguments_of_run(folder, options))
    connect(num_cpus=PROCESSES)
    with contextlib.ExitStack() as stack:
        yield open_trainer(config, stack)


def measure(folder: Path, options: argparse.Namespace) -> tuple[list[Seconds], list[Seconds]]:
    """Alternate between steps and bare parts, and return the seconds of both after the warm-up round."""
    text.TextRun.worker_class = BareWorker  # a worker that can also run the bare parts
    steps: list[Seconds] = []
    parts: list[Seconds] = []
    with running(folder, options) as trainer:
        workers = trainer.workers
        workers.load_bare_model(options.bare_micro_batch, options.bare_dtype)
        prompts = next(iter(trainer.sampling.collector.prompts))
        for _ in range(options.rounds + 1):
            trainer.run_state.step += 1
            timer, cpu = StageTimer(), [workers.cpu_seconds()]
            with timer("step"):
                batch, _ = trainer.train_step(timer)
            steps.append(timer.seconds)
            cpu.append(workers.cpu_seconds())
            generated = int(batch.batch["response_mask"].sum(-1).max())
            parts.append({
                "gen": slowest(workers.bare_generate, prompts, generated),
                "old": slowest(workers.bare_forward, batch),
                "ref": slowest(workers.bare_forward, batch),
                "update_actor": slowest(workers.bare_update, batch),
            })  # fmt: skip
            cpu.append(workers.cpu_seconds())
            steps[-1]["cpu"], parts[-1]["cpu"] = (
                max(map(sub, after, before)) for before, after in pairwise(cpu)
            )
            print(
                f"round {len(steps) - 1}: step {timer.seconds['step']:.1f} s, parts {whole(parts[-1]):.1f} s",
                flush=True,
            )
    return steps[1:], parts[1:]


def whole(part: Seconds) -> float:
    return sum(part[name] for name in BARE)


def slowest(method: Callable[..., list[float]], *arguments: object) -> float:
    """Return the seconds of the slowest rank."""
    return max(method(*arguments))


def report(steps: list[Seconds], parts: list[Seconds]) -> dict[str, float]:
    """Print the table and return the summary."""
    steps = [{"old": 0.0} | one for one in steps]
    step = {name: median(one[name] for one in steps) for name in steps[0]}
    bare = {name: median(one[name] for one in parts) for name in parts[0]}
    pairs = list(zip(steps, parts, strict=True))
    ratio = median(one["step"] / whole(part) for one, part in pairs)
    as_run = median(one["step"] / (whole(part) - (0 if one["old"] else part["old"])) for one, part in pairs)
    cpu_ratio = median(one["cpu"] / part["cpu"] for one, part in pairs)
    others = {name: step[name] for name in ("sync_weights", "reward", "adv")}
    others["rest"] = median(
        one["step"] - sum(one[name] for name in (*BARE, "reward", "adv")) for one in steps
    )
    rows = {name: step[name] for name in BARE} | {
        "gen": median(one["gen"] - one["sync_weights"] for one in steps)
    }

    print(f"\n{'':<36}{'step, s':>9}{'bare, s':>9}{'ratio':>7}")
    for name, seconds in rows.items():
        print(f"{f'{name} ({BARE[name]})':<36}{seconds:>9.2f}{bare[name]:>9.2f}{seconds / bare[name]:>7.2f}")
    for name, seconds in others.items():
        print(f"{name:<36}{seconds:>9.2f}")
    total = median(whole(part) for part in parts)
    print(f"{'whole step':<36}{step['step']:>9.2f}{total:>9.2f}{ratio:>7.2f}")
    print(f"{'... and the passes that it runs':<36}{'':>18}{as_run:>7.2f}")
    print(f"{'CPU time of the busier process':<36}{step['cpu']:>9.2f}{bare['cpu']:>9.2f}{cpu_ratio:>7.2f}")
    print(f"neither engine nor model work: {max(0, 1 - 1 / as_run):.0%} of a step, sync included")
    print(
        f"target, at most {TARGET} times the bare parts: {'PASS' if ratio <= TARGET else 'over the target'}"
    )
    summary = {"step_s": step["step"], "bare_s": total, "ratio": ratio, "ratio_as_run": as_run}
    summary |= {"overhead_share": 1 - 1 / as_run, "cpu_ratio": cpu_ratio} | {
        f"step_{name}_s": seconds for name, seconds in (rows | others).items()
    }
    summary |= {f"bare_{name}_s": bare[name] for name in BARE}
    return {name: round(value, 3) for name, value in summary.items()}


def add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the warm-up round")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=16, help="micro-batch size of a step, per process")


def parse_arguments() -> argparse.Namespace:
    """Parse the sizes; other arguments are passed to the trainer as overrides."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_sizes(parser)
    parser.add_argument("--bare-micro-batch", type=int, default=4, help="micro-batch size of the bare parts")
    parser.add_argument("--bare-dtype", choices=("bfloat16", "autocast"), default="bfloat16")
    options, options.overrides = parser.parse_known_args()
    return options


def main() -> None:
    options = parse_arguments()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder), options.prompts)
        summary = report(*measure(Path(folder), options))
    print(json.dumps(summary | {"seconds": round(time.perf_counter() - start, 1)}))


if __name__ == "__main__":
    sys.exit(main())
