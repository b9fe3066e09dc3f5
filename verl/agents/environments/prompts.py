# SPDX-License-Identifier: Apache-2.0
"""Prompts that environments give."""

from verl.agents.interface import Observation
from verl.agents.row import Row
from verl.agents.rules import ConversationRules


def row_of(rules: ConversationRules, opening: Observation) -> Row:
    """Return the row that a conversation begins with.

    Args:
        opening: With messages.

    Raises:
        ValueError: The template cannot render it, the model cannot read it, or it is too long.
    """
    name = f"the prompt of the environment `{rules.options.environment}`"
    row = rules.row_of(opening, name)
    length, limit = len(row.expanded_prompt), rules.max_prompt_tokens
    if length > limit:
        raise ValueError(
            f"{name} has {length} tokens, `data.max_prompt_length` is {limit}: raise it, or have `reset`"
            " return less"
        )
    return row
