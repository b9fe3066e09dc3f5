# SPDX-License-Identifier: Apache-2.0
"""Data and arguments of small fine-tuning runs: the quickstart's questions with their answers."""

import json
import sys
from pathlib import Path

from tests.helpers.training import QUICKSTART

sys.path.insert(0, str(QUICKSTART))
from shapes import write_questions

SMALL = [
    "data.max_length=48",
    "data.num_workers=0",
    "worker.actor.global_batch_size=16",
    "worker.actor.micro_batch_size_per_device_for_update=8",
    "worker.actor.optim.lr=1e-3",
    "worker.actor.fsdp.mp_param_dtype=fp32",
    "worker.actor.model.enable_gradient_checkpointing=false",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=2",
    "trainer.logger=[file]",
    "trainer.val_freq=4",
    "data.min_pixels=784",
    "data.max_pixels=50176",
]


def write_conversations(folder: Path, name: str, count: int, seed: int, with_images: bool = False) -> Path:
    """Write the quickstart's questions with their answers; return the file."""
    questions = write_questions(folder, name, count, seed=seed, with_images=with_images)
    rows = []
    for line in questions.read_text().splitlines():
        row = json.loads(line)
        messages = [
            {"role": "user", "content": row["problem"]}, {"role": "assistant", "content": row["answer"]}
        ]  # fmt: skip
        rows.append(row | {"messages": messages})
    file = folder / f"sft_{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def arguments_for(folder: Path, *overrides: str) -> list[str]:
    """Arguments of a small run on `sft_train.jsonl` and `sft_val.jsonl` in a folder, with its `model`."""
    return [
        f"data.train_files={folder / 'sft_train.jsonl'}",
        f"data.val_files={folder / 'sft_val.jsonl'}",
        f"data.image_dir={folder / 'images'}",
        f"worker.actor.model.model_path={folder / 'model'}",
        *SMALL,
        *overrides,
    ]
