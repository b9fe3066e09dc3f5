# SPDX-License-Identifier: Apache-2.0
"""Example scripts for models of known sizes have the options that the planner would choose on H100."""

import json
import re

import pytest

from benchmarks.published_steps import MODELS
from tests.architecture.test_examples import SCRIPTS, command_of
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.planning.planned_run import planned_ppo
from verl.planning.report import dry_run_memory
from verl.planning.speed.cluster import parse_cluster
from verl.planning.speed.report import advise
from verl.planning.speed.step_time import Predictor

MODEL = r"^MODEL_PATH=\$\{MODEL_PATH:-Qwen/(\S+?)(?:-Instruct)?\}"
OTHERS = {  # of two stages, with files of the user's, or with a further model
    "qwen2_5_vl_3b_video_cold_start",
    "qwen2_5_vl_7b_video_mme",
    "qwen2_5_7b_math_distill",
    "qwen2_5_7b_math_reward_model",
    "qwen2_5_7b_math_served_judge",
}
NIGHTLY = pytest.mark.nightly("examples", "verl/planning")
LENGTHS = {"geometry3k": (385, 340), "math12k": (118, 314)}  # on average, in published runs of Qwen2.5
MIN_GAIN = 0.03  # of a step; smaller ones depend on the lengths
USUAL = {"qwen2_5_vl_7b_geo3k_grpo", "qwen2_5_vl_3b_geo3k_grpo"}
OPTIONS = {  # how a step is divided; one that shares rows between ranks is left to whoever has long ones
    "worker.actor.micro_batch_size_per_device_for_update",
    "worker.actor.micro_batch_size_per_device_for_experience",
    "worker.actor.fsdp.expert_parallel_size",
    "worker.rollout.tensor_parallel_size",
    "worker.rollout.gpu_memory_utilization",
}


def known_model(script):
    named = re.search(MODEL, script.read_text(), flags=re.MULTILINE)
    return MODELS.get(named[1]) if named and "_sft" not in script.stem else None


KNOWN = [
    pytest.param(script, marks=[] if script.stem in USUAL else NIGHTLY, id=script.stem)
    for script in SCRIPTS
    if known_model(script) and script.stem not in OTHERS
]


@pytest.mark.parametrize("script", KNOWN)
def test_no_other_division_of_a_step_would_be_shorter_and_fit(script, tmp_path, monkeypatch):
    monkeypatch.chdir(script.parents[1])
    (tmp_path / "config.json").write_text(json.dumps(known_model(script)))
    paths = ("worker.actor.model.model_path=", "worker.critic.model.model_path=")
    given = command_of(script)
    own = [f"{path}{tmp_path}" for path in paths if any(word.startswith(path) for word in given)]
    arguments = [word for word in given if not word.startswith(paths)] + own
    gpus = load_config(PPOConfig, arguments).trainer.n_gpus_per_node
    cluster = parse_cluster(f"{gpus}xH100")
    run = dry_run_memory(
        load_config(PPOConfig, [*arguments, *cluster.options]), planned_ppo, machine=cluster.machine
    )
    assert run.planner is not None, run.problem
    assert run.planner(run.config).misfits() == []
    files = str(run.config.data.train_files)
    lengths = next((means for name, means in LENGTHS.items() if name in files), (None, None))
    predict = Predictor(run.planner, cluster, *lengths)
    most = (1 - MIN_GAIN) * predict(run.config).seconds
    found = advise(run.config, predict, run.choices)
    assert [each for each in found if each.changes.keys() <= OPTIONS and each.seconds < most] == []
