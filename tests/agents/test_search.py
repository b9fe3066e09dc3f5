# SPDX-License-Identifier: Apache-2.0
"""The search tool against a real HTTP server over a small index."""

import json
import threading

import pytest

from examples.search_server import Bm25, SearchHandler, SearchServer
from verl.agents.interface import ToolCall
from verl.agents.tools.shipped import search
from verl.agents.tools.shipped.search import Search, SearchError
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig

INDEX = {
    "Bern": "Bern is the capital of Switzerland.",
    "Paris": "Paris is the capital of France.",
    "Aare": "The Aare is a river of Switzerland, which flows through Bern.",
}


class Handler(SearchHandler):
    """Records requests, and answers with the status or the body that a test wants."""

    def do_POST(self):  # noqa: N802 - the name that http.server calls
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append((request, self.headers["Authorization"]))
        status = server.statuses.pop(0) if server.statuses else 200
        if server.body is None:
            self.send(status, self.answer(request))
        else:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(server.body)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(search, "PAUSE_S", 0.01)
    index = Bm25(f'"{title}"\n{text}' for title, text in INDEX.items())
    server = SearchServer(("127.0.0.1", 0), index, Handler)
    server.requests, server.statuses, server.body = [], [], None
    server.url = f"http://127.0.0.1:{server.server_port}/retrieve"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_query_finds_its_documents(server):
    found = Search(server.url, num_results=2, headers={"Authorization": "Bearer x"})("capital of Switzerland")

    assert found == (
        "[1] Bern\nBern is the capital of Switzerland.\n\n[2] Paris\nParis is the capital of France."
    )
    request = {"queries": ["capital of Switzerland"], "topk": 2, "return_scores": True}
    assert server.requests == [(request, "Bearer x")]


def test_nothing_found_is_said(server):
    assert Search(server.url)("xylophone") == "No documents found."


@pytest.mark.parametrize(
    ("document", "shown"),
    [
        ("plain text", "[1] \nplain text"),
        ({"title": "T", "text": "some text " * 10}, "[1] T\nsome text  ..."),
        ({"document": {"title": "T", "text": "x"}}, "[1] T\nx"),
    ],
)
def test_documents_have_several_forms_and_are_cut(server, document, shown):
    server.body = json.dumps({"result": [[document]]}).encode()

    assert Search(server.url, max_characters=10)("x") == shown


def test_an_overloaded_endpoint_is_asked_again(server):
    server.statuses = [503, 429]

    assert Search(server.url)("river").startswith("[1] Aare")
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("statuses", "body", "reason", "num_requests"),
    [
        ([500] * 3, None, "failed after 3 attempts: HTTP status 500", 3),
        ([404], None, "failed after 1 attempt: HTTP status 404", 1),
        ([], b"<html>", "answered in another form: JSONDecodeError", 1),
        ([], b'{"error": 1}', "answered in another form: KeyError", 1),
        ([], b" " * (5 << 20), "answered with more than 4 MiB", 1),
    ],
)
def test_an_endpoint_that_fails_is_an_error_with_its_reason(server, statuses, body, reason, num_requests):
    server.statuses, server.body = statuses, body

    with pytest.raises(SearchError, match=reason):
        Search(server.url)("x")
    assert len(server.requests) == num_requests


def test_no_endpoint_is_an_error_with_its_reason(monkeypatch):
    monkeypatch.setattr(search, "PAUSE_S", 0.01)

    with pytest.raises(SearchError, match=r"failed after 3 attempts: .*refused"):
        Search("http://127.0.0.1:9/x")("x")


def test_options_of_search_are_checked():
    with pytest.raises(ValueError, match="`endpoint` must be a URL like"):
        Search("localhost:8000")
    with pytest.raises(ValueError, match="must be at least 1"):
        Search("http://localhost", num_results=0)


def test_search_runs_in_the_pool(server):
    options = MultiTurnConfig(
        enable=True, tools=("search",), tool_kwargs={"search": {"endpoint": server.url, "num_results": 1}}
    )
    with ToolPool(options) as pool:
        pool.start("a", {})
        pool.submit("a", [ToolCall("search", {"query": "river"}), ToolCall("search", {"query": " "})])
        ((_, (found, empty)),) = pool.ready(30.0)

    assert found.text.startswith("[1] Aare")
    assert (empty.failed, empty.text) == (True, "search failed: ValueError: `query` is empty")
