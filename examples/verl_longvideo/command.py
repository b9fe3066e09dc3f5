# SPDX-License-Identifier: Apache-2.0
"""Make questions with reasoning from long videos, as LongVideo-Reason was made.

    verl-longvideo-reason --videos films/ --out data/films --val-videos 20
        --caption-url http://localhost:8000/v1 --caption-model Qwen/Qwen2.5-VL-72B-Instruct
        --reason-url https://api.example.com/v1 --reason-model deepseek-reasoner --reason-key-env API_KEY
    verl-longvideo-reason ... --dry-run               # what would be cut and asked
    verl-longvideo-reason ... --until caption         # the rest later, with another server
    verl-longvideo-reason --write-prompts prompts/    # copy the prompts, to change them

Six steps: split each video into clips; caption each clip by a vision-language model; merge the captions into
a timeline; reason: have a model write questions of each category with reasons and the answer; parse them;
reformat the reasons as prose and write rows. Both models are behind OpenAI-compatible endpoints.

The same command continues where it was stopped: clips, captions and replies are kept in the folder, and
nothing is asked twice unless its prompt or model changes. Written are train.parquet and val.parquet for
reinforcement learning, sft_train.parquet and sft_val.parquet for fine-tuning, and malformed.jsonl.

Exit status: 0; 1 if something is unfinished, which the same command tries again; 2 for bad input; 130 after
Ctrl-C.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from verl.trainer.run.exit_status import BAD_INPUT, INTERRUPTED
from verl.utils.typed_command import command_parser
from verl_longvideo.prompts import Prompts, write_prompts
from verl_longvideo.settings import AS_FRAMES, AS_VIDEO, STEPS, CutSettings, ModelSettings, Settings

SHOWN = 5  # problems of a kind that are printed; the files have all


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = make_parser()
    switches = parser.parse_args(arguments)
    try:
        if switches.write_prompts is not None:
            write_prompts(switches.write_prompts)
            sys.stdout.write(f"prompts written to {switches.write_prompts}: use --prompts\n")
            return 0
        settings = settings_of(switches)
        settings.check()
        return _dry_run(settings) if switches.dry_run else _run(settings)
    except (ValueError, FileExistsError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return BAD_INPUT
    except OSError as error:
        sys.stderr.write(f"{parser.prog}: {error}: the same command continues once that is mended\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"{parser.prog}: interrupted; the same command continues\n")
        return INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = command_parser("verl-longvideo-reason", __doc__)
    add = parser.add_argument
    add("--videos", type=Path, metavar="DIR", help="folder of videos, with subfolders; not changed")
    add("--out", type=Path, metavar="DIR", help="folder of clips, replies and rows; continued if it exists")
    add("--until", choices=STEPS, default=STEPS[-1], help="last step to do (default: reformat)")
    add("--dry-run", action="store_true", help="print what would be cut and asked, and write nothing")
    add("--prompts", type=Path, metavar="DIR", help="folder of prompts that replace the shipped ones")
    add("--write-prompts", type=Path, metavar="DIR", help="copy the shipped prompts into a folder and exit")
    clips = parser.add_argument_group("clips").add_argument
    clips("--clip-seconds", type=float, default=10.0, help="length of a clip (default: 10)")
    clips("--clip-fps", type=float, default=2.0, help="frames per second that a clip keeps (default: 2)")
    clips("--clip-side", type=int, default=448, help="pixels of a clip's longer side (default: 448)")
    clips("--workers", type=int, default=os.cpu_count() or 1, help="videos cut at once (default: the cores)")
    clips(
        "--send", choices=(AS_FRAMES, AS_VIDEO), default=AS_FRAMES,
        help="send a clip as JPEG frames, which every endpoint takes, or as video, as vLLM does",
    )  # fmt: skip
    clips("--frames", type=int, default=8, help="frames of a clip that are sent (default: 8)")
    for name, temperature, tokens in (("caption", 0.0, 512), ("reason", 0.6, 8192)):
        model = parser.add_argument_group(f"the model of the step {name}").add_argument
        model(f"--{name}-url", metavar="URL", help="its endpoint, which usually ends in /v1")
        model(f"--{name}-model", metavar="NAME", help="its name on the server")
        model(f"--{name}-key-env", metavar="VAR", help="environment variable that holds the key, if any")
        model(f"--{name}-temperature", type=float, default=temperature, help=f"default: {temperature:g}")
        model(f"--{name}-max-tokens", type=int, default=tokens, help=f"of an answer (default: {tokens})")
    questions = parser.add_argument_group("questions and rows").add_argument
    questions("--questions", type=int, default=1, help="of each category for each video (default: 1)")
    questions("--no-rewrite", action="store_true", help="keep the reasons as listed, without another request")
    questions("--retry-malformed", action="store_true", help="ask again where a reply could not be used")
    questions("--val-videos", type=int, default=0, help="videos whose questions validate (default: 0)")
    questions(
        "--sft-share", type=float, default=1 / 3,
        help="share of the other videos whose questions are for fine-tuning (default: a third)",
    )  # fmt: skip
    questions("--seed", type=int, default=1, help="of the division of the videos (default: 1)")
    requests = parser.add_argument_group("requests").add_argument
    requests("--concurrency", type=int, default=32, help="requests at once (default: 32)")
    requests("--max-retries", type=int, default=6, help="attempts after the first (default: 6)")
    requests("--timeout", type=float, default=600.0, help="seconds of an attempt (default: 600)")
    return parser


def settings_of(switches: argparse.Namespace) -> Settings:
    """Read the switches; a ValueError names the missing ones."""
    given = vars(switches)
    last = STEPS.index(switches.until)
    needed = ["videos", "out"]
    needed += [
        f"{step}_{name}"
        for step in ("caption", "reason")
        if STEPS.index(step) <= last
        for name in ("url", "model")
    ]
    if missing := [f"`--{name.replace('_', '-')}`" for name in needed if given[name] is None]:
        raise ValueError(f"{', '.join(missing)} must be given; see --help")

    def model(step: str) -> ModelSettings:
        names = ("url", "model", "key_env", "temperature", "max_tokens")
        return ModelSettings(*(given[f"{step}_{name}"] for name in names))

    return Settings(
        video_dir=switches.videos, out=switches.out, prompts=Prompts(switches.prompts), until=switches.until,
        cut=CutSettings(switches.clip_seconds, switches.clip_fps, switches.clip_side),
        caption=model("caption"), reason=model("reason"), clips_as=switches.send, frames=switches.frames,
        questions=switches.questions, rewrite=not switches.no_rewrite,
        retry_malformed=switches.retry_malformed, val_videos=switches.val_videos,
        sft_share=switches.sft_share, seed=switches.seed, concurrency=switches.concurrency,
        max_retries=switches.max_retries, timeout_s=switches.timeout, workers=switches.workers,
    )  # fmt: skip


def _dry_run(settings: Settings) -> int:
    from verl_longvideo.plan import plan  # noqa: PLC0415 - `--help` needs no PyAV

    sys.stdout.writelines(f"{line}\n" for line in plan(settings))
    return 0


def _run(settings: Settings) -> int:
    from verl_longvideo.pipeline import GivenUpError, Pipeline, Problem  # noqa: PLC0415
    from verl_longvideo.state import locked  # noqa: PLC0415

    def listed(title: str, problems: Sequence[Problem]) -> None:
        if problems:
            sys.stderr.write(f"{len(problems)} {title}:\n")
            sys.stderr.writelines(f"  {one.step}: {one.name}: {one.reason}\n" for one in problems[:SHOWN])
            if len(problems) > SHOWN:
                sys.stderr.write(f"  and {len(problems) - SHOWN} more\n")

    pipeline = Pipeline(settings, _counting, _say)
    with locked(settings.out):
        try:
            report = pipeline.run()
        except GivenUpError as error:
            sys.stderr.write(f"{error}\nthe same command continues\n")
            return 1
    listed(
        f"replies are malformed ({settings.out / 'malformed.jsonl'}; `--retry-malformed`)", report.malformed
    )
    listed("parts are unfinished, which the same command tries again", report.unfinished)
    return 1 if report.unfinished else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def _counting(title: str, number: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal; yield what counts a part."""
    from rich.console import Console  # noqa: PLC0415 - `--help` needs none of it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=number)
        yield lambda: progress.advance(task)


if __name__ == "__main__":
    sys.exit(main())
