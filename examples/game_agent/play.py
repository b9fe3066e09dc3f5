# SPDX-License-Identifier: Apache-2.0
"""Let a model play the number game in a browser: it sees the page as pixels, and its answer is clicked.

Prints how many games it won, that is clicked right in every level; the last line is JSON. `random` in place
of a model's folder clicks anything. With `--film`, the first game is kept as a GIF: each picture is what the
player saw, with a ring where it clicked.

    python3 examples/game_agent/play.py outputs/game_agent/model --games 20 --film game.gif
"""

import argparse
import io
import json
import random
from pathlib import Path

import torch
from game import DIGITS, HERE, NAMES, QUESTION, Game, Player, open_page, random_player
from PIL import Image, ImageDraw

from verl.data.prompt_template import PromptFormat

ENLARGED = 3  # pixels of the film for one of the page
FRAME_MS = 900


class ModelPlayer:
    """Asks a model in Hugging Face format what to click, with the prompt that it was trained with.

    Attributes:
        num_asked: Levels.
        num_named: Answers that named a button.
    """

    def __init__(self, path: str, max_new_tokens: int) -> None:
        import transformers  # noqa: PLC0415 - after verl, which makes torchvision's CUDA build importable on CPU

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.reader = transformers.AutoProcessor.from_pretrained(path)
        model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=dtype)
        self.model = model.to(self.device).eval()
        self.max_new_tokens = max_new_tokens
        question = PromptFormat(str(HERE / "prompt.jinja"))(QUESTION, {}).removeprefix("<image>")
        content = [{"type": "image"}, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        self.prompt = self.reader.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        self.num_asked = self.num_named = 0

    @torch.no_grad()
    def __call__(self, game: Game) -> str:
        """The first word of the model's answer."""
        image = Image.open(io.BytesIO(game.screenshot())).convert("RGB")
        inputs = self.reader(text=[self.prompt], images=[image], return_tensors="pt").to(self.device)
        output = self.model.generate(**inputs, max_new_tokens=self.max_new_tokens, do_sample=False)
        text = self.reader.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        word = (text.lower().split() or [""])[0].strip(".,!")
        self.num_asked += 1
        self.num_named += word in NAMES
        return word


def play(game: Game, player: Player) -> list[Image.Image]:
    """Play a game that was started to its end; returns what the player saw, with its clicks."""
    frames = []
    while not game.is_over:
        frame = Image.open(io.BytesIO(game.screenshot())).convert("RGB")
        x, y = game.click(player(game))
        frames.append(mark(frame, x, y))
    frames.append(mark(Image.open(io.BytesIO(game.screenshot())).convert("RGB")))
    return frames


def mark(frame: Image.Image, *place: float) -> Image.Image:
    """The frame enlarged, with a ring around a place, if there is one."""
    large = frame.resize((frame.width * ENLARGED, frame.height * ENLARGED), Image.Resampling.NEAREST)
    if place:
        x, y = (coordinate * ENLARGED for coordinate in place)
        ImageDraw.Draw(large).ellipse((x - 18, y - 18, x + 18, y + 18), outline="#f97316", width=5)
    return large


def save_film(frames: list[Image.Image], path: Path) -> None:
    """Write an animated GIF."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0)


def parse_arguments() -> argparse.Namespace:
    """What is played, and by whom."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("player", help="folder or hub name of a model, or `random`")
    parser.add_argument("--games", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1_000_000, help="far from those of the training")
    parser.add_argument("--levels", type=int, default=5, help="of a game")
    parser.add_argument("--digits", default=DIGITS, help="that buttons may show")
    parser.add_argument("--max-new-tokens", type=int, default=1, help="of an answer")
    parser.add_argument("--film", type=Path, help="keep the first game here, as GIF")
    return parser.parse_args()


def main() -> None:
    """Play, and print the counts."""
    options = parse_arguments()
    model = None if options.player == "random" else ModelPlayer(options.player, options.max_new_tokens)
    player = model or random_player(random.Random(options.first_seed))
    rights = []
    with open_page() as page:
        game = Game(page)
        for seed in range(options.first_seed, options.first_seed + options.games):
            game.start(seed, levels=options.levels, digits=options.digits)
            frames = play(game, player)
            rights.append(game.num_right)
            if options.film and len(rights) == 1:
                save_film(frames, options.film)
    clicks = options.games * options.levels
    result = {
        "player": options.player,
        "games": options.games,
        "won": sum(right == options.levels for right in rights),
        "clicks": clicks,
        "right": sum(rights),
        "named": model.num_named if model else clicks,
    }
    print(f"{result['won']} of {options.games} games won; {result['right']} of {clicks} clicks were right")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
