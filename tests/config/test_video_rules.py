# SPDX-License-Identifier: Apache-2.0
"""Wrong options and folders of runs that make videos are named before anything is loaded."""

import pytest

from tests.config.test_diffusion_rules import load, write
from verl.config.rules.diffusion_rules import PIPELINES
from verl.config.schema import ConfigError
from verl.diffusion.families.registry import FAMILIES

SCHEDULER = "scheduler/scheduler_config.json"
UNIPC = {
    "_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 3.0,
    "prediction_type": "flow_prediction", "final_sigmas_type": "zero",
}  # fmt: skip
INDEX = {"_class_name": "WanPipeline", "transformer_2": [None, None], "boundary_ratio": None}
PARTS = {
    "model_index.json": INDEX,
    SCHEDULER: UNIPC,
    "vae/config.json": {"scale_factor_temporal": 4, "scale_factor_spatial": 8},
    "transformer/config.json": {"patch_size": [1, 2, 2], "num_attention_heads": 12},
}


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "sd3", PARTS)
    (tmp_path / "prompts.jsonl").write_text('{"problem": "a cat", "answer": ""}\n')
    (tmp_path / "reward.py").write_text("def compute_score(reward_input):\n    return {'overall': 0.0}\n")
    return tmp_path


@pytest.mark.parametrize(
    "scheduler",
    [UNIPC, {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}],
    ids=["UniPC", "FlowMatchEuler"],
)
def test_a_run_that_makes_videos_loads(folder, scheduler):
    write(folder / "sd3", {SCHEDULER: scheduler})

    config = load(folder, "worker.rollout.num_frames=33", "worker.rollout.height=480")

    rollout = config.worker.rollout
    assert (rollout.num_frames, rollout.height, rollout.width) == (33, 480, 832)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "num_frames=32",
            r"`worker.rollout.num_frames` \(32\) must be a multiple of 4 plus 1.*: set 29 or 33",
        ),
        ("num_frames=0", "num_frames"),
        ("height=490", r"`worker.rollout.height` \(490\) must be a multiple of 16.*: set 480 or 496"),
        ("width=8", r"`worker.rollout.width` \(8\) must be a multiple of 16.*: set 16"),
    ],
)
def test_a_size_that_the_model_cannot_divide_is_named_with_the_nearest_ones(folder, option, message):
    with pytest.raises(ConfigError, match=message):
        load(folder, f"worker.rollout.{option}")


def test_a_larger_vae_and_patch_need_larger_multiples(folder):
    write(folder / "sd3", {"vae/config.json": {"scale_factor_temporal": 4, "scale_factor_spatial": 16}})

    with pytest.raises(ConfigError, match=r"`worker.rollout.height` \(720\) must be a multiple of 32"):
        load(folder, "worker.rollout.height=720", "worker.rollout.width=1280")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {SCHEDULER: {"_class_name": "DDIMScheduler"}},
            "must be FlowMatchEulerDiscreteScheduler or UniPCMultistepScheduler, got DDIMScheduler",
        ),
        ({SCHEDULER: UNIPC | {"use_flow_sigmas": False}}, "set `use_flow_sigmas` to true in"),
        (
            {SCHEDULER: UNIPC | {"prediction_type": "epsilon"}},
            'set `prediction_type` to "flow_prediction" in',
        ),
        ({SCHEDULER: UNIPC | {"use_karras_sigmas": True}}, "set `use_karras_sigmas` to false in"),
        (
            {
                "model_index.json": INDEX
                | {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.875}
            },
            "must have one transformer, got a second one in `transformer_2`",
        ),
    ],
)
def test_a_folder_that_cannot_be_trained_is_named(folder, parts, message):
    write(folder / "sd3", parts)

    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_heads_are_divided_evenly(folder):
    assert load(folder, "worker.actor.ulysses_size=2").worker.actor.ulysses_size == 2

    with pytest.raises(
        ConfigError, match=r"`worker.actor.ulysses_size` \(8\) must divide the 12 attention heads"
    ):
        load(folder, "worker.actor.ulysses_size=8")


def test_the_rules_know_the_pipelines_that_make_videos():
    makers = {name for family in FAMILIES for name in family.pipelines if family.makes == "videos"}

    assert makers == {name for name, pipeline in PIPELINES.items() if pipeline.makes_videos}
