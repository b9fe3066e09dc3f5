# SPDX-License-Identifier: Apache-2.0
"""The search server ranks by BM25, answers its command's users, and names what it cannot read."""

import json
import math
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from examples.search_server import Bm25, read_corpus
from tests.helpers.training import ROOT
from verl.agents.tools.shipped.search import Search

COMMAND = [sys.executable, str(ROOT / "examples/search_server.py")]
DOCUMENTS = ["red fox", "red red dog in a very long garden of many words", "blue whale"]


def test_scores_are_those_of_the_formula():
    ((document, score),) = Bm25(DOCUMENTS).search("Fox!", 3)

    # one of three documents has the word, once; it has 2 of 2 + 11 + 2 words, 5 on average
    rarity, norm = math.log(1 + 2.5 / 1.5), 0.25 + 0.75 * 2 / 5
    assert (document, score) == ("red fox", pytest.approx(rarity * 2.2 / (1 + 1.2 * norm)))


def test_rare_words_and_short_documents_rank_higher_and_others_are_left_out():
    index = Bm25(DOCUMENTS)

    assert [document for document, _ in index.search("red fox", 3)] == DOCUMENTS[:2]
    assert len(index.search("red", 1)) == 1 and index.search("xylophone", 3) == []
    assert Bm25([]).search("red", 3) == []


def test_the_command_serves_a_corpus_to_the_tool(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"title": "Bern", "text": "The capital."}, {"id": "1", "contents": '"Aare"\nA river.'}]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = subprocess.Popen([*COMMAND, str(corpus), "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        count, *_, url = process.stdout.readline().split()
        assert count == "2" and Search(url)("capital") == "[1] Bern\nThe capital."
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=10)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_a_line_that_is_no_document_is_named(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"contents": "a"}\n{"title": "b"}\n')

    with pytest.raises(ValueError, match=r"corpus.jsonl, line 2: a document must have `contents`"):
        list(read_corpus(corpus))
    assert subprocess.run([*COMMAND, str(corpus)], capture_output=True).returncode == 2
