# SPDX-License-Identifier: Apache-2.0
"""Write rows of tasks of `reasoning-gym`, which makes questions of more than 100 kinds and scores answers.

    pip install -e '.[tasks]'
    python3 examples/data_preprocess/reasoning_tasks.py chain_sum gcd spell_backward --output data/tasks

`train.jsonl` and `val.jsonl` have the same number of rows of each task, and no question twice. The options of
a task are those of reasoning-gym: `chain_sum:max_terms=4,max_digits=2`. `reasoning_tasks.py` of
`examples/reward_function` scores the responses, and `data.category_keys=[task]` shows validation by task.
"""

import argparse
import dataclasses
import difflib
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.config.files.paths import writable_folder
from verl.trainer.command import at_least

Row = dict[str, str]
SET_HERE = {"size": "`--rows` and `--val-rows`", "seed": "`--seed`"}  # options of every task


def make_rows(tasks: Sequence[str], count: int, seed: int) -> list[list[Row]]:
    """Return `count` rows of each task; no two ask the same.

    Raises:
        ValueError: A task or one of its options does not exist, or it has too few questions.
    """
    taken: set[str] = set()
    return [_rows_of(task, count, seed, taken) for task in tasks]


def _rows_of(task: str, count: int, seed: int, taken: set[str]) -> list[Row]:
    """Return rows with questions that are not `taken`, and add these to it."""
    import reasoning_gym  # noqa: PLC0415 - imports all tasks; the arguments are read first
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415

    name, _, text = task.partition(":")
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        raise ValueError(f"no task {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    options = dict(_option(each) for each in text.split(",") if each)
    if SET_HERE.keys() & options.keys():
        rules = ", ".join(f"`{option}` by {switch}" for option, switch in SET_HERE.items())
        raise ValueError(f"{task}: the switches set {rules}")
    valid = {each.name for each in dataclasses.fields(DATASETS[name][1])} - SET_HERE.keys()
    for option in sorted(options.keys() - valid):
        raise ValueError(f"{task}: unexpected keyword argument {option!r}; the options are {sorted(valid)}")
    try:
        questions = reasoning_gym.create_dataset(name, size=4 * count, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{task}: {error}") from error
    rows: list[Row] = []
    for entry in questions:
        if entry["question"] in taken:
            continue
        kept = json.dumps(
            {"task": name, "answer": entry["answer"], "metadata": entry["metadata"]}, default=str
        )
        if entry["answer"] is None or questions.score_answer(entry["answer"], json.loads(kept)) != 1:
            raise ValueError(f"{name}: its answers cannot be scored from a file of rows")
        taken.add(entry["question"])
        rows.append({"problem": entry["question"], "answer": kept, "task": name})
        if len(rows) == count:
            return rows
    raise ValueError(f"{task} has {len(rows)} different questions among {4 * count}: ask for fewer rows")


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        rule = "write OPTION=VALUE with a number, true, false, null or a quoted text"
        raise ValueError(f"{name + equals + value!r} is no option of a task: {rule}") from None


def check_output(folder: Path) -> None:
    """Raise a ValueError if the folder cannot be written; called first, since questions take seconds."""
    try:
        writable_folder(str(folder))
    except ValueError as error:
        raise ValueError(f"`--output` {error}") from None


def write_rows(folder: Path, rows: list[list[Row]], num_val: int, seed: int) -> None:
    """Write the last `num_val` rows of each task to `val.jsonl`, the others, shuffled, to `train.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    train = [row for each in rows for row in each[: len(each) - num_val]]
    val = [row for each in rows for row in each[len(each) - num_val :]]
    random.Random(seed).shuffle(train)
    for name, part in (("train.jsonl", train), ("val.jsonl", val)):
        unfinished = folder / f".{name}.unfinished"
        unfinished.write_text("".join(json.dumps(row) + "\n" for row in part))
        unfinished.replace(folder / name)
        print(f"wrote {len(part)} rows to {folder / name}")


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "tasks", nargs="+", help="names of tasks, with options: NAME or NAME:OPTION=VALUE,..."
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the two files")
    parser.add_argument("--rows", type=at_least(1), default=500, help="training rows of a task; %(default)s")
    parser.add_argument("--val-rows", type=at_least(1), default=50, help="validation rows; %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of questions and their order; %(default)s")
    given: Any = parser.parse_args(arguments)
    try:
        check_output(given.output)
        rows = make_rows(given.tasks, given.rows + given.val_rows, given.seed)
        write_rows(given.output, rows, given.val_rows, given.seed)
    except ModuleNotFoundError as error:
        print(f"error: {error}: pip install -e '.[tasks]'", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
