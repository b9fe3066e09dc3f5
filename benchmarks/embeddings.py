# SPDX-License-Identifier: Apache-2.0
"""Number of videos that a frozen vision tower encodes in a training step, on CPU with a tiny model.

    python benchmarks/embeddings.py [--steps 4] [--n 4]

A real run of the trainer: prompts with one video each, a reference for the KL loss, two PPO epochs. Without
reuse, the rollout engine, the passes for old and reference log-probs and every update would encode each video
of the step again. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import av
import numpy as np

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
from verl.logger.file import read_log
from verl.models.tiny import save_tiny_model

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, ROWS = 4, 8


def save_video(path: Path, seed: int) -> None:
    """Write eight frames of noise."""
    generator = np.random.default_rng(seed)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 56, 56, "yuv420p"
        for _ in range(8):
            pixels = generator.integers(0, 256, (56, 56, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def prepare(folder: Path) -> None:
    """Write the random model, the videos and their questions."""
    save_tiny_model(folder / "model", "qwen2_5_vl")
    rows = []
    for number in range(ROWS):
        save_video(folder / f"{number}.mp4", number)
        rows.append({"problem": "<video>What is it?", "answer": "noise", "videos": [f"{number}.mp4"]})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(folder: Path, options: argparse.Namespace) -> list[dict]:
    """Run the trainer and return its log."""
    command = [
        sys.executable, "-m", "verl.trainer.main", f"config={ROOT / 'examples/quickstart/demo.yaml'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.video_dir={folder}",
        f"data.rollout_batch_size={PROMPTS}",
        "data.max_prompt_length=128",
        "data.max_response_length=4",
        f"worker.actor.model.model_path={folder / 'model'}",
        "worker.actor.model.freeze_vision_tower=true",
        "worker.actor.global_batch_size=2",
        "worker.actor.micro_batch_size_per_device_for_update=4",
        "worker.actor.micro_batch_size_per_device_for_experience=4",
        "worker.actor.ppo_epochs=2",
        "worker.ref.fsdp.torch_dtype=fp32",
        "worker.ref.fsdp.mp_param_dtype=fp32",  # same as the policy, whose vision tower it shares
        f"worker.rollout.n={options.n}",
        "worker.rollout.num_video_frames=8",
        f"worker.reward.reward_function={ROOT / 'examples/quickstart/reward.py'}:compute_score",
        "algorithm.disable_kl=false",
        "algorithm.use_kl_loss=true",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "trainer.logger=[file]",
        f"trainer.max_steps={options.steps}",
        f"trainer.save_checkpoint_path={folder / 'run'}",
    ]  # fmt: skip
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{finished.stdout[-1000:]}\n{finished.stderr[-4000:]}")
    return [entry for entry in read_log(folder / "run") if "perf/encoded_media" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--n", type=int, default=4, help="responses per prompt")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        prepare(Path(directory))
        log = train(Path(directory), options)
    encoded = [int(entry["perf/encoded_media"]) for entry in log]
    print(f"prompts per step: {PROMPTS}, sequences: {PROMPTS * options.n}, prompts in total: {ROWS}")
    for step, count in enumerate(encoded, 1):
        print(f"step {step}: {count} videos encoded")
    print(json.dumps({"prompts": PROMPTS, "encoded": encoded}))


if __name__ == "__main__":
    main()
