# SPDX-License-Identifier: Apache-2.0
"""Memory and traffic of a mixture of 235B whose experts are divided over 1, 8 and 16 ranks, as a table.

python -m tests.virtual.expert_table
"""

from tests.virtual.measure import Cluster, PhaseReport
from tests.virtual.planned import Case, Planned, planned
from tests.virtual.traffic import exchanged, received
from verl.planning.machine import GIB

SHAPE, LAYERS, RANKS, SIZES = "235b-a22b", 94, 128, (1, 8, 16)
PHASES = {"sync_weights": "gen", "old": "old", "update_actor": "update_actor"}  # of the plan
NO_STATE_YET = ("gen", "old")  # of the first step, which is measured
HEADER = """\
| `expert_parallel_size` | phase | peak, GiB | planned, GiB | weights and gradients, GiB | tokens, GiB |
|---|---|---|---|---|---|"""


def row(size: int, name: str, phase: PhaseReport, plan: Planned, updates: int) -> str:
    peak = plan.peaks[PHASES[name]] - (plan.policy.state if PHASES[name] in NO_STATE_YET else 0)
    times = updates if name == "update_actor" else 1
    cells = (phase.peak, peak, received(phase) / times, exchanged(phase) / times)
    return f"| {size} | `{name}` | {' | '.join(f'{cell / GIB:,.1f}' for cell in cells)} |"


def main() -> None:
    print(HEADER)
    with Cluster() as cluster:
        for size in SIZES:
            case = Case(SHAPE, RANKS, {"expert_parallel": size})
            setup = case.setup(LAYERS)
            phases, plan = cluster.measure(SHAPE, setup, RANKS), planned(case, LAYERS)
            for name in PHASES:
                print(row(size, name, phases[name], plan, setup.updates), flush=True)


if __name__ == "__main__":
    main()
