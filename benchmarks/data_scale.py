# SPDX-License-Identifier: Apache-2.0
r"""Measure how long a file of many rows takes to open, and the memory that it takes.

Writes a file of JSON lines, opens it twice in processes of their own, and deletes it.

    python benchmarks/data_scale.py --rows 10000000
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

READ = 10_000  # rows that are read at random places


def write_rows(path: Path, rows: int) -> None:
    with path.open("w") as file:
        for number in range(rows):
            file.write(
                f'{{"problem": "What is {number} + {number % 97}?", "answer": "{number + number % 97}"}}\n'
            )


def private_mib() -> float:
    """Memory of the process without pages of files, which the system drops when it needs them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def measure(path: str) -> dict[str, float]:
    """Open the rows of a file, and read some of them at random."""
    from verl.data.files import load_rows  # noqa: PLC0415 (its import is not measured)

    before, start = private_mib(), time.perf_counter()
    rows = load_rows(path)
    opened, places = time.perf_counter() - start, random.Random(1)
    after, start = private_mib(), time.perf_counter()
    for _ in range(READ):
        assert "problem" in rows[places.randrange(len(rows))]
    return {
        "rows": len(rows),
        "open_s": round(opened, 3),
        "open_mib": round(after - before, 1),
        "read_us": round((time.perf_counter() - start) / READ * 1e6, 1),
        "read_mib": round(private_mib() - before, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--open", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open:
        print(json.dumps(measure(arguments.open)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, arguments.rows)
        print(f"{arguments.rows} rows, {path.stat().st_size / 2**20:.0f} MiB")
        for _ in range(2):
            command = [sys.executable, __file__, "--open", str(path)]
            found = subprocess.run(command, check=True, capture_output=True, text=True)
            print(found.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
