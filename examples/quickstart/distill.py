# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: a tiny model learns from a larger one, without any reward.

The questions are those of `demo.py --text`: the color of a shape in a sentence. The teacher, of two layers,
is trained with rewards first. The student, of one layer and random weights, answers the questions itself, and
the KL divergence of its distributions from the teacher's is its only loss; the reward function measures its
accuracy and teaches nothing. The last line of the output is JSON.

    python3 examples/quickstart/distill.py [--folder FOLDER] [--seed 0] [a.b=c ...]
"""

import json
import time

from demo import KINDS, accuracies_of, train
from runs import read_arguments

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


def main() -> None:
    folder, seed, overrides = read_arguments(__doc__, "distill")

    start = time.time()
    KINDS[NAME].prepare(folder, seed)
    taught = accuracies_of(train(folder, NAME, seed, TEACHER_OPTIONS, "teacher"))
    (teacher,) = (folder / "teacher").glob("global_step_*")
    student = save_tiny_model(folder / "student", KINDS[NAME].family, seed=seed + 100, num_hidden_layers=1)
    models = (
        f"worker.actor.model.model_path={student}",
        f"distillation.teacher_models.teacher.model_path={teacher}",
    )
    learned = accuracies_of(train(folder, NAME, seed, [*STUDENT_OPTIONS, *models, *overrides], "student"))

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
