# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: a model learns from another one, without any reward.

The questions are those of `demo.py --text`: the color of a shape in a sentence. The teacher, of two layers,
is trained with rewards first. The student, of one layer and random weights, answers the questions itself, and
the KL divergence of its distributions from the teacher's is its only loss; the reward function measures its
accuracy and teaches nothing. With `--real`, both start as SmolLM2-135M-Instruct, and the questions are sums.
The last line of the output is JSON.

    python3 examples/quickstart/distill.py [--real] [--folder FOLDER] [--seed 0] [a.b=c ...]
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from demo import DEMOS, KINDS, outcome, train
from runs import make_parser, output_folder

from verl.models.tiny import save_tiny_model

SHARED_OPTIONS = (
    "distillation.enabled=true",
    "distillation.distillation_loss.loss_mode=reverse_kl",
    "distillation.distillation_loss.use_task_rewards=false",
)


@dataclass(frozen=True)
class Distillation:
    """A demo with a teacher and a student."""

    demo: str
    student: Callable[[Path, int], Path]  # returns its model: folder, seed
    teacher_options: tuple[str, ...]
    student_options: tuple[str, ...]


def save_student(folder: Path, seed: int) -> Path:
    """Save a model of one layer with random weights."""
    return save_tiny_model(folder / "student", KINDS["text"].family, seed=seed + 100, num_hidden_layers=1)


TINY = Distillation(
    "text",
    save_student,
    ("trainer.max_steps=75", "trainer.val_generations_to_log=0"),
    (
        "worker.rollout.n=4",
        "worker.actor.micro_batch_size_per_device_for_update=32",
        "worker.actor.micro_batch_size_per_device_for_experience=32",
        "worker.actor.entropy_coef=0",
        "trainer.max_steps=60",
        "trainer.val_freq=20",
    ),
)
REAL = Distillation(
    "real",
    lambda folder, seed: folder / "model",
    ("trainer.val_generations_to_log=0",),
    ("trainer.max_steps=10",),
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--real", action="store_true", help="distill SmolLM2-135M-Instruct that learned to add"
    )
    arguments, overrides = parser.parse_known_args()
    plan, seed = REAL if arguments.real else TINY, arguments.seed
    folder = output_folder(arguments.folder, "distill_real" if arguments.real else "distill")

    start = time.time()
    DEMOS[plan.demo].prepare(folder, seed)
    taught = outcome(train(folder, plan.demo, seed, plan.teacher_options, "teacher"), start)
    models = (
        f"worker.actor.model.model_path={plan.student(folder, seed)}",
        f"distillation.teacher_models.teacher.model_path={taught['checkpoint']}",
    )
    options = [*SHARED_OPTIONS, *plan.student_options, *models, *overrides]
    learned = outcome(train(folder, plan.demo, seed, options, "student"), start)

    teacher, before, after = taught["val_after"], learned["val_before"], learned["val_after"]
    print(f"\nAccuracy on held-out questions: {teacher:.2f} of the teacher, {before:.2f} of the student")
    print(f"before and {after:.2f} after learning from it alone")
    print(json.dumps({"teacher": teacher, **learned}))


if __name__ == "__main__":
    main()
