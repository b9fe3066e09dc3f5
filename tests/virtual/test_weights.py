# SPDX-License-Identifier: Apache-2.0
"""Weights for an engine in another process, on a virtual GPU: what leaves it, and what sending them holds."""

import pytest

from tests.virtual.checks import problems
from tests.virtual.measure import PhaseReport
from tests.virtual.shapes import Setup
from verl.distributed.weights.peer_link import PIECE_BYTES

pytestmark = pytest.mark.heavy

VOCABULARY = 1 << 20  # embeddings of four pieces
OUT = "out verl/distributed/weights/server.py:WeightServer._filled"
IN = "in verl/distributed/weights/peer_link.py:PeerLink.send"


def copied(phase: PhaseReport, place: str) -> int:
    return phase.copies[place][1]


@pytest.mark.nightly("verl/workers", "verl/distributed")
@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param({name: True}, marks=pytest.mark.slow) for name in ("offload", "cpu_offload"))],
    ids=str,
)
def test_a_rank_copies_its_share_to_the_host_once_and_sends_it_in_pieces(cluster, options):
    setup = Setup(own_engine=True, updates=1, override={"vocab_size": VOCABULARY}, **options)
    phases = cluster.measure("tiny", setup, ranks=2)

    publish, send = phases["publish_weights"], phases["send_weights"]
    assert problems(phases) == []
    assert publish.end == publish.start == send.end
    assert copied(publish, OUT) == copied(send, IN) > 4 * PIECE_BYTES
    assert list(send.copies) == [IN] and send.collectives == []
    assert PIECE_BYTES < send.peak - send.start <= 2 * PIECE_BYTES
