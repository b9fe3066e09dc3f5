# SPDX-License-Identifier: Apache-2.0
"""Convert saved rollouts to data for supervised fine-tuning (rejection sampling).

    python3 scripts/rollouts_to_sft.py checkpoints/math/first --output sft.parquet --min_score 0.9

Keeps finished responses with a score of at least `--min_score`, without duplicates. With `--key accuracy`,
this value of the reward function is used instead of the score. A row has `messages` (the prompt and the
response as the assistant's message), `images` and `videos` as paths, `score` and `step`; train on it with
`python3 -m verl.trainer.sft data.train_files=sft.parquet`. `trainer.rollouts_to_keep` of the run sets the
number of prompts per step whose rollouts are saved.

A conversation with tools becomes one row with all its turns, as the policy wrote them, the observations with
their pictures, and the schemas of its tools in `tools`. If an agent shortened or edited its history, each of
its contexts is a row. Train with the chat template of the run (`data.override_chat_template`,
`data.apply_chat_template_kwargs`): the policy's turns are learned, and the observations are not. Turns with
`weight` 0 are not learned either: another row has them, the agent wrote them, or a limit cut them off.
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
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a clone without installing

from verl.data.messages import is_learned
from verl.trainer.command import at_least
from verl.viewer import rollout_store
from verl.viewer.rollout_store import FOLDER, LONGEST_SIDE, MEDIA, step_files

NOT_WHOLE = (
    "{count} images are copies of at most {side} pixels: `trainer.keep_whole_images=true` keeps others"
)
STEPS = re.compile(r"(\d+)(?:-(\d+))?")
MARKERS = {"image": "<image>", "video": "<video>"}
PLAIN_MESSAGE = pa.struct([(name, pa.string()) for name in ("role", "content")])
MESSAGE = pa.struct(
    [
        *PLAIN_MESSAGE,
        *(pa.field(name, pa.string()) for name in ("name", "tool_call_id")),  # of tools
        pa.field("tool_calls", pa.string()),  # of turns that are read only, as JSON
        pa.field("weight", pa.int32()),  # 0 of turns that are not learned
    ]
)
COLUMNS = [
    "step", "sample", "score", "finish_reason", "messages", "response", "tokens", "reward_values", "media",
    "contexts", "turns", "picture",
]  # fmt: skip
SCHEMA = pa.schema(
    [
        pa.field("messages", pa.list_(MESSAGE)),
        pa.field("tools", pa.string()),  # schemas as JSON
        pa.field("images", pa.list_(pa.string())),
        pa.field("videos", pa.list_(pa.string())),
        pa.field("score", pa.float32()),
        pa.field("step", pa.int32()),
    ]
)


@dataclass(frozen=True)
class Selection:
    """Rules for the responses to keep; None sets no limit."""

    min_score: float | None = None
    max_per_prompt: int | None = None  # the best ones
    steps: range | None = None
    key: str | None = None  # value of the reward function; None is the score


class Candidate(NamedTuple):
    """A response that passed the selection."""

    value: float
    step: int
    sample: int
    prompt: str  # identity of its messages and media
    rows: list[dict[str, Any]]  # have the columns of `SCHEMA`; one for each context of a conversation
    num_small: int  # images that are small copies

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sort key: best first, ties newest first."""
        return -self.value, -self.step, self.sample


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if nothing was written."""
    options = make_parser().parse_args(arguments)
    selection = Selection(options.min_score, options.max_per_prompt, options.steps, options.key)
    try:
        if options.output.suffix != ".parquet":
            raise ValueError(f"`--output` must end in .parquet, got {options.output}")
        chosen, left_out = select_rollouts(options.run_folder, selection)
        rows = [row for one in chosen for row in one.rows]
        write_rows(options.output, rows)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"rollouts_to_sft: {error}\n")
        return 1
    for reason, count in left_out.most_common():
        sys.stdout.write(f"left out: {count} {reason}\n")
    if num_small := sum(one.num_small for one in chosen):
        sys.stdout.write(f"note: {NOT_WHOLE.format(count=num_small, side=LONGEST_SIDE)}\n")
    prompts = len({one.prompt for one in chosen})
    in_rows = f" in {len(rows)} rows" if len(rows) > len(chosen) else ""
    sys.stdout.write(f"wrote {options.output}: {len(chosen)} responses to {prompts} prompts{in_rows}\n")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollouts_to_sft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_folder", type=Path, help="`trainer.save_checkpoint_path` of the run")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE.parquet", help="replaced if it exists"
    )
    parser.add_argument("--min_score", type=float, help="lowest score to keep (default: any)")
    parser.add_argument(
        "--max_per_prompt", type=at_least(1), help="keep at most this many, the best ones (default: all)"
    )
    parser.add_argument("--steps", type=_steps, metavar="FIRST-LAST", help="steps of the run (default: all)")
    parser.add_argument("--key", help="value of the reward function that is used instead of the score")
    return parser


def select_rollouts(run_folder: Path, selection: Selection) -> tuple[list[Candidate], Counter[str]]:
    """Return the selected responses, and counts of the reasons for leaving others out.

    Raises:
        ValueError: No rollouts, none with that key, or none that reaches the score.
    """
    files = step_files(run_folder)
    steps = files if selection.steps is None else [step for step in files if step in selection.steps]
    chosen = [files[step] for step in steps]
    if not chosen:
        found = f"its rollouts are of steps {min(files)} to {max(files)}" if files else "it kept no rollouts"
        raise ValueError(f"{run_folder} has no rollouts to select from: {found} (`trainer.rollouts_to_keep`)")
    left_out: Counter[str] = Counter()
    candidates = []
    for rollout in _rollouts(chosen):
        made = _candidate(rollout, selection, run_folder / FOLDER / MEDIA)
        if isinstance(made, str):
            left_out[made] += 1
        else:
            candidates.append(made)
    best = _best(candidates, selection.max_per_prompt, left_out)
    if not best:
        reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.most_common())
        raise ValueError(f"no rollout of {run_folder} can be used: {reasons}")
    return best, left_out


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows of `SCHEMA` atomically, without columns that are always empty."""
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    unused = [name for name in ("tools", "images", "videos") if not any(row[name] for row in rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    if not any(message.keys() - set(PLAIN_MESSAGE.names) for row in rows for message in row["messages"]):
        plain = pa.array([row["messages"] for row in rows], pa.list_(PLAIN_MESSAGE))
        table = table.set_column(0, "messages", plain)
    partial = path.with_name(f"{path.name}.tmp")
    pq.write_table(table.drop_columns(unused), partial)
    os.replace(partial, path)


def _rollouts(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        if "messages" not in pq.read_schema(file).names:
            raise ValueError(
                f"{file} was kept by an earlier version, without the messages of its prompts: run"
                " again to get new rollouts"
            )
        yield from pq.read_table(file, columns=COLUMNS, schema=rollout_store.SCHEMA).to_pylist()


def _candidate(rollout: dict[str, Any], selection: Selection, media_folder: Path) -> Candidate | str:
    """Return the response as a row, or the reason for leaving it out."""
    if rollout["picture"] is not None:
        return "of pictures or videos, which are no texts"
    if rollout["score"] is None:
        return "without a score"
    values = dict(rollout["reward_values"])
    if selection.key is not None and selection.key not in values:
        raise ValueError(f"`--key {selection.key}`: the reward function returned {sorted(values)}")
    value = rollout["score"] if selection.key is None else values[selection.key]
    if math.isnan(value):  # the reward function returned the key for other responses only
        return f"without {selection.key}"
    if rollout["finish_reason"] != "stop":
        return "cut off at the response length limit"
    # Scores are stored as float32.
    if selection.min_score is not None and not value >= np.float32(selection.min_score):
        return f"below {selection.min_score:g}"
    seen = [one for turn in rollout["turns"] or [] if turn["is_shown"] for one in turn["observations"]]
    shown = [medium for one in [*seen, *(rollout["contexts"] or [])] for medium in one["media"]]
    num_seen = sum(one["num_media"] for one in seen)
    if sum(len(one["media"]) for one in seen) < num_seen or not all(medium["files"] for medium in shown):
        return "with media of observations that could not be kept"
    texts = list(_texts_of(rollout))
    shared = {"score": value, "step": rollout["step"]}
    rows = [_row(text, media_folder) for text in texts]
    problem = next((row for row in rows if isinstance(row, str)), None)
    if problem is not None:
        return problem
    prompt = json.dumps(
        [rollout["messages"], [_path_of(one, media_folder) for one in rollout["media"] or []]]
    )
    num_small = sum(_is_small_copy(medium) for text in texts for medium in text.media)
    made = [row | shared for row in rows if isinstance(row, dict) and any(map(is_learned, row["messages"]))]
    if not made:
        return "whose turns were all cut off"
    return Candidate(value, rollout["step"], rollout["sample"], prompt, made, num_small)


class _Text(NamedTuple):
    """All that the policy read and wrote from a first message on."""

    messages: list[dict[str, Any]]
    tools: str | None
    media: list[dict[str, Any]]  # in the order of the messages


def _texts_of(rollout: dict[str, Any]) -> Iterator[_Text]:
    """Yield a prompt with its response, or each context of a conversation."""
    media = rollout["media"] or []
    if rollout["contexts"] is None:
        response = rollout["response"].removesuffix(rollout["tokens"][-1])  # end token, if it is visible
        answer = {"role": "assistant", "content": response}
        yield _Text([*json.loads(rollout["messages"]), answer], None, media)
        return
    turns = iter(rollout["turns"])
    for context in rollout["contexts"]:
        media = [*media, *context["media"]]
        for turn in islice(turns, context["num_turns"]):
            media += [medium for one in turn["observations"] for medium in one["media"]]
        yield _Text(json.loads(context["messages"]), context["tools"], media)
        media = []


def _row(text: _Text, media_folder: Path) -> dict[str, Any] | str:
    """Return the columns of a row without those of its score, or the reason for which there is none."""
    paths = [_path_of(medium, media_folder) for medium in text.media]
    kinds = [medium["kind"] for medium in text.media]
    if None in paths:
        return "with a video that was given as bytes: only single frames were kept"
    messages = [_with_markers(message) for message in text.messages]
    for kind in MARKERS:
        if sum(message["content"].count(MARKERS[kind]) for message in messages) != kinds.count(kind):
            return f"with another number of {MARKERS[kind]} in the texts than {kind}s"
    return {
        "messages": messages,
        "tools": text.tools,
        "images": [path for path, kind in zip(paths, kinds, strict=True) if kind == "image"],
        "videos": [path for path, kind in zip(paths, kinds, strict=True) if kind == "video"],
    }


def _path_of(medium: dict[str, Any], folder: Path) -> str | None:
    """Return the path that the run read, or of the copy of an image given as bytes, whole if it was kept."""
    if not medium["source"].startswith("of "):
        return medium["source"]
    copies = [name for name in (medium["whole"], *(medium["files"] or [])) if name]
    return str((folder / copies[0]).absolute()) if medium["kind"] == "image" and copies else None


def _is_small_copy(medium: dict[str, Any]) -> bool:
    return medium["source"].startswith("of ") and not medium["whole"]


def _with_markers(message: dict[str, Any]) -> dict[str, Any]:
    """Join the parts of a message into text, with a marker for each image and video."""
    content = message["content"]
    if not isinstance(content, str):
        texts = [part["text"] if part["type"] == "text" else MARKERS[part["type"]] for part in content]
        content = "".join(texts)
    kept = {name: message[name] for name in MESSAGE.names if name in message}
    calls = message.get("tool_calls")
    return (
        kept
        | {"content": content}
        | ({"tool_calls": json.dumps([_call(one) for one in calls])} if calls else {})
    )


def _call(call: dict[str, Any]) -> dict[str, Any]:
    # Arguments are JSON of their own: null in a column would mean that there is no such argument.
    function = call["function"]
    return call | {"function": function | {"arguments": json.dumps(function["arguments"])}}


def _best(candidates: list[Candidate], limit: int | None, left_out: Counter[str]) -> list[Candidate]:
    """Drop duplicates, keep the best of each prompt, and sort by step."""
    by_prompt: dict[str, dict[str, Candidate]] = {}
    for one in candidates:
        responses = by_prompt.setdefault(one.prompt, {})
        response = json.dumps([row["messages"] for row in one.rows])
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


if __name__ == "__main__":
    sys.exit(main())
