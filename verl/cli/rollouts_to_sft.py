# SPDX-License-Identifier: Apache-2.0
"""Turn the rollouts that a run kept into data for supervised fine-tuning: rejection sampling.

    python3 scripts/rollouts_to_sft.py checkpoints/math/first --output sft.parquet --min_score 0.9

Responses are taken that were finished, scored, and reached `--min_score`; the same response to the same
prompt once. `--key accuracy` goes by that value of the reward function instead of the whole score. A row has
the prompt's messages with the response as the assistant's, `images` and `videos` as paths, `score` and
`step`; train on it with `python3 -m verl.trainer.sft data.train_files=sft.parquet`. Of how many prompts of a
step there are rollouts is `trainer.rollouts_to_keep` of the run.
"""

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.trainer.command import at_least
from verl.viewer.rollout_store import FOLDER, MEDIA, step_files

STEPS = re.compile(r"(\d+)(?:-(\d+))?")
MARKERS = {"image": "<image>", "video": "<video>"}  # of the parts of a message
COLUMNS = [
    "step", "sample", "score", "finish_reason", "messages", "response", "tokens", "reward_values", "media",
]  # fmt: skip
SCHEMA = pa.schema(
    [
        pa.field(
            "messages", pa.list_(pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())]))
        ),
        pa.field("images", pa.list_(pa.string())),
        pa.field("videos", pa.list_(pa.string())),
        pa.field("score", pa.float32()),
        pa.field("step", pa.int32()),
    ]
)


@dataclass(frozen=True)
class Selection:
    """Which responses are taken.

    Attributes:
        min_score: The least value that is good enough; None takes every finished response.
        max_per_prompt: The best so many of a prompt; None takes all.
        steps: Of the run; None takes all.
        key: A value of the reward function; None is the whole score.
    """

    min_score: float | None = None
    max_per_prompt: int | None = None
    steps: range | None = None
    key: str | None = None


class Candidate(NamedTuple):
    """A response that is good enough."""

    value: float
    step: int
    sample: int
    row: dict[str, Any]  # of `SCHEMA`

    @property
    def prompt(self) -> str:
        """What all responses to the same prompt have in common."""
        return prompt_of(self.row)

    @property
    def rank(self) -> tuple[float, int, int]:
        """Its place among those to the same prompt: the best first, of equals the newest."""
        return -self.value, -self.step, self.sample


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 1 where nothing was written.

    Raises:
        SystemExit: An unknown switch, with status 2, or `--help`.
    """
    options = make_parser().parse_args(arguments)
    selection = Selection(options.min_score, options.max_per_prompt, options.steps, options.key)
    try:
        if options.output.suffix != ".parquet":
            raise ValueError(f"`--output` must end in .parquet, got {options.output}")
        rows, left_out = select_rollouts(options.run_folder, selection)
        write_rows(options.output, rows)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"rollouts_to_sft: {error}\n")
        return 1
    for reason, count in left_out.most_common():
        sys.stdout.write(f"left out: {count} {reason}\n")
    prompts = len({prompt_of(row) for row in rows})
    sys.stdout.write(f"wrote {options.output}: {len(rows)} responses to {prompts} prompts\n")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command's switches."""
    parser = argparse.ArgumentParser(
        prog="rollouts_to_sft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_folder", type=Path, help="`trainer.save_checkpoint_path` of the run")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE.parquet", help="replaced if there"
    )
    parser.add_argument("--min_score", type=float, help="the least score; without it every finished response")
    parser.add_argument(
        "--max_per_prompt", type=at_least(1), help="the best so many of a prompt; without it all"
    )
    parser.add_argument("--steps", type=_steps, metavar="FIRST-LAST", help="of the run; without it all")
    parser.add_argument("--key", help="a value of the reward function, for `--min_score`")
    return parser


def select_rollouts(run_folder: Path, selection: Selection) -> tuple[list[dict[str, Any]], Counter[str]]:
    """The responses that are taken, as rows of `SCHEMA` in the order of the run, and why others are not.

    Raises:
        ValueError: The run kept no rollouts, those of an earlier version, none with that key, or none that is
            good enough.
    """
    files = step_files(run_folder)
    steps = files if selection.steps is None else [step for step in files if step in selection.steps]
    chosen = [files[step] for step in steps]
    if not chosen:
        found = f"its rollouts are of steps {min(files)} to {max(files)}" if files else "it kept no rollouts"
        raise ValueError(f"{run_folder} has nothing to take from: {found} (`trainer.rollouts_to_keep`)")
    left_out: Counter[str] = Counter()
    candidates = []
    for rollout in _rollouts(chosen):
        made = _candidate(rollout, selection, run_folder / FOLDER / MEDIA)
        if isinstance(made, str):
            left_out[made] += 1
        else:
            candidates.append(made)
    rows = [one.row for one in _best(candidates, selection.max_per_prompt, left_out)]
    if not rows:
        reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.most_common())
        raise ValueError(f"no rollout of {run_folder} is good enough: {reasons}")
    return rows, left_out


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows of `SCHEMA`, without the columns of media that no row has; the file appears whole."""
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    unused = [name for name in ("images", "videos") if not any(row[name] for row in rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    pq.write_table(table.drop_columns(unused), partial)
    os.replace(partial, path)


def prompt_of(row: dict[str, Any]) -> str:
    """What tells one prompt from another: its messages and media."""
    return json.dumps([row["messages"][:-1], row["images"], row["videos"]])


def _rollouts(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        if "messages" not in pq.read_schema(file).names:
            raise ValueError(
                f"{file} was kept by an earlier version, without the messages of its prompts: let a run keep"
                " rollouts anew"
            )
        yield from pq.read_table(file, columns=COLUMNS).to_pylist()


def _candidate(rollout: dict[str, Any], selection: Selection, media_folder: Path) -> Candidate | str:
    """The response as a row, or why it is left out."""
    if rollout["score"] is None:
        return "without a score"
    values = dict(rollout["reward_values"])
    if selection.key is not None and selection.key not in values:
        raise ValueError(f"`--key {selection.key}`: the reward function returned {sorted(values)}")
    value = rollout["score"] if selection.key is None else values[selection.key]
    if math.isnan(value):  # the reward function returned it for other responses only
        return f"without {selection.key}"
    if rollout["finish_reason"] != "stop":
        return "cut off at the longest response that was allowed"
    if selection.min_score is not None and not value >= np.float32(selection.min_score):  # as it is stored
        return f"below {selection.min_score:g}"
    media: dict[str, list[str]] = {"image": [], "video": []}
    for medium in rollout["media"] or []:
        source = _path_of(medium, media_folder)
        if source is None:
            return "with a video that was given as bytes, of which single frames are kept"
        media[medium["kind"]].append(source)
    response = rollout["response"].removesuffix(rollout["tokens"][-1])  # the end, where it is not hidden
    prompt = [_with_markers(message) for message in json.loads(rollout["messages"])]
    row = {
        "messages": [*prompt, {"role": "assistant", "content": response}],
        "images": media["image"],
        "videos": media["video"],
        "score": value,
        "step": rollout["step"],
    }
    return Candidate(value, rollout["step"], rollout["sample"], row)


def _path_of(medium: dict[str, Any], folder: Path) -> str | None:
    """Where a medium can be read: where the run read it, or its small copy if the row held its bytes."""
    if not medium["source"].startswith("of "):
        return medium["source"]
    copies = medium["files"] or []
    return str((folder / copies[0]).absolute()) if medium["kind"] == "image" and copies else None


def _with_markers(message: dict[str, Any]) -> dict[str, str]:
    """A message whose content is text, with a marker for each image and video."""
    content = message["content"]
    if not isinstance(content, str):
        texts = [part["text"] if part["type"] == "text" else MARKERS[part["type"]] for part in content]
        content = "".join(texts)
    return {"role": message["role"], "content": content}


def _best(candidates: list[Candidate], limit: int | None, left_out: Counter[str]) -> list[Candidate]:
    """Without repetitions, and the best of each prompt, in the order of the run."""
    by_prompt: dict[str, dict[str, Candidate]] = {}
    for one in candidates:
        responses = by_prompt.setdefault(one.prompt, {})
        response = one.row["messages"][-1]["content"]
        if response in responses:
            left_out["the same response to the same prompt"] += 1
        responses[response] = min(one, responses.get(response, one), key=lambda each: each.rank)
    kept = []
    for responses in by_prompt.values():
        ranked = sorted(responses.values(), key=lambda each: each.rank)
        kept += ranked[:limit]
    if len(kept) < sum(map(len, by_prompt.values())):
        left_out["beyond `--max_per_prompt`"] = sum(map(len, by_prompt.values())) - len(kept)
    return sorted(kept, key=lambda each: (each.step, each.prompt, each.sample))


def _steps(text: str) -> range:
    match = STEPS.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a step or FIRST-LAST, got {text!r}")
    return range(int(match[1]), int(match[2] or match[1]) + 1)
