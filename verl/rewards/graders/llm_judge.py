# SPDX-License-Identifier: Apache-2.0
"""A language model that judges responses, behind any OpenAI-compatible endpoint.

For reward functions that are `async def`, such as `examples/reward_function/llm_judge.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from verl.rewards.graders.endpoint import Endpoint, excerpt


@dataclass(eq=False)
class Judge(Endpoint):
    """Asks a model questions: a bounded number at a time, with retries, each different question once.

    Example::

        judge = Judge("http://localhost:8000/v1", "Qwen/Qwen3-8B", cache_dir="/scratch/judge")
        await judge.ask([{"role": "user", "content": "Is 7 prime? Yes or no."}])  # "Yes"
    """

    _: KW_ONLY
    temperature: float | None = 0.0  # None is the server's default
    max_tokens: int | None = 512  # of an answer; None is the server's default
    options: Mapping[str, Any] | None = None  # more fields of the request: `{"seed": 1}`

    def __post_init__(self) -> None:
        super().__post_init__()
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        self.parameters = {key: value for key, value in own.items() if value is not None}
        self.parameters |= self.options or {}

    async def ask(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> str:
        """Return the model's answer to a conversation. With a cache, equal questions are sent once.

        `parameters` are fields of this request, over those of the judge.

        Raises:
            ValueError: The server refuses the request for good.
            TimeoutError: No attempt was answered in time.
            ConnectionError: The server cannot be reached.
            RuntimeError: It failed on every attempt, or answered without text.
        """
        fields = self.parameters | parameters
        body = {"model": self.model, "messages": list(messages), **fields}
        return await self.cached([fields, list(messages)], "chat/completions", body)

    def key(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the name of the answer in the cache."""
        return self.name_of([self.parameters, list(messages)])

    def text_of(self, answer: Any) -> str:
        try:
            choice = answer["choices"][0]
            text, why = choice["message"].get("content"), choice.get("finish_reason")
        except (LookupError, TypeError, AttributeError) as error:
            what = f"{self} answered something other than a chat completion: {excerpt(str(answer))}"
            raise RuntimeError(f"{what}: check `base_url`, which usually ends in /v1") from error
        if not isinstance(text, str) or not text:
            what = f"{self} answered without text (finish_reason {why!r})"
            raise RuntimeError(f"{what}: a model that thinks needs a larger `max_tokens`")
        return text
