# SPDX-License-Identifier: Apache-2.0
"""Run Python code in the sandbox. Variables last as long as the conversation, and figures are shown."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl.agents.interface import Observation
from verl.agents.tools.answers import BadAnswerError, read_image
from verl.sandbox.outcome import SandboxError
from verl.sandbox.runner import working_isolation
from verl.sandbox.session import SESSION_LIMITS, Session, SessionEndedError


class Notebook:
    """The session of a conversation, which starts at its first code and after each end."""

    def __init__(self, tool: "Python") -> None:
        self.tool = tool
        self._session: Session | None = None

    def run(self, code: str) -> Observation:
        if self._session is None:
            self._session = Session(self.tool.limits, allow_unsafe=self.tool.allow_unsafe)
        try:
            cell = self._session.run(code, max_images=self.tool.max_images)
        except SessionEndedError as error:
            self.close()
            return Observation(f"The code was ended: {error}. All variables are lost.", failed=False)
        try:
            figures = [read_image(content) for content in cell.images[: self.tool.max_images]]
        except BadAnswerError as error:  # the code wrote to the connection of the sandbox
            return Observation(f"{cell.text}\nThe figures are lost: the code sent {error}.".lstrip())
        return Observation(cell.text or ("" if figures else "(no output)"), figures)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


class Python:
    """Runs code as a notebook does. An error of the code is an answer like any other.

    Args:
        timeout_s: Seconds of a call; keep it below `tool_timeout_s`.
        cpu_s: Seconds of processor time of a conversation.
        memory_mb: Address space of the program in MiB.
        max_images: Figures that a call returns.
        allow_unsafe: Run code even where no isolation works.
    """

    name = "python"

    def __init__(
        self,
        timeout_s: float = 15.0,
        cpu_s: float = SESSION_LIMITS.cpu_s,
        memory_mb: int = SESSION_LIMITS.memory_mb,
        max_images: int = 4,
        allow_unsafe: bool = False,
    ) -> None:
        self.limits = replace(SESSION_LIMITS, wall_s=timeout_s, cpu_s=cpu_s, memory_mb=memory_mb)
        self.max_images, self.allow_unsafe = max_images, allow_unsafe
        try:
            working_isolation(allow_unsafe)  # found once, for the processes of all conversations
        except SandboxError as error:
            raise ValueError(f"`python` cannot run here: {error}") from error

    def create(self, row: Mapping[str, Any]) -> Notebook:
        return Notebook(self)

    def __call__(self, notebook: Notebook, code: str) -> Observation:
        """Run Python code. Variables stay for later calls; figures of matplotlib are shown.

        Args:
            code: Code to run; what it prints and the value of its last line are returned.
        """
        return notebook.run(code)

    def close(self, notebook: Notebook) -> None:
        notebook.close()
