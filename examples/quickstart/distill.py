# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: a tiny model learns from a larger one, without any reward.

The questions are those of `demo.py --text`: the color of a shape in a sentence. The teacher, of two layers,
is trained with rewards first. The student, of one layer and random weights, answers the questions itself, and
the KL divergence of its distributions from the teacher's is its only loss; the reward function measures its
accuracy and teaches nothing. The last line of the output is JSON.

    python3 examples/quickstart/distill.py [--folder FOLDER] [--seed 0] [a.b=c ...]
"""

import argparse
import json
import time
from pathlib import Path

from demo import ACCURACY, KINDS, ROOT, curve, train

from verl.logger.file import read_log
from verl.models.tiny import save_tiny_model

NAME = "text"
TEACHER_OPTIONS = ("trainer.max_steps=75", "trainer.val_generations_to_log=0")
STUDENT_OPTIONS = (
    "distillation.enabled=true",
    "distillation.distillation_loss.loss_mode=reverse_kl",
    "distillation.distillation_loss.use_task_rewards=false",
    "worker.rollout.n=4",
    "worker.actor.micro_batch_size_per_device_for_update=32",
    "worker.actor.micro_batch_size_per_device_for_experience=32",
    "worker.actor.entropy_coef=0",
    "trainer.max_steps=60",
    "trainer.val_freq=20",
)


def accuracies(folder: Path, seed: int, output: str, *overrides: str) -> list[float]:
    """Train and return the accuracies on held-out questions, the first before the first step."""
    train(folder, NAME, seed, [f"trainer.save_checkpoint_path={folder / output}", *overrides])
    return curve(read_log(folder / output), ACCURACY)[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=None, help="output folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, questions and sampling")
    arguments, overrides = parser.parse_known_args()
    folder = (arguments.folder or ROOT / "outputs" / "quickstart" / "distill").resolve()

    start = time.time()
    KINDS[NAME].prepare(folder, arguments.seed)
    taught = accuracies(folder, arguments.seed, "teacher", *TEACHER_OPTIONS)
    (teacher,) = (folder / "teacher").glob("global_step_*")
    student = save_tiny_model(
        folder / "student", KINDS[NAME].family, seed=arguments.seed + 100, num_hidden_layers=1
    )
    learned = accuracies(
        folder, arguments.seed, "student", *STUDENT_OPTIONS, f"worker.actor.model.model_path={student}",
        f"distillation.teacher_models.teacher.model_path={teacher}", *overrides,
    )  # fmt: skip

    print(
        f"\nAccuracy on held-out questions: {taught[-1]:.2f} of the teacher, {learned[0]:.2f} of the student"
    )
    print(f"before and {learned[-1]:.2f} after learning from it alone")
    summary = {
        "teacher": taught[-1],
        "val_before": learned[0],
        "val_after": learned[-1],
        "curve": learned,
        "seconds": round(time.time() - start, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
