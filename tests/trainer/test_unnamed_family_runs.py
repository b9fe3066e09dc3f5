# SPDX-License-Identifier: Apache-2.0
"""Whole runs of models that no file describes: two train, one of which vLLM lacks, and one is refused."""

import pytest

from tests.helpers.quickstart import make_folder
from tests.helpers.training import quickstart_arguments, read_metrics, start_training
from tests.helpers.unnamed_families import UNNAMED
from verl.models import tiny as tiny_models

pytestmark = pytest.mark.heavy


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Train a tiny model of a type without a file for two steps."""
    monkeypatch.setattr(tiny_models, "TINY_MODELS", tiny_models.TINY_MODELS | UNNAMED)

    def start(kind, engine="hf"):
        folder = make_folder(tmp_path / kind, kind)
        options = f"worker.rollout.name={engine}", "trainer.max_steps=2"
        finished = start_training(
            *quickstart_arguments(folder, folder / "model", *options),
            *("trainer.val_freq=-1", "trainer.val_before_train=false", "data.max_prompt_length=160"),
            *("data.min_pixels=null", "data.max_pixels=null"),  # without effect on some
            f"trainer.save_checkpoint_path={folder / 'out'}",
        )
        return finished, folder / "out"

    return start


@pytest.mark.slow  # two more runs; a refused one compares in every suite
@pytest.mark.parametrize(("kind", "engine"), [("idefics3", "hf"), ("deepseek_vl", "vllm")])
def test_a_model_without_a_description_trains_on_the_log_probs_of_its_engine(run, kind, engine):
    finished, output = run(kind, engine)

    assert finished.returncode == 0, finished.stderr[-6000:]
    metrics = read_metrics(output)
    assert sorted(metrics) == [1, 2]
    for entry in metrics.values():
        assert entry["rollout/log_probs_diff_max"] < 1e-5
        assert entry["actor/grad_norm"] > 0


@pytest.mark.slow  # one more run; tests/models/families/test_generic.py refuses it in every suite
def test_a_model_that_computes_something_else_is_refused_before_the_first_step(run):
    finished, output = run("ovis2")

    assert finished.returncode != 0
    message = (
        "(ovis2) computes something that packed training does not support: log-probabilities differ by 0."
    )
    assert message in finished.stderr
    assert "`worker.actor.model.family=my_family.py:family`" in finished.stderr
    assert not (output / "experiment_log.jsonl").exists()
