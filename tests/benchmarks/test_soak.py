# SPDX-License-Identifier: Apache-2.0
"""The soak sees what grows, overlooks what fluctuates, and measures every process of a real run."""

import pytest

from benchmarks.soak import (
    JUDGED,
    MIB,
    Sample,
    Usage,
    broken_laws,
    ends,
    keeps_rising,
    slope,
    soak,
    table,
)

STEPS = range(51, 201)


def usage(heap=500 * MIB, descriptors=40, threads=8):
    return Usage(heap, 0, heap, heap, descriptors, threads)


def samples(usage_at=lambda step: usage(), **shared):
    """A run whose first worker's usage, and whose shared memory, are functions of the step."""
    at = {"object_store": lambda step: 8 * MIB, "media_cache": lambda step: 80 * MIB} | shared
    return [
        Sample(
            step,
            dict.fromkeys(JUDGED, usage()) | {"worker": usage_at(step)},
            **{name: amount(step) for name, amount in at.items()},
        )
        for step in STEPS
    ]


def test_the_slope_is_the_median_over_pairs():
    # Slopes between pairs: 2, 2, 2 among the first three points; with the odd one -5, -8.5 and -19.
    points = [(0, 0.0), (1, 2.0), (2, 4.0), (3, -15.0)]

    assert slope(points[:3]) == 2.0
    assert slope(points) == (-5 + 2) / 2


def test_a_few_odd_steps_do_not_move_the_slope():
    points = [(step, 3.0 * step) for step in range(30)]
    odd = [(step, 1e6 if step % 10 == 5 else value) for step, value in points]

    assert slope(odd) == pytest.approx(3.0)


def test_start_and_end_are_medians_of_thirds():
    assert ends(
        [(0, 1.0), (1, 9.0), (2, 2.0), (3, 0.0), (4, 0.0), (5, 0.0), (6, 7.0), (7, 5.0), (8, 6.0)]
    ) == (2, 6)


def test_a_number_keeps_rising_when_each_third_is_above_the_one_before():
    assert keeps_rising([(0, 40), (1, 41), (2, 41), (3, 42), (4, 42), (5, 43)])
    assert not keeps_rising([(0, 40), (1, 42), (2, 41), (3, 41), (4, 43), (5, 42)])  # 42 came at the start


def test_a_pool_that_starts_one_more_thread_does_not_keep_rising():
    assert not keeps_rising([(step, 29 if step < 124 else 31) for step in STEPS])


def test_a_run_that_holds_what_it_held_breaks_no_law():
    fluctuating = samples(lambda step: usage(500 * MIB + step % 7 * MIB, 40 + step % 3, 8 + step % 2))

    assert broken_laws(fluctuating) == []


@pytest.mark.parametrize(
    ("usage_at", "sentence"),
    [
        # Two percent of 500 MiB in 100 steps are allowed. The first third's median is that of step 75.5.
        (
            lambda step: usage(heap=500 * MIB + step * MIB // 5),
            "worker: heap grew by 20.0 MiB in 100 steps, at most 10.3 are allowed",
        ),
        (lambda step: usage(descriptors=40 + step // 25), "worker: descriptors rose from 43 to 47"),
        (lambda step: usage(threads=8 + (step > 100) + (step > 150)), "worker: threads rose from 8 to 10"),
    ],
)
def test_what_a_process_keeps_is_named(usage_at, sentence):
    assert broken_laws(samples(usage_at)) == [sentence]


def test_a_small_process_may_grow_by_some_mebibytes():
    def grown(rate):
        return samples(lambda step: usage(heap=int(20 * MIB + rate * step * MIB / 100)))

    assert broken_laws(grown(3.9)) == []
    assert len(broken_laws(grown(4.1))) == 1


def test_shared_memory_has_laws_of_its_own():
    stored = samples(object_store=lambda step: 65 * MIB if step == 100 else 8 * MIB)
    cached = samples(media_cache=lambda step: 80 * MIB + step * MIB)

    assert broken_laws(stored) == ["object store: 65.0 MiB, at most 64 are allowed"]
    assert broken_laws(cached) == ["media cache grew by 100.0 MiB in 100 steps, at most 4.0 are allowed"]


def test_processes_that_stay_behind_are_counted():
    left = [
        Sample(
            step,
            dict.fromkeys(JUDGED, usage()) | {f"loader {n}": usage() for n in range(2, 2 + step // 40)},
            object_store=0,
            media_cache=0,
        )
        for step in STEPS
    ]

    assert broken_laws(left) == ["processes rose from 7 to 10"]


def test_a_process_that_was_replaced_is_told():
    # A new process would hide what the one before it had gathered.
    taken = samples()
    del taken[70].processes["reward"]

    assert broken_laws(taken) == ["reward: not there in every step"]


@pytest.mark.slow
def test_a_short_soak_sees_every_process_in_every_step(tmp_path):
    taken = soak(tmp_path, steps=12, rows=32, overrides=["trainer.save_freq=4", "trainer.val_freq=6"])

    assert [sample.step for sample in taken] == list(range(1, 12))
    ours = {"controller", "worker", "worker 2", "reward", "loader", "media reader", "raylet", "gcs_server"}
    assert all(ours <= set(sample.processes) for sample in taken)
    assert all(sample.processes["worker"].heap > 200 * MIB for sample in taken)
    # The controller shares memory with its fork, the loader.
    assert all(sample.processes["controller"].uss < sample.processes["controller"].heap for sample in taken)
    assert taken[-1].object_store > 0 and taken[-1].media_cache > 0
    assert len(table(taken)) >= 2 + len(ours) + 2
