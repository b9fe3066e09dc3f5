# SPDX-License-Identifier: Apache-2.0
"""Every reader of a batch's masks has chosen one of them for a reason, which stands here.

A response may hold tokens that the policy did not sample. What measures how well it acted must leave them out
(`loss_mask`), what measures or shows the conversation must not (`response_mask`).
"""

import ast

import pytest

from tests.architecture.source import PACKAGE, ROOT, source_files, tree_of
from verl.batch_keys import BATCH_KEYS

MASKS = ("response_mask", "loss_mask", "observation_mask")
TABLE = PACKAGE / "batch_keys.py"

# Reasons to read a mask.
WHOLE = "the conversation with its observations: its text and its length"
COUNTS = "the sampled tokens that count: what the policy is judged and trained on"
SAMPLED = "the tokens that the policy did not sample, whether the others count or not"
# Reasons not to be a reader of the batch of a step.
WRITES = "makes the mask"
TINY = "makes inputs that try an extension"
TUNING = "another batch: rows of fine-tuning, whose mask has the learned tokens"
READS = (WHOLE, COUNTS, SAMPLED)

# By file: for each mask the reason, and the stages in `BATCH_KEYS` that it reads the mask for.
OCCURRENCES: dict[str, dict[str, tuple[str, str]]] = {
    "verl/data/sft_dataset.py": {"loss_mask": (TUNING, "")},
    "verl/diffusion/step_forward.py": {"loss_mask": (COUNTS, "log-probs, update")},
    "verl/trainer/core_algos.py": {"loss_mask": (COUNTS, "KL penalty, correction, advantage")},
    "verl/trainer/extensions/algorithms.py": {"response_mask": (TINY, ""), "loss_mask": (TINY, "")},
    "verl/trainer/kinds/pictures.py": {"loss_mask": (WRITES, "")},
    "verl/trainer/metrics.py": {
        "response_mask": (WHOLE, "metrics"),
        "loss_mask": (COUNTS, "metrics"),
        "observation_mask": (SAMPLED, "metrics"),
    },
    "verl/trainer/rollouts/collector.py": {"response_mask": (WHOLE, "reward")},
    "verl/trainer/rollouts/rollout_log.py": {
        "response_mask": (WHOLE, "rollout log"),
        "loss_mask": (COUNTS, "rollout log"),
    },
    "verl/trainer/rollouts/sampler.py": {"response_mask": (WHOLE, "metrics")},
    "verl/trainer/rollouts/scores.py": {
        "response_mask": (WHOLE, "reward"),
        "loss_mask": (COUNTS, "reward"),
    },
    "verl/trainer/rollouts/sequences.py": dict.fromkeys(MASKS, (WRITES, "")),
    "verl/trainer/sft_trainer.py": {"loss_mask": (TUNING, "")},
    "verl/trainer/validation.py": {"response_mask": (WHOLE, "reward, metrics")},
    "verl/workers/training_worker.py": {"loss_mask": (COUNTS, "metrics")},
    "verl/workers/packing/forward.py": {"loss_mask": (COUNTS, "log-probs, values, update")},
    "verl/workers/roles/actor.py": {"loss_mask": (COUNTS, "metrics")},
    "verl/workers/roles/critic.py": {"loss_mask": (COUNTS, "update")},
    "verl/workers/roles/loss_terms.py": {"loss_mask": (COUNTS, "log-probs, update")},
    "verl/workers/roles/prime.py": {"loss_mask": (COUNTS, "process rewards, update")},
    "verl/workers/roles/reward_model.py": {"response_mask": (WHOLE, "reward model")},
    "verl/workers/roles/teachers.py": {"loss_mask": (COUNTS, "log-probs, update")},
    "verl/workers/roles/updater.py": {"loss_mask": (COUNTS, "update")},
}


def masks_named_in(tree):
    """The masks that a file names in a text: as a subscript, an argument of `get`, in a list of keys."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {text for text in texts if text in MASKS}


def test_each_occurrence_of_a_mask_is_in_the_table_and_the_table_has_no_others():
    found = {
        str(path.relative_to(ROOT)): named
        for path in source_files()
        if path != TABLE and (named := masks_named_in(tree_of(path)))
    }

    assert found == {file: set(masks) for file, masks in OCCURRENCES.items()}


@pytest.mark.parametrize("mask", MASKS)
def test_the_readers_in_the_key_table_are_those_that_read_the_mask(mask):
    reading = [entry[mask] for entry in OCCURRENCES.values() if mask in entry and entry[mask][0] in READS]
    stages = {stage for _, named in reading for stage in named.split(", ")}

    assert sorted(BATCH_KEYS[mask].readers.split(", ")) == sorted(stages)


def test_a_mask_is_read_for_the_reason_that_it_is_made_for():
    reasons = {"response_mask": WHOLE, "loss_mask": COUNTS, "observation_mask": SAMPLED}

    wrong = [
        (file, mask)
        for file, masks in OCCURRENCES.items()
        for mask, (reason, stages) in masks.items()
        if (reason in READS) != bool(stages) or (reason in READS and reason != reasons[mask])
    ]
    assert wrong == []


def test_the_walk_finds_each_way_to_name_a_mask():
    named = masks_named_in(
        ast.parse(
            "a = batch['loss_mask']\nb = batch.get('response_mask')\nKEYS = ['x', 'observation_mask']\n"
            "f(response_mask=mask)\n"
        )
    )

    assert named == set(MASKS)
    assert masks_named_in(ast.parse("f(response_mask=inputs.loss_mask)  # 'loss_mask'")) == set()
