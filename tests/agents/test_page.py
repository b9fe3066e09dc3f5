# SPDX-License-Identifier: Apache-2.0
"""The tools of docs/agents.md can be used as they are written there."""

import re

from tests.architecture.source import ROOT
from verl.agents.interface import ToolCall
from verl.agents.tools.pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.DOTALL)


def test_the_function_and_the_class_of_the_page_answer_calls(tmp_path):
    path = tmp_path / "tools.py"
    path.write_text("\n".join(BLOCKS))
    options = MultiTurnConfig(enable=True, tools=(f"{path}:exchange", f"{path}:Notes", "calculator"))
    calls = [
        ToolCall("exchange", {"amount": 10.0, "currency": "EUR"}),
        ToolCall("remember", {"text": "first"}),
        ToolCall("remember", {"text": "second"}),
        ToolCall("calculator", {"expression": "2 + 3 * 4"}),
    ]

    with ToolPool(options) as pool:
        pool.start("a", {})
        pool.submit("a", calls)
        finished = []
        while not finished:
            finished = pool.ready(60.0)

    ((_, observations, _),) = finished
    assert [one.text for one in observations] == ["9.00 EUR", "1 notes", "2 notes", "14"]
