# SPDX-License-Identifier: Apache-2.0
"""How much time texts from policies, tools, clients and judges take from the thread that reads them.

    python benchmarks/hostile_texts.py [--texts 10000] [--tokens 32768] [--limit-ms 50]

Texts are a start, a repeated part and an end, drawn from marks of every call format, brackets, quotes,
spaces, special tokens and digits; every tenth has `--tokens` tokens, the others any number below. Each goes
through every reader. A reader may refuse a text by the error that its caller expects; anything else ends the
program, as it would end an engine. The last line is JSON; exit status 1 says that a reader was over the
limit, in milliseconds of the processor's time.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.helpers.conversations import CALL, begin, rules_of, say
from verl.agents.conversation import Conversation
from verl.agents.endpoint.chat_messages import ApiError, read_messages
from verl.agents.row import SampledTurn
from verl.agents.tools.answers import AnswerLimits, as_observation
from verl.rewards.graders.judging import read_checklist, read_choice, read_criteria, read_ranking, read_score

MARKS = (
    "<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "</parameter>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>call:add{", "<tool_call|>",
    '<|"|>', "<think>", "</think>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "```json\n", "```",
    '{"name": "add"', '"arguments": {', '{"', '":', "{", "}", "[", "]", "(", ")", '"', "'", ",", ":", "\\",
    "\n", " ", "\t", "a", "1", "-", "0", ".", "1e999", "NaN", "null", "\u0000", "\u202e", "\u00e9",
    "\U0001f600", "Score: ", "[[A]]", "[1] > ", "1: yes\n",
)  # fmt: skip
# Formats of calls by the chat template that writes them.
FORMATS = {name: name for name in ("hermes", "qwen3_coder", "glm", "gemma4")} | {"llama": "json"}
CRITERIA = read_criteria(["is short", {"criterion": "is wrong", "weight": -1}])


def recipes(count: int, tokens: int, seed: int) -> Iterator[tuple[str, str, str, int]]:
    """Yield start, part, end and number of tokens of each text."""
    rng = random.Random(seed)

    def words(most: int) -> str:
        return "".join(rng.choices(MARKS, k=rng.randrange(most + 1)))

    for number in range(count):
        size = tokens if number % 10 == 0 else rng.randrange(1, tokens)
        yield words(4), words(3) or "a", words(2), size


def token_ids(tokenizer: Any, start: str, part: str, end: str, size: int) -> list[int]:
    """Return the tokens of a text, cut or filled by its part to a number of them."""
    first, each, last = (tokenizer.encode(text, add_special_tokens=False) for text in (start, part, end))
    each = each or last or first or [tokenizer.eos_token_id]
    room = max(0, size - len(first) - len(last))
    return ([*first, *(each * (room // len(each) + 1))[:room], *last])[:size]


class Readers:
    """The readers that run in the thread of an engine or a server, by name."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.conversations = tokens, {}
        for template, name in FORMATS.items():
            self.conversations[template] = rules_of(
                template, format=name, max_tokens=4 * tokens, max_parallel_calls=8
            )

    def timed(self, recipe: tuple[str, str, str, int]) -> Iterator[tuple[str, float]]:
        start, part, end, size = recipe
        for name, rules in self.conversations.items():
            ids = token_ids(rules.tokenizer, start, part, end, size)
            turn = SampledTurn(ids, [-1.0] * len(ids), "stop")
            yield f"a turn, {name}", seconds(begin(rules).add_turn, turn)
        rules = next(iter(self.conversations.values()))
        text = rules.tokenizer.decode(token_ids(rules.tokenizer, start, part, end, size))
        conversation = waiting(rules)
        answer = as_observation(text, AnswerLimits.from_options(rules.options))  # in the process of the tool
        yield "an answer of a tool", seconds(conversation.observe, [answer])
        yield "a judge's answer", seconds(judge, text)
        yield "a client's message", seconds(read_client, text)


def waiting(rules: Any) -> Conversation:
    """Return a conversation whose call has no answer yet."""
    conversation = begin(rules)
    assert say(conversation, CALL)
    return conversation


def judge(text: str) -> None:
    read_score(text)
    read_choice(text)
    read_ranking(text, 3)
    read_checklist(text, CRITERIA)


def read_client(text: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": text[:64], "arguments": text}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    with suppress(ApiError):  # the client is told what is wrong
        for message in read_messages([turn, {"role": "user", "content": text}], None):
            assert message.digest


def seconds(read: Callable[..., Any], *arguments: Any) -> float:
    start = time.process_time()
    read(*arguments)
    return time.process_time() - start


def slowest_ms(worst: dict[str, tuple[float, Any]]) -> float:
    """Return the most milliseconds that a reader spent on a text."""
    return 1e3 * max(spent for spent, _ in worst.values())


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--limit-ms", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    readers, times = Readers(args.tokens), {}
    worst: dict[str, tuple[float, tuple[str, str, str, int]]] = {}
    list(readers.timed(("a", "b", "c", 8)))  # what a reader does once for all texts
    gc.collect()
    gc.freeze()  # of packages, a collection takes 0.2 s
    for number, recipe in enumerate(recipes(args.texts, args.tokens, args.seed)):
        if number and number % 1000 == 0:
            print(f"{number} of {args.texts} texts, worst {slowest_ms(worst):.1f} ms", file=sys.stderr)
        for (name, spent), (_, again) in zip(readers.timed(recipe), readers.timed(recipe), strict=True):
            spent = min(spent, again)  # other programs use the machine, too
            times.setdefault(name, []).append(spent)
            worst[name] = max(worst.get(name, (0.0, recipe)), (spent, recipe))
    print(f"{'reader':32} {'median ms':>10} {'worst ms':>10}  of start, part, end, tokens")
    for name, each in times.items():
        print(f"{name:32} {1e3 * median(each):10.2f} {1e3 * max(each):10.2f}  {worst[name][1]!r}")
    slowest = slowest_ms(worst)
    print(json.dumps({"texts": args.texts, "tokens": args.tokens, "worst_ms": round(slowest, 2)}))
    sys.exit(slowest > args.limit_ms)


if __name__ == "__main__":
    main()
