# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from verl.config import rollout
from verl.config.rollout import RolloutConfig, SpeculativeConfig


def problems_of(**changes):
    return list(replace(RolloutConfig(), **changes).problems("worker.rollout"))


@pytest.mark.parametrize(("name", "value"), [("min_p", 0.1), ("logit_bias", {5: 1.0})])
def test_sampling_that_drafts_would_not_follow_is_refused(name, value):
    options = SpeculativeConfig("ngram")

    [problem] = problems_of(speculative=options, val_override_config={name: value})

    assert f"`worker.rollout.val_override_config.{name}` must not be set" in problem
    assert not problems_of(val_override_config={name: value})


def test_only_vllm_checks_drafts():
    [problem] = problems_of(speculative=SpeculativeConfig("ngram"), name="hf", tensor_parallel_size=1)

    assert "`worker.rollout.speculative.method` must be null with `worker.rollout.name=hf`" in problem


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(rollout, "find_spec", lambda name: None)

    [problem] = problems_of(speculative=SpeculativeConfig("suffix"))

    assert "pip install 'easy-verl[suffix]'" in problem
    assert not problems_of(speculative=SpeculativeConfig("ngram"))
