# SPDX-License-Identifier: Apache-2.0
"""The inside of an environment's process: its instance is the state of one conversation."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from verl.agents.environments.opening import as_opening, as_step
from verl.agents.interface import Observation
from verl.agents.tools.process import ToolServer


class EnvironmentServer(ToolServer):
    """Leads the environment of one conversation; `tool` makes it from the columns of a row."""

    def _create(self, row: Mapping[str, Any]) -> Observation:
        self.state = self.tool(row)
        try:
            return as_opening(self._run(self.state.reset, row))
        except BaseException:
            with suppress(Exception):  # it is reported with what `reset` raised
                self._close(None)
            raise

    def _call(self, step: Any) -> Observation:
        text, calls = step
        return as_step(self._run(self.state.step, text, list(calls)), self.limits)

    def _close(self, _: None) -> Observation:
        self._run(self.state.close)
        return Observation()
