# SPDX-License-Identifier: Apache-2.0
"""Talk to a model, with images and videos if it reads them.

    verl-chat checkpoints/math/first/global_step_100
    verl-chat Qwen/Qwen2.5-VL-3B-Instruct --engine vllm --system "Answer in one word."
    echo "What is 2 + 3?" | verl-chat outputs/model --temperature 0

A model is a folder, a hub name or a checkpoint (`global_step_N`), which is merged into a temporary folder.
Lines from a pipe or a file are answered one by one, with nothing else on stdout.

  /image PATH  put an image before the next message
  /video PATH  put a video before the next message
  /audio PATH  put audio before the next message
  /reset       begin a new conversation
  /help        show these commands
  /quit        end, as does Ctrl-D; Ctrl-C ends a response that is being written

Exit status: 0; 2 for bad input; 1 for an unsuitable machine; 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from verl.config.files.paths import model_source
from verl.config.model import DTYPES
from verl.distributed.backends import BACKENDS
from verl.trainer.command import at_least, run_told
from verl.trainer.evaluation.model_folder import loadable
from verl.trainer.run.exit_status import BAD_INPUT, INTERRUPTED
from verl.utils.typed_command import command_parser
from verl.utils.version_check import check_versions

if TYPE_CHECKING:
    from verl.cli.chat_session import Conversation
    from verl.models.families.interface import Kind

ENGINES = ("hf", "vllm", "sglang")
PROMPT = "> "
MEDIA: dict[str, "Kind"] = {"/image": "image", "/video": "video", "/audio": "audio"}
COMMANDS = "".join(f"{line[2:]}\n" for line in (__doc__ or "").splitlines() if line.startswith("  /"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    status = run_told(lambda: _talk(options))
    if status == INTERRUPTED:
        sys.stderr.write("\n")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("verl-chat", __doc__)
    add = parser.add_argument
    add("model", help="folder, hub name or global_step_N")
    add(
        "--engine",
        choices=ENGINES,
        default="hf",
        help="hf writes words as they come and starts soonest (default)",
    )
    add("--system", metavar="TEXT", help="system message (default: the model's own)")
    add("--temperature", type=float, default=1.0, help="0 takes the most likely token (default: 1)")
    add("--top-p", type=float, default=1.0, help="probability mass to sample from (default: 1)")
    add("--top-k", type=int, default=-1, help="likeliest tokens to sample from (default: all)")
    add("--max-tokens", type=at_least(1), default=1024, help="longest response (default: 1024)")
    add("--max-length", type=at_least(2), help="longest conversation (default: the model's, at most 8192)")
    add("--seed", type=at_least(0), default=1, help="random seed (default: 1)")
    add("--dtype", choices=sorted(DTYPES), help="of the weights (default: bf16 on GPUs, fp32 on CPU)")
    add("--device", choices=("auto", *BACKENDS), default="auto", help="default: a GPU if there is one")
    add("--format-prompt", type=Path, metavar="FILE", help="template of each message, as data.format_prompt")
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="replaces the model's, as data.override_chat_template",
    )
    add(
        "--min-pixels",
        type=at_least(1),
        default=262144,
        help="of an image, as data.min_pixels (default: 262144)",
    )
    add("--max-pixels", type=at_least(1), default=4194304, help="as data.max_pixels (default: 4194304)")
    add("--trust-remote-code", action="store_true", help="allow Python code that comes with the model")
    return parser


def _talk(options: argparse.Namespace) -> int:
    try:
        model_source(options.model)  # a misspelled folder is told before torch loads
    except (ValueError, OSError) as error:
        raise ValueError(f"the model {options.model}: {error}") from error
    for path in filter(None, [options.format_prompt, options.chat_template]):
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}")
    if options.temperature < 0 or not 0 < options.top_p <= 1:
        raise ValueError("`--temperature` must be at least 0 and `--top-p` above 0 and at most 1")
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401, PLC0415 - importing it lets `input` edit lines and recall earlier ones

        sys.stderr.write("loading the model ...\n")
    from verl.cli.chat_session import open_conversation  # noqa: PLC0415 - torch loads after the options

    check_versions(options.engine)
    loaded = loadable(options.model, trust_remote_code=options.trust_remote_code)
    with loaded as model, open_conversation(model.path, options) as conversation:
        if is_terminal:
            sys.stderr.write(f"{model.name}; /help lists commands, Ctrl-D ends\n")
        return answer(conversation, typed_lines() if is_terminal else sys.stdin, is_terminal=is_terminal)


def typed_lines() -> Iterator[str]:
    """Yield the lines that a person types, until Ctrl-D."""
    with suppress(EOFError):
        while True:
            yield input(PROMPT)
    sys.stderr.write("\n")


def answer(conversation: "Conversation", lines: Iterable[str], *, is_terminal: bool) -> int:
    """Answer each line; return 2 if a line from a pipe could not be answered, else 0."""
    status = 0
    for line in map(str.strip, lines):
        if line in ("/quit", "/exit"):
            break
        if not line:
            continue
        try:
            if line.startswith("/"):
                run_command(conversation, line)
            else:
                _write_response(conversation.ask(line))
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
            status = 0 if is_terminal else BAD_INPUT
    return status


def run_command(conversation: "Conversation", line: str) -> None:
    """Run a line that begins with a slash; raise `ValueError` for an unknown one."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name in MEDIA:
        if not argument:
            raise ValueError(f"{name} needs the path of a file")
        conversation.add_media(MEDIA[name], argument)
    elif name == "/reset":
        conversation.reset()
    elif name == "/help":
        sys.stderr.write(COMMANDS)
    else:
        raise ValueError(f"{name} is no command; /help lists them")


def _write_response(pieces: Iterator[str]) -> None:
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
