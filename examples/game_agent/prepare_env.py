# SPDX-License-Identifier: Apache-2.0
"""Write a model with random weights whose turns are one token, and rows that only name the seeds of games.

python3 examples/game_agent/prepare_env.py outputs/game_agent_env --games 100
"""

import argparse
import json
from pathlib import Path

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()

from verl.models.tiny import save_tiny_model


def save_model(folder: Path) -> None:
    """Write a tiny model for which any token ends a turn: one that ends by a limit would end the game."""
    save_tiny_model(folder, "qwen2_5_vl")
    size = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": list(range(size))}))


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row | {"problem": "A game.", "answer": ""}) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("--games", type=int, default=100, help="games of a validation")
    parser.add_argument("--first-seed", type=int, default=1_000_000, help="seed of the first of them")
    options = parser.parse_args()
    save_model(options.folder / "model")
    # The run draws the seeds of training games, another for each prompt of each step.
    write_rows(options.folder / "train.jsonl", [{} for _ in range(64)])
    seeds = range(options.first_seed, options.first_seed + options.games)
    write_rows(options.folder / "val.jsonl", [{"seed": seed} for seed in seeds])


if __name__ == "__main__":
    main()
