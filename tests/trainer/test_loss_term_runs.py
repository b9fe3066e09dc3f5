# SPDX-License-Identifier: Apache-2.0
"""A run with the loss terms and the observer of docs/extensions.md, files outside of the package."""

import re
import sys

import pytest

from tests.helpers.training import QUICKSTART, ROOT, quickstart_arguments, train
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))
from shapes import write_questions

pytestmark = pytest.mark.heavy

PAGE = (ROOT / "docs" / "extensions.md").read_text()


def test_a_run_learns_from_terms_and_an_observer_of_a_users_files(tmp_path):
    for name in ("keep_good", "hidden_norm"):
        (content,) = re.findall(rf"```python\n(# {name}\.py\n.*?)```", PAGE, flags=re.DOTALL)
        (tmp_path / f"{name}.py").write_text(content)
    save_tiny_model(tmp_path / "model", "qwen2")
    write_questions(tmp_path, "train", 24, seed=1, with_images=False)
    write_questions(tmp_path, "val", 4, seed=2, with_images=False)

    steps = train(
        tmp_path / "run",
        *quickstart_arguments(tmp_path, tmp_path / "model"),
        f"worker.actor.loss_terms=[{tmp_path}/keep_good.py:keep_good,{tmp_path}/hidden_norm.py:imitation]",
        f"worker.actor.observers=[{tmp_path}/hidden_norm.py:HiddenNorm]",
        f"worker.reward.reward_function={ROOT}/tests/trainer/scored_by_letters.py:compute_score",
        *("trainer.n_gpus_per_node=1", "trainer.val_before_train=false", "trainer.val_freq=-1"),
        *("trainer.save_freq=-1", "trainer.max_steps=2", "data.rollout_batch_size=4"),
        "worker.actor.global_batch_size=4",
    )

    learned = [metrics for metrics in steps.values() if "actor/pg_loss" in metrics]
    assert len(learned) == 2
    for metrics in learned:  # the term divides by its own tokens, as the mean that it logs does
        assert metrics["actor/keep_good"] > 0
        assert metrics["actor/keep_good"] == pytest.approx(-metrics["actor/good_log_probs"], rel=1e-5)
        # a norm of RMSNorm's results, whose mean square is 1: the root of the width
        assert metrics["actor/hidden_norm"] == pytest.approx(128**0.5, rel=1e-3)
        assert metrics["actor/imitation"] > 0
