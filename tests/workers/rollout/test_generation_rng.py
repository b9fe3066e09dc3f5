# SPDX-License-Identifier: Apache-2.0
import random

import numpy as np
import torch

from verl.workers.rollout.generation_rng import GenerationRng


def draw():
    return torch.rand(1).item(), np.random.rand(), random.random()


def test_streams_are_equal_for_equal_seeds_only():
    one, same, other = GenerationRng(3, "cpu"), GenerationRng(3, "cpu"), GenerationRng(4, "cpu")

    draws = []
    for rng in (one, same, other):
        with rng.active():
            draws.append(draw())

    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[0], draws[2], strict=True))


def test_the_stream_continues_where_it_stopped_regardless_of_training():
    undisturbed, interrupted = GenerationRng(3, "cpu"), GenerationRng(3, "cpu")
    with undisturbed.active():
        expected = [draw(), draw()]

    found = []
    for _ in range(2):
        with interrupted.active():
            found.append(draw())
        draw()

    assert found == expected


def test_generation_does_not_change_the_random_numbers_of_training():
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = [draw(), draw()]

    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    found = [draw()]
    rng = GenerationRng(5, "cpu")
    with rng.active():
        draw()
    found.append(draw())

    assert found == expected


def test_a_saved_state_repeats_the_stream(tmp_path):
    rng = GenerationRng(3, "cpu")
    with rng.active():
        np.random.randn()  # numpy keeps the second of a pair of normal numbers
    torch.save(rng.state(), tmp_path / "state.pt")
    with rng.active():
        expected = (*draw(), np.random.randn())

    restored = GenerationRng(9, "cpu")
    restored.set_state(torch.load(tmp_path / "state.pt", weights_only=True))

    with restored.active():
        assert (*draw(), np.random.randn()) == expected


def test_an_error_while_sampling_restores_the_stream_of_training():
    rng = GenerationRng(3, "cpu")
    before = torch.get_rng_state()

    try:
        with rng.active():
            torch.rand(5)
            raise KeyError
    except KeyError:
        pass

    assert torch.equal(torch.get_rng_state(), before)


def test_the_stream_of_an_earlier_version_is_resumed():
    rng = GenerationRng(3, "cpu")
    saved = rng.state()
    (version, words, gauss), (name, keys, *others) = saved["python"], saved["numpy"]
    earlier = {
        "torch_cpu": saved["torch"], "torch_cuda": None,
        "numpy": [name, keys.tolist(), *others], "python": [version, list(words), gauss],
    }  # fmt: skip
    with rng.active():
        expected = draw()

    resumed = GenerationRng(4, "cpu")
    resumed.set_state(earlier)

    with resumed.active():
        assert draw() == expected
    assert resumed.state().keys() == saved.keys()
