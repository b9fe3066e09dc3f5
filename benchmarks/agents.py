# SPDX-License-Identifier: Apache-2.0
"""Share of time that a rollout engine idles while its conversations wait for their tools.

    python benchmarks/agents.py [--conversations 64] [--seconds 3] [--tokens 128] [--engine vllm]

Conversations of 1 to 8 turns call a tool that takes 0 to 3 seconds. They run as the trainer runs them, each
at its own pace, and once more turn by turn: all turns are sampled, then all calls are answered. The engine
idles while it has no request. A tiny model with random weights; every turn counts as a call. The last
line is JSON.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
from dataclasses import replace

from transformers import AutoConfig

from verl.agents.interface import ToolCall
from verl.agents.parsers.interface import CallFormat
from verl.agents.rules import ConversationRules
from verl.agents.setup import conversation_rules, schemas_of
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig
from verl.config.rollout import RolloutConfig
from verl.data.readers import Readers, load_tokenizer
from verl.models.hub_names import HubNames, auto_class
from verl.models.tiny import save_tiny_model
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.conversations.driver import ConversationDriver, key_of
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import EngineSetup, FinishedResponse, RolloutEngine, SamplingOptions

TEMPLATE = Path(__file__).resolve().parent.parent / "examples" / "chat_template" / "qwen_vl_tools.jinja"
MAX_TURNS, MAX_TOKENS, PROMPT = 8, 3900, 100
LAYERS = 24  # more than a tiny model's, so that sampling takes about as long as the calls
FIRST_TOKEN = 30  # after the special ones
ONE_PROCESS = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517",
    "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip
TOOL = '''
import asyncio


class Wait:
    """A tool that takes the seconds of its row, one number for each turn, and then ends the conversation."""

    name = "wait"

    def create(self, row):
        return list(row["seconds"])

    async def __call__(self, seconds: list):
        """Wait."""
        from verl.agents.interface import Observation

        await asyncio.sleep(seconds.pop(0))
        return Observation("waited", done=not seconds)

    def close(self, seconds):
        seconds.clear()
'''


class TurnByTurn(ConversationDriver):
    """Samples a turn of every conversation, then answers all of their calls."""

    def step(self, at_most: int) -> list[FinishedResponse]:
        """Sample all turns, wait for all answers, and return the conversations that ended."""
        while self.sampling.engine.num_unfinished:
            self._resume([(key_of(turn), turn) for turn in self.sampling.step(at_most)])
        while self._num_calling:
            self._resume(self._answers())
        ended = [self._finish(key) for key in list(self._open) if self._open[key].finished is not None]
        self._submit(list(self._open))
        return ended


class Watched:
    """An engine, and the seconds in which it made steps."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine, self.busy_s = engine, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(self, at_most: int = 1) -> list[FinishedResponse]:
        """Make steps, and count their time if there was a request."""
        start, has_work = time.perf_counter(), self.engine.num_unfinished > 0
        finished = self.engine.step(at_most)
        self.busy_s += (time.perf_counter() - start) * has_work
        return finished


def rows_of(rules: ConversationRules, count: int, longest_s: float, seed: int) -> list[dict[str, Any]]:
    """Return prompts with the seconds of each of their calls; 1 to 8 turns are equally frequent."""
    rng = random.Random(seed)
    ids = rules.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    turns = [1 + number % MAX_TURNS for number in range(count)]
    rng.shuffle(turns)
    return [
        {
            "uid": f"row {number}", "raw_prompt_ids": ids, "multi_modal_data": None,
            "prompt_messages": [{"role": "user", "content": "hello"}],
            "seconds": [rng.uniform(0, longest_s) for _ in range(length)],
        }
        for number, length in enumerate(turns)
    ]  # fmt: skip


def save_model(folder: Path, tokens: int) -> str:
    """Write a random model for which one of `tokens` tokens ends a turn."""
    save_tiny_model(folder, "qwen2", num_hidden_layers=LAYERS)
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    ends = [*settings["eos_token_id"], *range(FIRST_TOKEN, vocabulary, tokens)]
    file.write_text(json.dumps(settings | {"eos_token_id": ends}))
    return str(folder)


def build(
    folder: Path, name: str, options: MultiTurnConfig, tokens: int
) -> tuple[RolloutEngine, ConversationRules]:
    """Build an engine with a tiny random model, and the rules of its conversations."""
    model_path = save_model(folder / "model", tokens)
    config = RolloutConfig(
        name=name, dtype="fp32", tensor_parallel_size=1, max_model_len=MAX_TOKENS + PROMPT, multi_turn=options
    )
    engine = build_rollout_engine(config, EngineSetup(model_path, MAX_TOKENS + PROMPT, "cpu"))
    model = AutoConfig.from_pretrained(model_path)
    weights = auto_class(model).from_pretrained(model_path)
    engine.sync_weights(HubNames(model).convert(weights.state_dict().items()))
    engine.wake()
    template = str(TEMPLATE)
    tokenizer = load_tokenizer(model_path, template)
    rules = conversation_rules(
        Readers(tokenizer, None, None, None, schemas_of(options)), options, max_tokens=MAX_TOKENS,
        max_prompt_tokens=PROMPT, template_variables={}, override_chat_template=template,
    )  # fmt: skip
    always = CallFormat(lambda text, schemas: [ToolCall("wait", {})], "")
    return engine, replace(rules, format=always)


def measure(
    driver: type[ConversationDriver],
    engine: RolloutEngine,
    rules: ConversationRules,
    rows: Sequence[dict[str, Any]],
) -> dict[str, float]:
    """Lead all conversations and return the seconds, the idle share, turns and tokens."""
    watched = Watched(engine)
    with ToolPool(rules.options) as pool:
        start = time.perf_counter()
        leading = driver(ContinuedSampling(watched), pool, rules, lambda media: None)  # pyright: ignore[reportArgumentType]
        found = [
            one for part in leading.run(rows, SamplingOptions(max_tokens=MAX_TOKENS, seed=1)) for one in part
        ]
        seconds = time.perf_counter() - start
    trajectories = [one.trajectory for one in found if one.trajectory is not None]
    return {
        "seconds": round(seconds, 1),
        "idle_share": round(1 - watched.busy_s / seconds, 3),
        "turns": sum(len(one.turns) for one in trajectories),
        "sampled_tokens": sum(sum(one.is_sampled) for one in trajectories),
    }


def main() -> None:
    """Measure both and print them."""
    os.environ.update(ONE_PROCESS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0, help="of the longest call")
    parser.add_argument("--tokens", type=int, default=128, help="of a turn, about")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "hf"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "wait.py").write_text(TOOL)
        multi_turn = MultiTurnConfig(
            enable=True, tools=(f"{folder / 'wait.py'}:Wait",), tool_concurrency=options.conversations
        )  # fmt: skip
        engine, rules = build(folder, options.engine, multi_turn, options.tokens)
        rows = rows_of(rules, options.conversations, options.seconds, seed=0)
        own_pace = measure(ConversationDriver, engine, rules, rows)
        turn_by_turn = measure(TurnByTurn, engine, rules, rows)
        engine.close()
    for title, found in (("each at its own pace", own_pace), ("turn by turn", turn_by_turn)):
        print(
            f"{title:22s} {found['seconds']:6.1f} s, idle {found['idle_share']:6.1%}, {found['turns']} turns"
        )
    print(json.dumps({"own_pace": own_pace, "turn_by_turn": turn_by_turn}))


if __name__ == "__main__":
    main()
