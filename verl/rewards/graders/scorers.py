# SPDX-License-Identifier: Apache-2.0
"""Scoring, classifying and embedding models behind vLLM's endpoints; cached and retried like judges.

`fields` of each method are more fields of the request, such as `use_activation=False` for the raw number of a
reward model. Errors are those of `Judge.ask`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl.rewards.graders.endpoint import Endpoint

# A text, or the messages of a conversation, to which the model's chat template is applied.
Input = str | Sequence[Mapping[str, Any]]


class Scorer(Endpoint):
    """A cross-encoder or reranker, which compares two texts."""

    async def score(self, query: str, document: str, **fields: Any) -> float:
        """Return how well a document fits a query."""
        body = {"text_1": query, "text_2": document, **fields}
        return float((await first_entry(self, "../score", body))["score"])


class Classifier(Endpoint):
    """A sequence classification model, such as a reward model, which has one class."""

    async def classify(self, text: Input, **fields: Any) -> list[float]:
        """Return the model's number for each of its classes."""
        return [
            float(value) for value in (await first_entry(self, "../classify", _of(text) | fields))["probs"]
        ]


class Embedder(Endpoint):
    """A model that turns texts into vectors."""

    async def embed(self, text: Input, **fields: Any) -> list[float]:
        return [
            float(value) for value in (await first_entry(self, "embeddings", _of(text) | fields))["embedding"]
        ]


async def first_entry(endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model answers about the only text of a request."""
    answer = await endpoint.cached([path, dict(body)], path, {"model": endpoint.model, **body})
    return json.loads(answer)["data"][0]


def _of(text: Input) -> dict[str, Any]:
    return {"input": text} if isinstance(text, str) else {"messages": list(text)}
