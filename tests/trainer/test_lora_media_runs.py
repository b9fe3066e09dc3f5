# SPDX-License-Identifier: Apache-2.0
"""Whole runs that train adapters of vision-language models, with trained and with frozen vision towers."""

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.helpers.training import QUICKSTART, learned, quickstart_arguments, read_metrics, start_training
from tests.trainer.test_algorithms import REWARD
from verl.checkpoint.merger import merge_checkpoint
from verl.models.tiny import save_tiny_model

sys.path.insert(0, str(QUICKSTART))
from demo import KINDS

STEPS, PROMPTS = 3, 4
FOLDED = "adapters are folded into the engine's weights"
ADAPTED = [
    f"worker.reward.reward_function={REWARD}:compute_score",
    "worker.actor.model.lora.rank=8",
    "worker.actor.optim.lr=1e-2",
    "worker.actor.fsdp.torch_dtype=fp32",
    "algorithm.disable_kl=false",
    "algorithm.use_kl_loss=true",
    f"data.rollout_batch_size={PROMPTS}",
    "worker.actor.global_batch_size=2",
    "trainer.val_before_train=false",
    "trainer.val_freq=-1",
    "trainer.save_freq=2",
    "trainer.save_limit=-1",
    f"trainer.max_steps={STEPS}",
]


def prepare(root, kind):
    """Write a model, and questions about images or videos."""
    demo = KINDS[kind]
    save_tiny_model(root / "model", demo.family)
    demo.write(root, "train", 2 * PROMPTS, 1)
    demo.write(root, "val", 5, 2)
    return root


def run(root, kind, *overrides, name="run"):
    """Folder, metrics and output of a run."""
    demo = KINDS[kind]
    options = [option for option in demo.options if "reward_function" not in option]
    options += [f"data.image_dir={root / demo.media}", *ADAPTED, *overrides]
    finished = start_training(
        *quickstart_arguments(root, root / "model", *options), f"trainer.save_checkpoint_path={root / name}"
    )
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output[-6000:]
    return root, read_metrics(root / name), output


def adapter_of(root):
    folder = root / "run" / f"global_step_{STEPS}" / "actor" / "lora_adapter"
    return load_file(folder / "adapter_model.safetensors")


def assert_engine_has_a_policy_that_moved(metrics):
    for step in range(1, STEPS + 1):
        assert metrics[step]["rollout/log_probs_diff_max"] < 1e-4, step
    assert metrics[STEPS]["actor/kl_loss"] > 0.01, "the policy moved away from its base"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return run(prepare(tmp_path_factory.mktemp("images"), "image"), "image")


@pytest.mark.slow
def test_adapters_in_language_model_and_tower_reach_the_engine_folded_and_the_log_says_so(images):
    _, metrics, output = images

    assert_engine_has_a_policy_that_moved(metrics)
    assert f"{FOLDED}: 12 adapted modules are in the vision tower" in output


@pytest.mark.slow
def test_adapters_of_the_tower_have_learned_and_count_in_the_export(images):
    root, _, _ = images
    adapter = adapter_of(root)
    in_tower = {name: tensor for name, tensor in adapter.items() if ".visual." in name and "lora_B" in name}
    assert len(in_tower) == 12
    assert all(tensor.abs().max() > 1e-3 for tensor in in_tower.values())
    merged = merge_checkpoint(root / "run" / f"global_step_{STEPS}" / "actor", dtype=torch.float32)

    with torch.no_grad():
        whole = AutoModelForImageTextToText.from_pretrained(merged)
        base = AutoModelForImageTextToText.from_pretrained(root / "model")
        seen = logits(whole, root)
        whole.model.visual = base.model.visual

        assert (seen - logits(whole, root)).abs().max() > 0.01


@pytest.mark.slow
def test_adapters_of_language_model_and_tower_resume_from_a_checkpoint_exactly(images):
    root, unbroken, _ = images
    checkpoint = f"trainer.load_checkpoint_path={root / 'run' / 'global_step_2'}"

    _, resumed, _ = run(root, "image", checkpoint, name="resumed")

    assert learned(resumed[3]) == learned(unbroken[3])


def logits(model, root):
    processor = AutoProcessor.from_pretrained(root / "model")
    image = Image.open(sorted(Path(root / "images").iterdir())[0])
    text = "<|vision_start|><|image_pad|><|vision_end|>What colour is the shape?"
    return model(**processor(text=[text], images=[image], return_tensors="pt")).logits


@pytest.mark.slow
def test_adapters_with_a_frozen_tower_reach_the_engine_as_adapters_for_videos(tmp_path):
    overrides = ["worker.actor.model.freeze_vision_tower=true", "worker.rollout.lora_sync=adapter"]

    root, metrics, output = run(prepare(tmp_path, "video"), "video", *overrides)

    assert_engine_has_a_policy_that_moved(metrics)
    assert FOLDED not in output
    # Two steps are an epoch, and every video is encoded once.
    assert [metrics[step]["perf/encoded_media"] for step in (1, 2, 3)] == [PROMPTS, PROMPTS, 0]
    adapter = adapter_of(root)
    assert not [name for name in adapter if ".visual." in name]
    assert all(tensor.abs().max() > 1e-3 for name, tensor in adapter.items() if "lora_B" in name)
