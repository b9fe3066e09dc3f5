# SPDX-License-Identifier: Apache-2.0
"""Wrong options of runs that make pictures are named before anything is loaded."""

import json

import pytest

from verl.config.ppo import PPOConfig
from verl.config.rules import diffusion_rules
from verl.config.schema import ConfigError, load_config
from verl.planning.step_needs import StepNeeds

PARTS = {
    "model_index.json": {"_class_name": "StableDiffusion3Pipeline"},
    "scheduler/scheduler_config.json": {"_class_name": "FlowMatchEulerDiscreteScheduler"},
    "vae/config.json": {"block_out_channels": [128, 256, 512, 512]},
    "transformer/config.json": {"patch_size": 2},
}


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "sd3", PARTS)
    (tmp_path / "prompts.jsonl").write_text('{"problem": "a cat", "answer": ""}\n')
    (tmp_path / "reward.py").write_text("def compute_score(reward_input):\n    return {'overall': 0.0}\n")
    return tmp_path


def write(folder, parts):
    for name, content in parts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))


def load(folder, *options):
    return load_config(
        PPOConfig,
        [
            "config=examples/config.yaml", f"worker.actor.model.model_path={folder / 'sd3'}",
            f"data.train_files={folder / 'prompts.jsonl'}", "data.val_files=", "data.format_prompt=null",
            f"worker.reward.reward_function={folder / 'reward.py'}:compute_score", "trainer.diffusion=true",
            "worker.rollout.tensor_parallel_size=1", "algorithm.disable_kl=true", "trainer.val_freq=-1",
            "trainer.val_before_train=false", "data.max_prompt_length=128", *options,
        ],
    )  # fmt: skip


def test_a_run_that_makes_pictures_loads(folder):
    config = load(folder)

    assert StepNeeds.of(config) == StepNeeds(sampled_log_probs=True, old_pass=False, ref_pass=False)
    assert config.engine == "diffusers"  # vLLM need not be installed


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("worker.rollout.resolution=520", "`worker.rollout.resolution` .520. must be a multiple of 16"),
        ("worker.rollout.num_steps=1", "`worker.rollout.num_steps` must be at least 2"),
        (
            "worker.rollout.sde_window=[4,10]",
            "must be .FIRST, STOP. with 0 <= FIRST < STOP <= `num_steps` - 1 .9.",
        ),
        ("worker.rollout.noise_level=0", "`worker.rollout.noise_level` must be above 0"),
        ("worker.rollout.tensor_parallel_size=2", "`worker.rollout.tensor_parallel_size` must be 1"),
        (
            "algorithm.adv_estimator=gae",
            "`algorithm.adv_estimator` must be one without a model, like grpo",
        ),
        ("worker.actor.ulysses_size=2", "`worker.actor.ulysses_size` must be 1 for pictures"),
        ("worker.actor.entropy_coef=0.1", "`worker.actor.entropy_coef` must be 0"),
        ("algorithm.disable_kl=false", "`algorithm.disable_kl` must be true without adapters"),
        ("data.max_prompt_length=257", "`data.max_prompt_length` .257. must be at most 256, the tokens that"),
        (
            "worker.actor.model.freeze_vision_tower=true",
            "`worker.actor.model.freeze_vision_tower` must be False with `trainer.diffusion=true`, got True",
        ),
        (
            "worker.actor.model.compile_blocks=true",
            "`worker.actor.model.compile_blocks` must be False",
        ),
        ("trainer.diffusion=false", "is a diffusion model: set `trainer.diffusion=true`"),
    ],
)
def test_what_does_not_fit_is_named(folder, option, message):
    with pytest.raises(ConfigError, match=message):
        load(folder, option)


def test_blocks_may_be_named_as_not_compiled(folder):
    assert load(folder, "worker.actor.model.compile_blocks=false").worker.actor.model.compile_blocks is False


def test_the_kl_is_that_of_steps_in_the_loss(folder):
    adapters = ("algorithm.disable_kl=false", "worker.actor.model.lora.rank=4")
    with pytest.raises(ConfigError, match=r"`algorithm\.kl_penalty` must be flow_grpo"):
        load(folder, *adapters, "algorithm.kl_penalty=low_var_kl")

    config = load(folder, *adapters, "algorithm.kl_penalty=flow_grpo", "algorithm.use_kl_loss=true")

    assert not StepNeeds.of(config).ref_pass and config.algorithm.use_reference


def test_another_pipeline_is_refused_and_those_that_can_be_trained_are_named(folder):
    write(folder / "sd3", {"model_index.json": {"_class_name": "StableDiffusionPipeline"}})

    with pytest.raises(ConfigError, match=r"is a StableDiffusionPipeline, must be one of .*'FluxPipeline'"):
        load(folder)


@pytest.mark.parametrize("patch", [1, 2])  # of FLUX.1 and of Qwen-Image, which both pack 2 x 2 latents
@pytest.mark.parametrize(
    ("name", "vae"),
    [
        ("FluxPipeline", {"block_out_channels": [128, 256, 512, 512]}),
        ("QwenImagePipeline", {"temperal_downsample": [False, True, True]}),
    ],
)
def test_packed_latents_make_multiples_of_16_pixels(folder, name, vae, patch):
    parts = {"model_index.json": {"_class_name": name}, "vae/config.json": vae}
    write(folder / "sd3", parts | {"transformer/config.json": {"patch_size": patch, "guidance_embeds": True}})

    load(folder, "worker.rollout.resolution=528")
    with pytest.raises(ConfigError, match=r"`worker\.rollout\.resolution` .520. must be a multiple of 16"):
        load(folder, "worker.rollout.resolution=520")


def test_flux_schnell_reads_no_guidance(folder):
    write(folder / "sd3", {"model_index.json": {"_class_name": "FluxPipeline"}})
    transformer = {"patch_size": 1, "guidance_embeds": False}
    write(folder / "sd3", {"transformer/config.json": transformer})

    with pytest.raises(ConfigError, match=r"guidance_scale` must be at most 1 .*, got 3\.5"):
        load(folder, "worker.rollout.guidance_scale=3.5")

    load(folder, "worker.rollout.guidance_scale=1")
    write(folder / "sd3", {"transformer/config.json": transformer | {"guidance_embeds": True}})
    load(folder, "worker.rollout.guidance_scale=3.5")


def test_another_scheduler_is_refused(folder):
    write(folder / "sd3", {"scheduler/scheduler_config.json": {"_class_name": "DDIMScheduler"}})

    with pytest.raises(ConfigError, match=r"must be FlowMatchEulerDiscreteScheduler, .*, got DDIMScheduler"):
        load(folder)


def test_the_package_is_named_where_it_is_missing(folder, monkeypatch):
    monkeypatch.setattr(diffusion_rules, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs diffusers: pip install 'easy-verl\[diffusion\]'"):
        load(folder)


def test_a_hub_name_that_was_downloaded_is_the_folder_in_the_cache(folder, monkeypatch):
    snapshot = folder / "models--makers--painter" / "snapshots" / "1"
    write(snapshot, PARTS)
    (snapshot / "tokenizer_3").mkdir()
    refs = folder / "models--makers--painter" / "refs"
    refs.mkdir()
    (refs / "main").write_text("1")
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    model = load(folder, "worker.actor.model.model_path=makers/painter").worker.actor.model

    assert model.is_pipeline and model.tokenizer_path == str(snapshot / "tokenizer_3")
    with pytest.raises(ConfigError, match="must be a multiple of 16"):
        load(folder, "worker.actor.model.model_path=makers/painter", "worker.rollout.resolution=520")


def test_a_hub_name_that_was_not_downloaded_is_left_to_the_run(folder):
    model = load(folder, "worker.actor.model.model_path=makers/sculptor").worker.actor.model

    assert not model.is_pipeline and model.tokenizer_path == "makers/sculptor"
