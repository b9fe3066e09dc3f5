# SPDX-License-Identifier: Apache-2.0
import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.distributed.length_balancing import LINEAR_WORK, workload
from verl.distributed.sequence_parallel import SequenceParallel
from verl.protocol import DataProto
from verl.workers.packing.micro_batches import MicroBatchLimit, RowCounts
from verl.workers.packing.schedule import MicroBatchSchedule
from verl.workers.packing.sp_strategy import (
    Strategy,
    StrategyLimits,
    deal_rows,
    plan_strategies,
    slowest,
)

PLENTY = StrategyLimits(MicroBatchLimit(tokens=10**6), 10**6)


def rows_of(*lengths, media=None):
    """Rows of their own prompts."""
    ids = tuple(range(len(lengths)))
    return RowCounts(lengths, (0,) * len(ids), ids, media or (0,) * len(ids), ids)


def groups_of(*groups, media=None):
    """Groups (prompt, responses) that share their prompts; media tokens of each prompt."""
    rows = [(number, prompt, length) for number, (prompt, lengths) in enumerate(groups) for length in lengths]
    ids = tuple(number for number, *_ in rows)
    return RowCounts(
        tuple(prompt + length for _, prompt, length in rows),
        tuple(prompt for _, prompt, _ in rows),
        ids,
        tuple(media[number] if media else 0 for number in ids),
        ids,
    )


def test_the_work_of_packed_rows_counts_a_shared_prompt_once():
    # 10 + 2 + 3 tokens; attention of the prompt 100, of the responses 12^2 - 100 and 13^2 - 100.
    counts = groups_of((10, (2, 3)), (4, (1,)))

    assert counts.work([0, 1]) == LINEAR_WORK * 15 + 100 + 44 + 69
    assert counts.work([0, 1, 2]) == counts.work([0, 1]) + workload([5])
    assert (counts.tokens([0, 1]), counts.tokens([1])) == (15, 13)


def test_media_of_a_prompt_count_once_even_where_it_is_not_shared():
    shared = groups_of((10, (2, 3)), (9, (1,)), media=(6, 4))
    apart = RowCounts(shared.lengths, (0, 0, 0), (0, 1, 2), shared.media, shared.prompt_ids)

    for counts in (shared, apart):
        assert counts.encoded([0, 1, 2]) == 10
        assert counts.encoded([1]) == 6


def test_rows_are_dealt_by_work():
    # 50 + 20 and 40 + 30 tokens: nearly the same work.
    assert sorted(map(sorted, deal_rows(rows_of(50, 40, 30, 20), 2))) == [[0, 3], [1, 2]]


def test_groups_stay_together_where_that_is_even():
    counts = groups_of((40, (5, 5)), (40, (5, 5)))

    assert sorted(deal_rows(counts, 2)) == [[0, 1], [2, 3]]


def test_a_group_larger_than_the_rest_is_split_and_the_others_are_not():
    # 20 + 4 x 30 = 140 tokens, and 20 + 2 x 5 = 30. In two parts of 80: 80 + 30 on the busiest rank.
    counts = groups_of((20, (30, 30, 30, 30)), (20, (5, 5)))

    assert sorted(map(sorted, deal_rows(counts, 2))) == [[0, 1, 4, 5], [2, 3]]


def test_splitting_stops_where_the_repeated_prompt_costs_more():
    # 900 + 4 x 1 tokens: a rank has 902 at least, however the four are cut; two ranks do not help either.
    counts = groups_of((900, (1, 1, 1, 1)))

    parts = deal_rows(counts, 4)

    assert sorted(row for part in parts for row in part) == [0, 1, 2, 3]
    assert max(counts.work(part) for part in parts) == counts.work([0])


def test_ranks_wait_for_the_slowest_in_every_round():
    # 5 and 2 against 3, 4 and 1: the rounds take 5, 4 and 1.
    assert slowest([[[5], [2]], [[3], [4], [1]]], sum) == 10


def test_even_rows_run_whole():
    plan = plan_strategies(rows_of(100, 100, 100, 100), PLENTY, 2)

    assert plan.strategy is Strategy.REPLICATED
    assert sorted(map(len, plan.shares)) == [2, 2]


def test_a_row_with_most_of_the_work_is_sharded():
    # Whole: 100 tokens on a rank. Sharded: 1.1 x (100 + 10) / 2 = 60.5.
    plan = plan_strategies(rows_of(100, 10), PLENTY, 2)

    assert plan.strategy is Strategy.SHARDED
    assert plan.shares == ((0, 1),)
    assert plan.limit == PLENTY.sharded


def test_a_long_shared_prompt_is_sharded_rather_than_run_on_every_rank():
    # Whole: 1000 + 2 tokens on each of two ranks. Sharded: 1.1 x (1000 + 4) / 2.
    assert plan_strategies(groups_of((1000, (1, 1, 1, 1))), PLENTY, 2).strategy is Strategy.SHARDED
    assert plan_strategies(groups_of((10, (50, 50, 50, 50))), PLENTY, 2).strategy is Strategy.REPLICATED


@pytest.mark.parametrize(("fitting", "strategy"), [(100, Strategy.REPLICATED), (99, Strategy.SHARDED)])
def test_rows_run_whole_only_where_the_longest_fits(fitting, strategy):
    limits = StrategyLimits(MicroBatchLimit(rows=2), fitting)

    assert plan_strategies(rows_of(100, 100, 90, 90), limits, 2).strategy is strategy


def test_without_another_strategy_rows_run_whole_even_if_they_do_not_fit():
    limits = StrategyLimits(MicroBatchLimit(rows=2), 10)

    plan = plan_strategies(rows_of(100, 20), limits, 2, [Strategy.REPLICATED])

    assert plan.strategy is Strategy.REPLICATED
    assert sorted(plan.shares) == [(0,), (1,)]


@pytest.mark.parametrize("rows", [(), (7, 8)])
def test_rows_of_a_single_rank_and_empty_batches_are_not_dealt(rows):
    assert plan_strategies(rows_of(*rows), PLENTY, 1 if rows else 2).strategy is Strategy.SHARDED


def test_media_spread_evenly_over_ranks_are_encoded_by_their_own_rank():
    counts = rows_of(100, 100, 100, 100, media=(40, 40, 40, 40))

    assert plan_strategies(counts, PLENTY, 2).strategy is Strategy.REPLICATED


def test_media_of_few_rows_or_on_several_ranks_are_encoded_together():
    # Alone one rank encodes 60 tokens; together each 1.2 x 60 / 2 = 36. Of a prompt on both ranks likewise.
    uneven = rows_of(100, 100, media=(60, 0))
    cut = groups_of((80, (500, 500)), media=(60,))

    assert plan_strategies(uneven, PLENTY, 2).strategy is Strategy.SHARDED_ENCODE
    assert plan_strategies(cut, PLENTY, 2).strategy is Strategy.SHARDED_ENCODE


def limits_of(counts, size, dynamic_batching):
    widths = {"prompt_width": 48, "response_width": 16}
    return StrategyLimits.of(counts, size=size, dynamic_batching=dynamic_batching, ranks=4, **widths)


def test_dynamic_batches_hold_as_many_tokens_as_the_padded_rows_of_all_ranks():
    # 2 rows of 64 tokens on each of four ranks.
    assert limits_of(rows_of(9, 9), 2, True) == StrategyLimits(MicroBatchLimit(tokens=512), 128)


@pytest.mark.parametrize(
    ("groups", "size", "tokens"),
    [
        ([(9, (1,))] * 4, 3, 48),  # 3 rows of 64 over four ranks
        ([(9, (1, 1, 1, 1))] * 2, 3, 24),  # a prompt and 3 responses: 48 + 48
        ([(9, (1, 1, 1, 1))] * 2, 8, 56),  # two prompts and 8 responses: 96 + 128
    ],
)
def test_a_rank_holds_its_shard_of_the_longest_sequence(groups, size, tokens):
    assert limits_of(groups_of(*groups), size, False) == StrategyLimits(MicroBatchLimit(rows=size), tokens)


@pytest.mark.parametrize("seed", range(30))
def test_every_row_is_dealt_once_and_sequences_fit(seed):
    generator = random.Random(seed)
    groups = [
        (generator.randint(1, 60), [generator.randint(0, 40) for _ in range(generator.randint(1, 9))])
        for _ in range(generator.randint(1, 8))
    ]
    counts = groups_of(*groups)
    limits = StrategyLimits(MicroBatchLimit(tokens=10**4), generator.randint(100, 300))

    plan = plan_strategies(
        counts, limits, generator.choice([2, 4, 8]), [Strategy.REPLICATED, Strategy.SHARDED_ENCODE]
    )

    splits = plan.splits(at_least=3)
    sequences = [rows for split in splits for rows in split]
    assert sorted(row for rows in sequences for row in rows) == list(range(len(counts.lengths)))
    assert all(sum(map(counts.tokens, counts.group(rows))) <= limits.whole_tokens for rows in sequences)
    assert min(map(len, splits)) >= 3


def test_each_strategy_is_logged_once(caplog):
    forward: Any = SimpleNamespace(
        sp=SequenceParallel(ulysses_size=2), shares_prompts=False, strategies=tuple(Strategy), logged=set(),
        media_tokens=lambda batch: [0] * len(batch),
    )  # fmt: skip

    with caplog.at_level(logging.INFO, logger="verl"):
        for lengths in ((100, 100), (100, 10), (90, 90), (80, 10)):
            mask = (torch.arange(100) < torch.tensor(lengths)[:, None]).long()
            batch = DataProto.from_dict({"attention_mask": mask})
            MicroBatchSchedule(forward, batch, size=10**4, dynamic_batching=True)

    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "strategy='replicated'" in messages[0]
    assert "strategy='sharded encode + sp'" in messages[1]
