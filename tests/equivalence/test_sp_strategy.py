# SPDX-License-Identifier: Apache-2.0
"""Sequence-parallel ranks, under each strategy, against one process that runs all rows."""

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tests.equivalence.test_packed_forward import CLIP, IMAGE, WIDE, Features, load
from tests.equivalence.test_scalar_forward import load_scalar
from tests.equivalence.test_shared_prompts import media_batch, text_batch
from tests.equivalence.test_update import RecordingOptimizer
from tests.helpers.distributed import run_distributed
from tests.helpers.training import learned
from verl.config.worker import ActorConfig, CriticConfig
from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto
from verl.workers.packing.forward import PackedForward
from verl.workers.packing.schedule import run_in_micro_batches
from verl.workers.packing.sp_strategy import Strategy
from verl.workers.roles.actor import ActorTraining, DataParallelPPOActor
from verl.workers.roles.critic import DataParallelPPOCritic
from verl.workers.roles.updater import Training

pytestmark = pytest.mark.heavy

ROWS = 8  # of a mini batch
# The first mini batch has a group larger than all the rest; rows and prompts differ in length everywhere.
TEXT = ((9, (7, 20, 1, 4, 12)), (24, (3,)), (5, (4, 9)), (3, (1, 16)), (14, (5, 2, 8)), (30, (6, 6, 20)))
MEDIA = [
    ((WIDE, IMAGE), (5, 8, 3, 1, 9)), ((), (4,)), ((CLIP,), (6, 2)),
    ((IMAGE, CLIP), (3, 7)), ((), (2, 2, 9)), ((IMAGE,), (1, 4, 20)),
]  # fmt: skip
CONTENTS = {"text": "qwen2", "images": "qwen2_5_vl", "mixed": "qwen3_vl"}
WHOLE_THAT_FITS = {"size": 2, "dynamic": True}
NOTHING_FITS = {"size": 1, "dynamic": False}
GROUPS_DIFFER = "groups that differ"
# Name: micro batch size, whether prompts are shared, and the strategies of each sequence-parallel group.
SETTINGS = {
    "planned, whole rows fit": (WHOLE_THAT_FITS, True, [tuple(Strategy)]),
    "planned, none fits": (NOTHING_FITS, True, [tuple(Strategy)]),
    "replicated": ({"size": 3, "dynamic": False}, True, [(Strategy.REPLICATED,)]),
    "sharded encode": (NOTHING_FITS, True, [(Strategy.SHARDED_ENCODE,)]),
    "sharded encode, prompts apart": (WHOLE_THAT_FITS, False, [(Strategy.SHARDED_ENCODE,)]),
    "sharded": ({"size": 3, "dynamic": False}, True, [(Strategy.SHARDED,)]),
    "sharded by tokens": (WHOLE_THAT_FITS, True, [(Strategy.SHARDED,)]),
    GROUPS_DIFFER: (WHOLE_THAT_FITS, True, [(Strategy.SHARDED_ENCODE,), (Strategy.SHARDED,)]),
}
WHOLE_ROWS = {  # share of an update's micro batches; what is planned depends on the rows
    "replicated": 1.0, "sharded encode": 1.0, "sharded encode, prompts apart": 1.0,
    "sharded": 0.0, "sharded by tokens": 0.0, GROUPS_DIFFER: 0.5,
}  # fmt: skip
TWO_IN_A_GROUP = [
    *(
        (content, setting, "default")
        for content in CONTENTS
        for setting in SETTINGS
        if setting != GROUPS_DIFFER
    ),
    ("text", "replicated", "clip_cov"),
    ("text", "sharded", "clip_cov"),
]
FOUR_IN_A_GROUP = [("text", "replicated", "default"), ("mixed", "sharded encode", "default")]
TWO_GROUPS = [
    ("text", "planned, none fits", "clip_cov"),
    ("images", "planned, whole rows fit", "default"),
    ("mixed", "sharded encode", "default"),
    ("mixed", GROUPS_DIFFER, "default"),
]
TEMPERATURE = 0.8


def make_batch(content, folder):
    """Two mini batches with everything that updates read; responses to a prompt are consecutive."""
    contents = [(shown if content != "images" else [part for part in shown if part[0] == "image"], lengths)
                for shown, lengths in MEDIA]  # fmt: skip
    batch = text_batch(TEXT) if content == "text" else media_batch(folder, contents)
    batch = batch[np.argsort(batch.non_tensor_batch["uid"], kind="stable")]
    mask = batch.batch["loss_mask"]
    noise = torch.randn(4, *mask.shape, generator=torch.Generator().manual_seed(2)) * mask
    added = {
        "old_log_probs": -5.5 + noise[0],
        "advantages": noise[1],
        "values": noise[2],
        "returns": noise[3],
        "row_ids": torch.arange(len(mask)),
    }
    added["old_log_probs"] *= mask
    return batch.merge(DataProto.from_dict(added))


def own_rows(batch, sp):
    """The rows of each mini batch of this rank's sequence-parallel group."""
    size = ROWS // sp.dp_size
    return batch[[mini * ROWS + sp.dp_index * size + row for mini in range(2) for row in range(size)]]


def train(content, setting, loss_type, folder, sp):
    """Log-probs and values of this group's rows, and gradients and metrics of an update."""
    filled, shared, strategies = SETTINGS[setting]
    config = {
        "global_batch_size": ROWS,
        "max_grad_norm": 1e9,
        "micro_batch_size_per_device_for_update": filled["size"],
        "micro_batch_size_per_device_for_experience": filled["size"],
        "dynamic_batching": filled["dynamic"],
    }
    batch = own_rows(make_batch(content, folder), sp)
    actor_config = ActorConfig(loss_type=loss_type, entropy_coef=0.05, **config)
    found = {"rows": batch.batch["row_ids"].numpy(), "metrics": {}}
    for role, model in (("actor", load(folder, True)), ("critic", load_scalar(folder))):
        sharded(model)
        forward = PackedForward(model, Features(), share_prompt=shared, sp=sp)
        forward.strategies = strategies[sp.dp_index % len(strategies)]
        optimizer = RecordingOptimizer(model)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        if role == "actor":
            actor = DataParallelPPOActor(actor_config, forward, ActorTraining(optimizer, scheduler))
            columns = actor.compute_log_probs(batch, TEMPERATURE)
            found["log_probs"] = columns.batch["old_log_probs"].numpy()
            found["metrics"] |= actor.update(batch, TEMPERATURE, seed=3).metrics
        else:
            critic = DataParallelPPOCritic(
                CriticConfig(**config), forward, Training(optimizer, scheduler, max_response_length=20)
            )
            found["values"] = critic.compute_values(batch).numpy()
            found["metrics"] |= critic.update(batch)
        found[f"{role} gradients"] = [
            np.concatenate([grad.flatten().numpy() for grad in step.values()]) for step in optimizer.gradients
        ]
    return found


def sharded(model):
    blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    for module in [*blocks, model]:
        fully_shard(module)
    return model


def on_ranks(rank, world_size, folders, runs):
    """Each run is a layout, (ulysses, ring), and its cases: content, setting, loss."""
    found = []
    for layout, cases in runs:
        sp = SequenceParallel.build(*layout)
        for content, setting, loss_type in cases:
            mine = train(content, setting, loss_type, folders[content], sp)
            found.append(((content, setting, loss_type), mine))
    return found


def patches_seen(folder, sp):
    """Patches that this rank's tower sees of one clip that four responses share, two on each rank."""
    model = load(folder, True)
    seen = []
    model.model.visual.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(args[0] if args else kwargs["hidden_states"])),
        with_kwargs=True,
    )
    batch = media_batch(folder, [((CLIP,), (20, 20, 20, 20))])
    forward = PackedForward(model, Features(), share_prompt=True, sp=sp)
    for strategy in (Strategy.REPLICATED, Strategy.SHARDED_ENCODE):
        forward.strategies = [strategy]
        run_in_micro_batches(
            forward, batch, lambda micro: forward.log_probs(micro, 1.0).log_probs,
            size=4, dynamic_batching=True,
        )  # fmt: skip
    return seen


def on_two_ranks(rank, world_size, folders):
    sp = SequenceParallel.build(2, 1)
    return {
        "cases": on_ranks(rank, world_size, folders, [((2, 1), TWO_IN_A_GROUP)]),
        "patches": patches_seen(folders["mixed"], sp),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {content: str(save_tiny_model(root / content, family)) for content, family in CONTENTS.items()}


@pytest.fixture(scope="module")
def alone(folders):
    """One process that runs all rows, with each loss."""
    cases = [(content, "sharded", "default") for content in CONTENTS] + [("text", "sharded", "clip_cov")]
    (found,) = run_distributed(on_ranks, 1, folders, [((1, 1), cases)])
    return {(content, loss): mine for (content, _, loss), mine in found}


def relative_error(found, expected):
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, expected, strict=True))


def assert_same(found, alone):
    for case, mine in found:
        content, setting, loss_type = case
        one = alone[content, loss_type]
        for key in ("log_probs", "values"):  # relative to the largest: terms of a value cancel
            scale = np.abs(one[key]).max()
            assert np.abs(mine[key] - one[key][mine["rows"]]).max() < 1e-5 * max(scale, 1.0), (case, key)
        for key in ("actor gradients", "critic gradients"):
            assert relative_error(mine[key], one[key]) < 1e-5, (case, key)
        for role in ("actor", "critic"):
            share = mine["metrics"][f"perf/sp_whole_rows_{role}"]
            assert share == WHOLE_ROWS.get(setting, share), case
        assert learned(mine["metrics"]) == pytest.approx(one["metrics"], rel=1e-5, abs=1e-6), case


@pytest.fixture(scope="module")
def two_ranks(folders):
    return run_distributed(on_two_ranks, 2, folders)


@pytest.mark.slow  # test_sequence_parallel.py divides rows in every suite
def test_two_ranks_equal_one_process_under_every_strategy(two_ranks, alone):
    for found in two_ranks:
        assert len(found["cases"]) == len(TWO_IN_A_GROUP)
        assert_same(found["cases"], alone)
        metrics = {case: mine["metrics"] for case, mine in found["cases"]}
        assert metrics["text", "planned, whole rows fit", "default"]["perf/sp_whole_rows_actor"] > 0
        assert metrics["text", "planned, none fits", "default"]["perf/sp_whole_rows_actor"] == 0


@pytest.mark.slow
def test_whole_rows_are_encoded_by_their_own_rank_or_spread_over_all(two_ranks):
    # A clip of 2 frames of 4 x 4 patches: both ranks encode both frames, or one each.
    assert [found["patches"] for found in two_ranks] == [[32, 16], [32, 16]]


@pytest.mark.slow  # four processes
def test_four_ranks_in_one_group_and_in_two_equal_one_process(folders, alone):
    runs = [((2, 2), FOUR_IN_A_GROUP), ((2, 1), TWO_GROUPS)]

    for found in run_distributed(on_ranks, 4, folders, runs):
        assert len(found) == len(FOUR_IN_A_GROUP) + len(TWO_GROUPS)
        assert_same(found, alone)


@pytest.mark.slow
def test_four_ranks_equal_one_process_under_every_strategy(folders, alone):
    cases = [(content, setting, "default") for content in CONTENTS for setting in SETTINGS]
    runs = [((2, 2), TWO_IN_A_GROUP), ((1, 2), cases)]

    for found in run_distributed(on_ranks, 4, folders, runs, timeout_s=900):
        assert_same(found, alone)
