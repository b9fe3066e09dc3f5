# SPDX-License-Identifier: Apache-2.0
"""A GRPO run by TRL, one step at a time: each line of standard input starts one, and its seconds are printed.

`beside_trl.py` starts it with an interpreter that has TRL installed. Everything that the two trainers name
differently is translated here.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports] - of its environment


class StepByStep(TrainerCallback):
    """Waits for a line before each step and prints the seconds that it took."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            sys.stdin.readline()
        wait_for_all()
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait_for_all()
        if state.is_world_process_zero:
            print(json.dumps({"seconds": time.perf_counter() - self.start}), flush=True)


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def variety(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """Reward each completion as `bench_reward.py` does."""
    texts = [completion[0]["content"] for completion in completions]
    return [len(set(text)) / max(1, len(text)) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--responses", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    options = parser.parse_args()

    rows = [json.loads(line) for line in (options.folder / "train.jsonl").read_text().splitlines()]
    prompts = [[{"role": "user", "content": row["problem"]}] for row in rows]
    sequences = options.prompts * options.responses
    config = GRPOConfig(
        output_dir=str(options.folder / "trl"),
        use_cpu=True,
        bf16=True,
        model_init_kwargs={"dtype": "float32"},  # its optimizer's weights, as here
        gradient_checkpointing=False,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=sequences // (options.micro_batch * options.processes),
        num_generations=options.responses,
        max_completion_length=options.tokens,
        generation_kwargs={"min_new_tokens": options.tokens},
        temperature=1.0,
        beta=0.01,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=options.steps,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(options.folder / "model"),
        reward_funcs=variety,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(options.folder / "model"),
        callbacks=[StepByStep()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
