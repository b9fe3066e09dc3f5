# SPDX-License-Identifier: Apache-2.0
"""Serve a search over a JSONL file for the tool `search`, in the HTTP form of Search-R1.

    python3 examples/search_server.py corpus.jsonl --port 8000

A line has `contents` (the title in quotes, a line end, the text), or `title` and `text`. Documents are ranked
by BM25 over their words. The index is in memory, about 6 kB for each document of 100 words: a whole Wikipedia
needs another server. Each request has a thread; Ctrl-C ends the server.
"""

import argparse
import heapq
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WORD = re.compile(r"\w+")
SATURATION, LENGTH_WEIGHT = 1.2, 0.75  # k1 and b of BM25
MAX_BODY = 1 << 20  # bytes of a request
MAX_RESULTS = 100


class Bm25:
    r"""Ranks documents, each the text that a search returns, by the words that they share with a query.

    Example::

        index = Bm25(['"Bern"\nBern is the capital of Switzerland.'])
        [(document, score)] = index.search("capital", 3)
    """

    def __init__(self, documents: Iterable[str]) -> None:
        self.documents: list[str] = []
        self._lengths: list[int] = []
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)  # by word: document and count
        for number, document in enumerate(documents):
            counts = Counter(_words(document))
            self.documents.append(document)
            self._lengths.append(sum(counts.values()))
            for word, count in counts.items():
                self._postings[word].append((number, count))
        self._mean_length = max(1.0, sum(self._lengths) / max(1, len(self._lengths)))

    def search(self, query: str, limit: int) -> list[tuple[str, float]]:
        """Return the best documents with their scores; none that shares no word."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(_words(query)):
            found = self._postings.get(word, ())
            rarity = math.log(1 + (len(self.documents) - len(found) + 0.5) / (len(found) + 0.5))
            for number, count in found:
                norm = 1 - LENGTH_WEIGHT + LENGTH_WEIGHT * self._lengths[number] / self._mean_length
                scores[number] += rarity * count * (SATURATION + 1) / (count + SATURATION * norm)
        best = heapq.nsmallest(limit, scores, key=lambda number: (-scores[number], number))
        return [(self.documents[number], scores[number]) for number in best]


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def read_corpus(path: Path) -> Iterable[str]:
    """Yield the documents of a JSONL file as `contents`.

    Raises:
        ValueError: A line is not a document; the message has its number.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                yield row["contents"] if "contents" in row else f'"{row["title"]}"\n{row["text"]}'
            except (ValueError, KeyError, TypeError) as error:
                rule = "a document must have `contents`, or `title` and `text`"
                raise ValueError(f"{path}, line {number}: {rule} ({error!r})") from error


class SearchHandler(BaseHTTPRequestHandler):
    """Answers POST requests with queries from the index of its server."""

    server: "SearchServer"

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        try:
            if length > MAX_BODY:
                raise ValueError(f"a request has at most {MAX_BODY} bytes")
            answer = self.answer(json.loads(self.rfile.read(length)))
        except (ValueError, KeyError, TypeError) as error:
            self.send(400, {"error": repr(error)})
        else:
            self.send(200, answer)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        limit = min(int(request.get("topk") or 3), MAX_RESULTS)
        results = [self.server.index.search(query, limit) for query in request["queries"]]
        return {
            "result": [
                [{"document": {"contents": document}, "score": score} for document, score in found]
                for found in results
            ]
        }

    def send(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass  # a line for each query would hide errors


class SearchServer(ThreadingHTTPServer):
    """A server of one index, with a thread for each request."""

    daemon_threads = True
    request_queue_size = 128  # conversations that search at once

    def __init__(
        self, address: tuple[str, int], index: Bm25, handler: type[SearchHandler] = SearchHandler
    ) -> None:
        super().__init__(address, handler)
        self.index = index


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 for other machines (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    try:
        index = Bm25(read_corpus(options.corpus))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    with SearchServer((options.host, options.port), index) as server:
        host, port = server.server_address[:2]
        print(f"{len(index.documents)} documents at http://{host}:{port}/retrieve", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
