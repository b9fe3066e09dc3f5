# SPDX-License-Identifier: Apache-2.0
"""Planned memory beside measured: models of different shapes, loaded and trained as a worker does.

    python3 benchmarks/memory_plan.py                  # one process
    python3 benchmarks/memory_plan.py --ranks 2        # sharded over two
    python3 benchmarks/memory_plan.py --keep-freed     # as glibc is by default

Printed is the peak of the resident memory above that of the process without a model. On two ranks it is the
first's, which also reads the files.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.memory import PHASES, SHAPES, Rows, make_case, measure_phases, planned_phases
from verl.models.tiny import save_tiny_model

MIB = 1 << 20


def main() -> None:
    """Measure each shape with and without gradient checkpointing, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--keep-freed", action="store_true", help="let the allocator keep what is freed")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    arguments = parser.parse_args()
    out, rows, ranks = sys.stdout.write, Rows(), arguments.ranks
    out(f"{'model':12}{'checkpointing':15}{'phase':14}{'planned MiB':>12}{'measured MiB':>14}{'ratio':>8}\n")
    for name in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            model = save_tiny_model(folder, "qwen2", **SHAPES[name])
            cases = [(make_case(model, checkpointing=on, world_size=ranks), rows) for on in (True, False)]
            measured = measure_phases(cases, ranks, keeps_freed=arguments.keep_freed)
            for (config, _), peaks in zip(cases, measured, strict=True):
                planned = planned_phases(config, rows, ranks)
                is_on = "on" if config.model.enable_gradient_checkpointing else "off"
                for phase in PHASES:
                    plan, peak = planned[phase] / MIB, peaks[phase] / MIB
                    out(f"{name:12}{is_on:15}{phase:14}{plan:12.0f}{peak:14.0f}{plan / peak:8.2f}\n")


if __name__ == "__main__":
    main()
