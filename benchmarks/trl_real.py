# SPDX-License-Identifier: Apache-2.0
"""GRPO by TRL on the sums of the quickstart: a line of JSON with step, seconds and held-out accuracy.

`real.py` starts it with an interpreter that has TRL installed. Its options are those of
`examples/quickstart/real.yaml`, in TRL's words.
"""

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports] - of its environment

PROMPTS, RESPONSES, TOKENS, SAMPLES = 8, 8, 16, 4


class Curve(TrainerCallback):
    """Prints the seconds of training and the held-out accuracy every few steps."""

    def __init__(self, rows: list[dict[str, str]], tokenizer: Any, every: int) -> None:
        self.rows, self.tokenizer, self.every = rows, tokenizer, every
        self.seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._show(state, kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait_for_all()
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait_for_all()
        self.seconds += time.perf_counter() - self.start
        if state.global_step % self.every == 0:
            self._show(state, kwargs["model"])

    def _show(self, state: Any, model: Any) -> None:
        if state.is_world_process_zero:
            figures = {"step": state.global_step, "seconds": self.seconds, "accuracy": self._accuracy(model)}
            print(json.dumps(figures), flush=True)
        wait_for_all()

    @torch.no_grad()
    def _accuracy(self, model: Any) -> float:
        texts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": row["problem"]}], add_generation_prompt=True, tokenize=False
            )
            for row in self.rows
            for _ in range(SAMPLES)
        ]
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        model.eval()
        output = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=True, temperature=1.0, top_k=0)
        model.train()
        said = self.tokenizer.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        answers = [row["answer"] for row in self.rows for _ in range(SAMPLES)]
        return sum(map(is_right, said, answers)) / len(said)


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def is_right(response: str, answer: str) -> bool:
    return re.findall(r"\d+", response)[-1:] == [answer]


def reward(completions: list[list[dict[str, str]]], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward each completion as `sums_reward.py` does."""
    return [float(is_right(one[0]["content"], right)) for one, right in zip(completions, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with `model`, `train.jsonl` and `val.jsonl`")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between validations")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    options = parser.parse_args()

    train, val = (
        [json.loads(line) for line in (options.folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "val")
    )
    tokenizer = AutoTokenizer.from_pretrained(options.folder / "model", padding_side="left")
    config = GRPOConfig(
        output_dir=str(options.folder / "trl"),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * RESPONSES // options.processes,
        num_generations=RESPONSES,
        max_completion_length=TOKENS,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=options.steps,
        seed=options.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    prompts = [[{"role": "user", "content": row["problem"]}] for row in train]
    trainer = GRPOTrainer(
        model=str(options.folder / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts, "answer": [row["answer"] for row in train]}),
        processing_class=tokenizer,
        callbacks=[Curve(val, tokenizer, options.every)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
