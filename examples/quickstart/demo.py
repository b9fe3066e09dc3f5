# SPDX-License-Identifier: Apache-2.0
"""Train a tiny model with random weights to name colors, with the complete training system.

The questions ask for the color of a shape in an image or in a sentence (`--text`), or of the one of two
squares that moves in a video (`--video`); whether a tone is high or low (`--audio`); or what happens in a
video with sound (`--audio-video`).

Creates the model and the questions, trains with `verl.trainer.main`, plots the curves, exports the last
checkpoint, and asks the exported model one question. The last line of the output is JSON.

    python3 examples/quickstart/demo.py [--video] [--folder FOLDER] [--seed 0] [a.b=c ...]
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported
if __name__ == "__main__":
    sys.stdout.write("making a tiny model and its questions\n")  # importing torch takes seconds
    sys.stdout.flush()

# isort: split
import matplotlib
import matplotlib.pyplot as plt
import torch
from events import ANSWERS, FPS, NUM_FRAMES, write_event_questions
from moving import NUM_SAMPLED, write_video_questions
from PIL import Image
from shapes import IMAGE_SIZE, write_questions
from tones import PITCHES, RATE, write_tone_questions

from verl.data.media.audio import AudioOptions, read_audio
from verl.data.media.video import VideoOptions, read_video
from verl.logger.file import read_log
from verl.models.families.interface import KINDS as MEDIA
from verl.models.families.interface import MediaFamily, MediaShape, MediumShape
from verl.models.families.registry import family_of
from verl.models.tiny import save_tiny_model
from verl.utils.quiet import no_weight_bars

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ACCURACY = "val/accuracy_reward"
FRAME_LIMITS = dict(shortest_edge=IMAGE_SIZE**2, longest_edge=IMAGE_SIZE**2)  # of pixels


def read_image(path: Path) -> dict[str, Any]:
    """Return an image as arguments of a processor."""
    return {"images": [Image.open(path)]}


def read_frames(path: Path, num_frames: int = NUM_SAMPLED) -> dict[str, Any]:
    """Return the frames of a video that the trainer samples, as arguments of a processor."""
    frames, meta = read_video(
        str(path), VideoOptions(IMAGE_SIZE**2, IMAGE_SIZE**2, 28, num_frames=num_frames)
    )
    facts = {key: value for key, value in meta.items() if key != "do_sample_frames"}
    return {"videos": [frames], "video_metadata": [facts], "do_sample_frames": False}


def read_sound(path: Path) -> dict[str, Any]:
    """Return the samples of a sound as arguments of a processor."""
    return {"audio": [read_audio(str(path), AudioOptions(RATE, longest_s=30))], "sampling_rate": RATE}


def read_film(path: Path) -> dict[str, Any]:
    """Return the frames and the sound of a video as arguments of a processor."""
    options = {"use_audio_in_video": True, "fps": FPS, "size": FRAME_LIMITS}
    return read_sound(path) | read_frames(path, NUM_FRAMES) | {"videos_kwargs": options}


@dataclass(frozen=True)
class Kind:
    """One of the demos."""

    family: str  # of the tiny model
    model_class: str  # class of transformers that loads the exported model
    write: Callable[[Path, str, int, int], Path]  # writes questions: folder, name, number, seed
    media: str  # column with media files, and the name of their folder
    read: Callable[[Path], dict[str, Any]]  # reads a media file for a processor
    guesses: dict[str, float]  # accuracy of strategies that ignore part of the question
    options: tuple[str, ...] = ()  # overrides of `demo.yaml`
    words: tuple[str, ...] = ()  # tokens of the model; without any, it knows those of the other questions


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


def prepare(folder: Path, kind: Kind, seed: int) -> None:
    """Write the random model, 256 training questions and 64 held-out ones."""
    save_tiny_model(folder / "model", kind.family, seed=seed, words=kind.words)
    kind.write(folder, "train", 256, 2 * seed + 1)
    kind.write(folder, "val", 64, 2 * seed + 2)


def train(folder: Path, name: str, seed: int, overrides: list[str]) -> Path:
    """Run the trainer and return the folder of its checkpoints."""
    checkpoints = folder / "checkpoints"
    command = [
        sys.executable, "-m", "verl.trainer.main", f"config={HERE / 'demo.yaml'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'val.jsonl'}",
        f"data.image_dir={folder / KINDS[name].media}",
        f"data.seed={seed + 1}",
        f"worker.rollout.seed={seed + 1}",
        f"worker.actor.model.model_path={folder / 'model'}",
        f"worker.reward.reward_function={HERE / 'reward.py'}:compute_score",
        f"trainer.experiment_name={name}",
        f"trainer.save_checkpoint_path={checkpoints}",
        "trainer.find_last_checkpoint=false",
        *KINDS[name].options,
        *overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT)
    return checkpoints


def curve(log: list[dict], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of one metric."""
    points = [(entry["step"], entry[key]) for entry in log if key in entry]
    return [step for step, _ in points], [value for _, value in points]


PANELS: dict[str, tuple[str, tuple[float, float] | None]] = {  # title: metric, its range
    "Accuracy on held-out questions": (ACCURACY, (0, 1)),
    "Reward of a rollout batch": ("reward/overall", (0, 1)),
    "Entropy (nats)": ("actor/entropy", None),
    "Engine vs trainer, largest log-prob difference": ("rollout/log_probs_diff_max", None),
}


def draw_curves(log: list[dict], guesses: dict[str, float], path: Path, panels: Any = PANELS) -> None:
    """Plot four metrics as a PNG: the accuracy with that of guesses, and the log-prob difference last."""
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
        if limits:
            axis.set_ylim(limits[0] - 0.03, limits[1] + 0.03)
    for guess, accuracy in guesses.items():
        axes[0, 0].axhline(accuracy, color="gray", linestyle="--", linewidth=1)
        axes[0, 0].annotate(guess, (0, accuracy + 0.01), color="gray", fontsize=9)
    axes[1, 1].set_yscale("log")
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
    subprocess.run(command, check=True, cwd=ROOT)
    return checkpoint / "actor" / "huggingface"


@torch.no_grad()
def ask(model_path: Path, folder: Path, kind: Kind) -> tuple[str, str, str]:
    """Ask the exported model the first held-out question; returns question, response and right answer."""
    import transformers  # noqa: PLC0415 - after verl, which makes torchvision's CUDA build importable on CPU

    row = json.loads((folder / "val.jsonl").read_text().splitlines()[0])
    reader = transformers.AutoProcessor.from_pretrained(model_path)  # a tokenizer, for a text model
    with no_weight_bars():
        model = getattr(transformers, kind.model_class).from_pretrained(model_path, dtype=torch.float32)
    question = re.sub("<(image|video|audio)>", "", row["problem"])
    content, media = [{"type": "text", "text": question}], {}
    if kind.media in row:
        content.insert(0, {"type": kind.media.removesuffix("s")})
        media = kind.read(folder / kind.media / row[kind.media][0])
    messages = [{"role": "user", "content": content}]
    text = reader.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = reader(text=[text], return_tensors="pt", **media)
    if media.get("videos_kwargs"):
        inputs["use_audio_in_video"] = True  # the model computes its positions itself
    else:
        inputs |= find_positions(model.config, inputs)
    output = model.generate(**inputs, max_new_tokens=1, do_sample=False)
    response = reader.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return question, response, row["answer"]


def find_positions(config: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the position ids that the model was trained with; transformers' differ after a video.

    Empty for models with positions 0, 1, 2, ...
    """
    family = family_of(config)
    if not isinstance(family, MediaFamily):
        return {}
    grids = {kind: torch.as_tensor(inputs.get(f"{kind}_grid_thw", ())).tolist() for kind in MEDIA}
    seconds = inputs.get("second_per_grid_ts", [1.0] * len(grids["video"]))
    facts: dict[str, list[dict[str, Any]]] = {
        "audio": [],  # it has positions like text
        "image": [{"grid_thw": grid} for grid in grids["image"]],
        "video": [
            {"grid_thw": grid, "second_per_grid_ts": float(value)}
            for grid, value in zip(grids["video"], seconds, strict=True)
        ],
    }
    shape = MediaShape(*([MediumShape([], each) for each in facts[kind]] for kind in MEDIA))
    positions = family.positions(config, inputs["input_ids"][0], shape)  # (4, L)
    return {} if positions is None else {"position_ids": positions.unsqueeze(1)}


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of the demo, and the remaining ones for the trainer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--text", dest="name", action="store_const", const="text", help="ask about sentences")
    kinds.add_argument(
        "--vila", dest="name", action="store_const", const="vila", help="ask a VILA model about images"
    )
    kinds.add_argument("--video", dest="name", action="store_const", const="video", help="ask about videos")
    kinds.add_argument("--audio", dest="name", action="store_const", const="audio", help="ask about tones")
    kinds.add_argument(
        "--audio-video",
        dest="name",
        action="store_const",
        const="audio_video",
        help="ask about videos with sound",
    )
    parser.set_defaults(name="image")
    parser.add_argument("--folder", type=Path, default=None, help="output folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, questions and sampling")
    return parser.parse_known_args()


def main() -> None:
    arguments, overrides = parse_arguments()
    name, kind = arguments.name, KINDS[arguments.name]
    folder = (arguments.folder or ROOT / "outputs" / "quickstart" / name).resolve()

    start = time.time()
    prepare(folder, kind, arguments.seed)
    checkpoints = train(folder, name, arguments.seed, overrides)
    log = read_log(checkpoints)
    draw_curves(log, kind.guesses, folder / "curves.png")
    steps, accuracies = curve(log, ACCURACY)
    checkpoint = checkpoints / f"global_step_{steps[-1]}"
    question, response, answer = ask(export(checkpoint), folder, kind)

    before, after = accuracies[0], accuracies[-1]
    print(f"\nAccuracy on held-out questions: {before:.2f} before, {after:.2f} after {steps[-1]} steps")
    print(f"Asked the exported model: {question!r} Response: {response!r} (right: {answer!r})")
    print(f"Curves: {folder / 'curves.png'}")
    summary = {
        "val_before": before,
        "val_after": after,
        "seconds": round(time.time() - start, 1),
        "steps": steps[-1],
        "checkpoint": str(checkpoint),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
