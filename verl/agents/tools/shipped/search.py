# SPDX-License-Identifier: Apache-2.0
"""Query a search engine behind an HTTP endpoint.

The endpoint is that of Search-R1 and verl:

    POST    {"queries": [text], "topk": 3, "return_scores": true}
    answer  {"result": [[{"document": {"contents": "title, a line end, text"}, "score": 1.0}, ...]]}

A document may also be text, or have `title` and `text`.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

MAX_BYTES = 4 << 20  # of an answer
AGAIN = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses after which another attempt may succeed
PAUSE_S = 0.5  # before the second attempt, doubled before each later attempt


class SearchError(RuntimeError):
    """The endpoint gave no answer."""


class Search:
    """Searches documents.

    Args:
        endpoint: URL that takes queries, such as http://localhost:8000/retrieve.
        num_results: Documents in an answer.
        max_characters: Characters of each document; the rest is cut off.
        timeout_s: Seconds of an attempt.
        max_attempts: Attempts before the call fails.
        headers: Headers of a request, such as an authorization.
    """

    name = "search"

    def __init__(
        self,
        endpoint: str,
        num_results: int = 3,
        max_characters: int = 2000,
        timeout_s: float = 15.0,
        max_attempts: int = 3,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if urlsplit(endpoint).scheme not in ("http", "https"):
            raise ValueError(
                f"`endpoint` must be a URL like http://localhost:8000/retrieve, got {endpoint!r}"
            )
        if num_results < 1 or max_attempts < 1:
            raise ValueError("`num_results` and `max_attempts` must be at least 1")
        self.endpoint, self.num_results, self.max_characters = endpoint, num_results, max_characters
        self.timeout_s, self.max_attempts = timeout_s, max_attempts
        self.headers = {"Content-Type": "application/json", **(headers or {})}

    def __call__(self, query: str) -> str:
        """Search for documents.

        Args:
            query: Words to search for.
        """
        if not query.strip():
            raise ValueError("`query` is empty")
        content = self._post({"queries": [query], "topk": self.num_results, "return_scores": True})
        try:
            documents = list(_documents(json.loads(content)))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SearchError(f"{self.endpoint} answered in another form: {error!r}") from error
        shown = [self._shown(number, *found) for number, found in enumerate(documents[: self.num_results], 1)]
        return "\n\n".join(shown) or "No documents found."

    def _shown(self, number: int, title: str, text: str) -> str:
        text = text.strip()
        cut = f"{text[: self.max_characters]} ..." if len(text) > self.max_characters else text
        return f"[{number}] {title.strip()}\n{cut}".strip()

    def _post(self, message: dict[str, Any]) -> bytes:
        request = urllib.request.Request(self.endpoint, json.dumps(message).encode(), self.headers)
        for attempt in range(1, self.max_attempts + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                    content = response.read(MAX_BYTES + 1)
            except urllib.error.HTTPError as error:
                reason, is_final = f"HTTP status {error.code}", error.code not in AGAIN
            except OSError as error:  # no connection, or none in time
                reason, is_final = str(getattr(error, "reason", error)), False
            else:
                if len(content) > MAX_BYTES:
                    raise SearchError(f"{self.endpoint} answered with more than {MAX_BYTES >> 20} MiB")
                return content
            if is_final or attempt == self.max_attempts:
                attempts = "1 attempt" if attempt == 1 else f"{attempt} attempts"
                raise SearchError(f"{self.endpoint} failed after {attempts}: {reason}")
            time.sleep(PAUSE_S * 2 ** (attempt - 1))
        raise AssertionError


def _documents(answer: Any) -> Iterator[tuple[str, str]]:
    results = answer["result"]
    for item in results[0] if results else ():
        document = item.get("document", item) if isinstance(item, dict) else item
        if isinstance(document, str):
            yield "", document
        elif "contents" in document:
            title, _, text = document["contents"].partition("\n")
            yield title.strip('"'), text
        else:
            yield document.get("title") or "", document["text"]
