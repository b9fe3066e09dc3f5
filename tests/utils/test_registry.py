# SPDX-License-Identifier: Apache-2.0
import pytest

from verl.utils.registry import Registry


def test_a_registered_function_is_found_by_name_and_unchanged():
    losses = Registry("worker.actor.loss_type")

    @losses.register("plain")
    def plain():
        return 1

    assert losses["plain"] is plain and plain() == 1
    assert losses.names() == ["plain"] and "plain" in losses


def test_an_unknown_name_lists_the_known_ones_and_names_the_option():
    losses = Registry("worker.actor.loss_type")
    losses.register("b")(print)
    losses.register("a")(print)

    with pytest.raises(ValueError, match=r"`worker.actor.loss_type` must be one of \['a', 'b'\], got 'c'"):
        losses["c"]


def test_a_name_is_registered_once():
    losses = Registry("worker.actor.loss_type")
    losses.register("a")(print)

    with pytest.raises(ValueError, match="'a' is registered twice"):
        losses.register("a")(len)
