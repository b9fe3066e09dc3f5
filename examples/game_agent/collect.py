# SPDX-License-Identifier: Apache-2.0
"""Play random games and record a screenshot and the right answer for each level.

Writes `NAME.jsonl` to the folder, and the screenshots to `images/NAME_GAME_LEVEL.png`. A row has the columns
that the trainer reads, `problem`, `images` and `answer`, and data about the level: `box` of the right
button, `names` of the buttons and `numbers` on them from left to right, `seed` and `level` of the game.

    python3 examples/game_agent/collect.py outputs/game_agent train --games 100 --first-seed 0
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from game import DIGITS, QUESTION, Game, Player, expert, open_page, random_player


def collect_game(game: Game, player: Player, seed: int, images: Path, name: str) -> list[dict[str, Any]]:
    """Play a started game to its end and return a row for each level."""
    rows = []
    while not game.is_over:
        level = game.level
        path = images / f"{name}_{seed}_{level}.png"
        path.write_bytes(game.screenshot())
        buttons = game.buttons()
        answer = expert(game)
        (box,) = (button.box for button in buttons if button.name == answer)
        rows.append(
            {
                "problem": QUESTION,
                "images": [path.name],
                "answer": answer,
                "box": box,
                "names": [button.name for button in buttons],
                "numbers": [button.value for button in buttons],
                "seed": seed,
                "level": level,
            }
        )
        game.click(player(game))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("name", help="name of the file of rows, without .jsonl")
    parser.add_argument("--games", type=int, default=100)
    parser.add_argument(
        "--first-seed", type=int, default=0, help="seed of the first game; each next game adds 1"
    )
    parser.add_argument("--levels", type=int, default=5, help="levels per game")
    parser.add_argument("--digits", default=DIGITS, help="digits that buttons can show")
    options = parser.parse_args()

    images = options.folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    player = random_player(random.Random(options.first_seed))
    rows, num_right = [], 0
    with open_page() as page:
        game = Game(page)
        for seed in range(options.first_seed, options.first_seed + options.games):
            game.start(seed, levels=options.levels, digits=options.digits)
            rows += collect_game(game, player, seed, images, options.name)
            num_right += game.num_right
    path = options.folder / f"{options.name}.jsonl"
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary.rename(path)
    print(f"{path}: {len(rows)} levels of {options.games} games; random clicks were right {num_right} times")


if __name__ == "__main__":
    main()
