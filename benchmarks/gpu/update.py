# SPDX-License-Identifier: Apache-2.0
"""The benchmark of an update, `benchmarks/gpu_update.py`, held against what is asked of it.

python -m benchmarks.gpu.update --models FOLDER [--tiny --device cpu]
"""

from typing import Any

from benchmarks import gpu_update
from benchmarks.gpu.part import Place, Report, run_part

ASKED_MFU = 0.45  # of the 3B shape
SHARED_DIFFERENCE = 0.05  # of a log-prob, in nats


def judge(report: Report, result: dict[str, Any]) -> None:
    for name, value in result.items():
        row = (
            {f"{name}_{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        )
        for figure, number in row.items():
            if number is not None:
                report.figure(figure, number)
    report.at_most(
        "log-probs with shared and repeated prompts", result["shared_difference"], SHARED_DIFFERENCE
    )
    if (mfu := result["update"]["mfu"]) is not None:
        report.at_least("MFU of the update", mfu, ASKED_MFU)


def work(report: Report, place: Place, case: str) -> None:
    options = gpu_update.parse_arguments(["--tiny"] if place.tiny else [])
    judge(report, gpu_update.measure(options, place.device))


if __name__ == "__main__":
    run_part(__doc__, work, ("all",))
