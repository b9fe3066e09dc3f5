# SPDX-License-Identifier: Apache-2.0
"""Memory and operations of code on the meta device, by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from verl.planning.diffusion.shapes import traced, traced_update

ROWS, WIDTH = 8, 16
STATES = 4 * ROWS * WIDTH  # bytes


def states(*size):
    return torch.empty(*(size or (ROWS, WIDTH)), device="meta")


def layer():
    return nn.Linear(WIDTH, WIDTH, bias=False, device="meta")


def test_a_product_counts_two_operations_for_each_weight_and_row():
    found = traced(lambda: layer()(states()))

    assert found.products == 2 * ROWS * WIDTH**2
    assert found.attention == 0


def test_memory_is_what_is_held_at_once_without_weights():
    model, given = layer(), states()

    def chain():
        first = model(given)
        second = model(first)
        del first
        return model(second)

    assert traced(chain).peak == 2 * STATES  # a layer's input and output


def test_views_take_no_memory():
    given = states()

    assert traced(lambda: given.T.reshape(WIDTH, ROWS)[:4]).peak == 0


def test_elementwise_kernels_move_what_they_read_and_write():
    given = states()

    assert traced(lambda: given + given).moved == 3 * STATES


def test_an_update_keeps_the_inputs_of_its_products_and_no_gradients_of_weights():
    model, given = nn.Sequential(layer(), layer(), layer()), states()

    found = traced_update(lambda: model(given), model)

    assert found.kept == 2 * STATES + 4  # inputs of the second and third product, and the sum
    # forward, gradients of three weights, and of all inputs but the given one
    assert found.products == 2 * ROWS * WIDTH**2 * (3 + 3 + 2)
    assert all(param.grad is None for param in model.parameters())


def test_attention_keeps_no_scores():
    length = 512
    heads = [states(1, 4, length, 16).to(torch.bfloat16) for _ in range(3)]

    found = traced(lambda: F.scaled_dot_product_attention(*heads))

    assert found.attention == 4 * 4 * length**2 * 16
    assert found.peak < length**2
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


def test_work_is_in_proportion_to_the_number_of_inputs():
    found = traced(lambda: layer()(states()))

    assert found.times(3).products == pytest.approx(3 * found.products)
    assert found.times(3).peak == 3 * found.peak
