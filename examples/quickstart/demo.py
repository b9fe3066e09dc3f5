# SPDX-License-Identifier: Apache-2.0
"""Train a tiny model of random weights to name colours, with the whole system and nothing else.

Makes the model and the questions, trains with `verl.trainer.main`, draws the curves, exports the last
checkpoint, and asks the exported model one question. The last line printed is JSON.

    python3 examples/quickstart/demo.py [--text] [--folder outputs/quickstart] [a.b=c ...]
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
from PIL import Image
from shapes import write_questions

from verl.models.tiny import save_tiny_model
from verl.utils.logger.file import read_log

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ACCURACY = "val/accuracy_reward"


def prepare(folder: Path, *, with_images: bool) -> None:
    """Write the random model, 256 training questions and 64 held-out ones."""
    save_tiny_model(folder / "model", "qwen2_5_vl" if with_images else "qwen2")
    write_questions(folder, "train", 256, seed=1, with_images=with_images)
    write_questions(folder, "val", 64, seed=2, with_images=with_images)


def train(folder: Path, name: str, overrides: list[str]) -> Path:
    """Run the trainer as a user would; returns the folder of its checkpoints."""
    checkpoints = folder / "checkpoints"
    command = [
        sys.executable, "-m", "verl.trainer.main", f"config={HERE / 'demo.yaml'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'val.jsonl'}",
        f"data.image_dir={folder / 'images'}",
        f"worker.actor.model.model_path={folder / 'model'}",
        f"worker.reward.reward_function={HERE / 'reward.py'}:compute_score",
        f"trainer.experiment_name={name}",
        f"trainer.save_checkpoint_path={checkpoints}",
        "trainer.find_last_checkpoint=false",
        *overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT)
    return checkpoints


def curve(log: list[dict], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric."""
    points = [(entry["step"], entry[key]) for entry in log if key in entry]
    return [step for step, _ in points], [value for _, value in points]


def draw_curves(log: list[dict], path: Path) -> None:
    """Held-out accuracy, reward, entropy, and the distance of the engine from the trainer, as a PNG."""
    matplotlib.use("Agg")
    panels = {
        "Accuracy on held-out questions": (ACCURACY, (0, 1)),
        "Reward of a rollout batch": ("reward/overall", (0, 1)),
        "Entropy (nats)": ("actor/entropy", None),
        "Engine vs trainer, largest log-prob difference": ("rollout/log_probs_diff_max", None),
    }
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), layout="constrained")
    for axis, (title, (key, limits)) in zip(axes.flat, panels.items(), strict=True):
        steps, values = curve(log, key)
        axis.plot(steps, values, color="#1f77b4", marker="o" if key == ACCURACY else None, linewidth=1.6)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if limits:
            axis.set_ylim(limits[0] - 0.03, limits[1] + 0.03)
    axes[0, 0].axhline(0.25, color="grey", linestyle="--", linewidth=1)
    axes[0, 0].annotate("one colour for all", (0, 0.26), color="grey", fontsize=9)
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
def ask(model_path: Path, folder: Path, *, with_images: bool) -> tuple[str, str, str]:
    """Ask the exported model the first held-out question: that, its response and the right answer."""
    # After verl, which makes torchvision's CUDA build importable on a CPU-only torch.
    from transformers import (  # noqa: PLC0415
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
    )

    row = json.loads((folder / "val.jsonl").read_text().splitlines()[0])
    question = row["problem"].removeprefix("<image>")
    content = [{"type": "text", "text": question}]
    if with_images:
        reader = AutoProcessor.from_pretrained(model_path)
        model = AutoModelForImageTextToText.from_pretrained(model_path, dtype=torch.float32)
        content.insert(0, {"type": "image"})
        media = {"images": [Image.open(folder / "images" / row["images"][0])]}
    else:
        reader = AutoTokenizer.from_pretrained(model_path)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        media = {}
    messages = [{"role": "user", "content": content if with_images else question}]
    text = reader.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = reader(text=[text], return_tensors="pt", **media)
    output = model.generate(**inputs, max_new_tokens=1, do_sample=False)
    return (
        question,
        reader.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True),
        row["answer"],
    )


def main() -> None:
    """Prepare, train, draw, export, ask."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", action="store_true", help="a language model and questions in words")
    parser.add_argument("--folder", type=Path, default=None, help="where everything goes")
    arguments, overrides = parser.parse_known_args()
    name = "text" if arguments.text else "image"
    folder = (arguments.folder or ROOT / "outputs" / "quickstart" / name).resolve()

    start = time.time()
    prepare(folder, with_images=not arguments.text)
    checkpoints = train(folder, name, overrides)
    log = read_log(checkpoints)
    draw_curves(log, folder / "curves.png")
    steps, accuracies = curve(log, ACCURACY)
    checkpoint = checkpoints / f"global_step_{steps[-1]}"
    question, response, answer = ask(export(checkpoint), folder, with_images=not arguments.text)

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
