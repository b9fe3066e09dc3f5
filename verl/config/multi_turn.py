# SPDX-License-Identifier: Apache-2.0
"""Section `worker.rollout.multi_turn`: conversations in which the policy calls tools."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.files.paths import existing_file
from verl.config.schema import option

FORMATS = ("auto", "hermes", "qwen3_coder", "glm", "gemma4", "json")
ON_TOOL_ERROR = ("show", "end", "stop")
SIDES = ("left", "middle", "right")
SHIPPED_TOOLS = ("calculator", "python", "search", "zoom")
SHIPPED_ENVIRONMENTS = ("gymnasium",)
SHIPPED_AGENTS = ("verifiers",)


@dataclass(frozen=True)
class MultiTurnConfig:
    """Conversations in which the policy calls tools."""

    enable: bool = option(False, "Let the policy call tools and read their answers, over several turns.")
    tools: tuple[str, ...] = option(
        (),
        "Tools that the policy may call: shipped ones by name, others by `file.py:NAME`, a function with type"
        " hints and a docstring, or a class.",
        choices=SHIPPED_TOOLS,
        extension="tool",
    )
    tool_kwargs: dict[str, Any] = option(dict, "Arguments of a tool's class, by the tool's name.")
    tool_config_path: str | None = option(
        None, "YAML file that lists tools in verl's form.", resolve=existing_file
    )
    environment: str | None = option(
        None,
        "World in which the policy acts, instead of tools: `gymnasium`, or a class `file.py:NAME` with"
        " `reset`, `step` and `close`.",
        choices=SHIPPED_ENVIRONMENTS,
        extension="environment",
    )
    environment_kwargs: dict[str, Any] = option(
        dict, "Arguments of the environment's class; the column `env_kwargs` of a row replaces single ones."
    )
    agent: str | None = option(
        None,
        "Program that leads each conversation itself, instead of tools: `verifiers`, or a function"
        " `file.py:NAME` that asks the policy through an OpenAI-compatible endpoint.",
        choices=SHIPPED_AGENTS,
        extension="agent",
    )
    agent_kwargs: dict[str, Any] = option(dict, "Further arguments of the agent's function.")
    format: str = option(
        "auto", "How the policy writes calls; `auto` finds it in the chat template.", choices=FORMATS
    )
    max_assistant_turns: int | None = option(
        None, "Maximum turns of the policy in a conversation; null is limited by tokens only.", minimum=1
    )
    max_user_turns: int | None = option(
        None, "Maximum answers of tools or the environment that the policy reads; null is any.", minimum=1
    )
    max_parallel_calls: int = option(1, "Maximum calls in a turn; any more are refused.", minimum=1)
    max_tool_response_length: int = option(
        256, "Maximum tokens of text in a tool's answer; a longer one is cut.", minimum=1
    )
    tool_response_truncate_side: str = option("middle", "Part of a long answer to cut out.", choices=SIDES)
    max_tokens_per_turn: int | None = option(
        None, "Maximum tokens of the policy in a turn; null is limited by the response.", minimum=1
    )
    max_images: int | None = option(
        None, "Maximum images in a conversation, the prompt's included; null is any number.", minimum=1
    )
    max_seconds: float | None = option(None, "Maximum seconds of a conversation; null is any.", minimum=0.01)
    tool_timeout_s: float = option(60.0, "Maximum seconds of a call.", minimum=0.01)
    tool_concurrency: int = option(8, "Calls that run at once next to each engine.", minimum=1)
    tool_memory_limit_gb: float = option(4.0, "Memory that a call may allocate, in GiB.", minimum=0.1)
    on_tool_error: str = option(
        "show",
        "A call that raises, hangs or dies: `show` it to the policy, `end` the conversation, which then does"
        " not count, or `stop` the run.",
        choices=ON_TOOL_ERROR,
    )

    @property
    def earns_rewards(self) -> bool:
        """True if turns earn rewards, which are the score of a run without a reward function."""
        return self.enable and (self.environment is not None or self.agent is not None)

    def length_problems(self, max_tokens: int, answer: int = 1) -> Iterator[str]:
        """Yield why responses of `max_tokens` are too short for a turn, an answer and another turn.

        `answer` has the tokens of the shortest one, with those of the chat template.
        """
        needed = 1 + answer + 1
        if self.enable and self.max_assistant_turns != 1 and max_tokens < needed:
            yield (
                f"`data.max_response_length` must be at least {needed} with"
                f" `worker.rollout.multi_turn.enable=true`, got {max_tokens}: it limits a whole conversation,"
                " and a turn, the shortest answer and another turn take as many tokens; set it to some"
                " hundreds, or `worker.rollout.multi_turn.max_assistant_turns=1`"
            )

    def problems(self, path: str) -> Iterator[str]:
        has_tools = bool(self.tools) or self.tool_config_path is not None
        worlds = [name for name in ("environment", "agent") if getattr(self, name) is not None]
        if self.enable and not has_tools and not worlds:
            yield (
                f"`{path}.enable=true` needs tools, an environment or an agent: set `{path}.tools`,"
                f" `{path}.environment` or `{path}.agent`"
            )
        if len(worlds) + has_tools > 1:
            given = [*(["tools"] if has_tools else []), *worlds]
            yield (
                f"`{path}` must have one of tools, an environment and an agent, got {' and '.join(given)}: an"
                " environment gets the calls of its own `tools`, and an agent passes its own"
            )
