# SPDX-License-Identifier: Apache-2.0
"""Tool-call formats by their names in `worker.rollout.multi_turn.format`.

To add one, write a `CallFormat` and list it here and in `verl.config.multi_turn.FORMATS`.
"""

import re

from verl.agents.parsers.gemma4 import GEMMA4
from verl.agents.parsers.interface import CallFormat
from verl.agents.parsers.json_calls import HERMES, PLAIN_JSON
from verl.agents.parsers.tagged_calls import GLM, QWEN3_CODER

OPTION = "worker.rollout.multi_turn.format"
# The first whose sign a template has is that of its model.
CALL_FORMATS: dict[str, CallFormat] = {
    "qwen3_coder": QWEN3_CODER,
    "glm": GLM,
    "gemma4": GEMMA4,
    "hermes": HERMES,
    "json": PLAIN_JSON,
}


def call_format(name: str, chat_template: str) -> CallFormat:
    """Return the format of that name; `auto` is the one that the chat template writes."""
    return CALL_FORMATS[format_of(chat_template) if name == "auto" else name]


def format_of(chat_template: str) -> str:
    """Return the name of the format in which a chat template writes calls."""
    for name, written in CALL_FORMATS.items():
        if re.search(written.sign, chat_template):
            return name
    raise ValueError(
        f"`{OPTION}=auto` finds no calls of tools in the chat template: set one of {sorted(CALL_FORMATS)}"
    )
