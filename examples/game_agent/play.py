# SPDX-License-Identifier: Apache-2.0
"""Let a model play the number game in a browser: it sees a screenshot, and the button it names is clicked.

Prints the number of games won, that is, with the right click in every level; the last line is JSON. `random`
instead of a model clicks random buttons. With `--film`, the first game is saved as a GIF: each picture is a
screenshot with a ring around the click.

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

ENLARGED = 3  # film pixels per page pixel
FRAME_MS = 900


class ModelPlayer:
    """A model in Hugging Face format, asked for a button with the prompt that it was trained with."""

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
        self.num_asked = self.num_named = 0  # levels, and answers that named a button

    @torch.no_grad()
    def __call__(self, game: Game) -> str:
        """Return the first word of the model's answer."""
        image = Image.open(io.BytesIO(game.screenshot())).convert("RGB")
        inputs = self.reader(text=[self.prompt], images=[image], return_tensors="pt").to(self.device)
        output = self.model.generate(**inputs, max_new_tokens=self.max_new_tokens, do_sample=False)
        text = self.reader.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        word = (text.lower().split() or [""])[0].strip(".,!")
        self.num_asked += 1
        self.num_named += word in NAMES
        return word


def play(game: Game, player: Player) -> list[Image.Image]:
    """Play a started game to its end and return its screenshots, with the clicks marked."""
    frames = []
    while not game.is_over:
        frame = Image.open(io.BytesIO(game.screenshot())).convert("RGB")
        x, y = game.click(player(game))
        frames.append(mark(frame, x, y))
    frames.append(mark(Image.open(io.BytesIO(game.screenshot())).convert("RGB")))
    return frames


def mark(frame: Image.Image, *place: float) -> Image.Image:
    """Enlarge a frame and draw a ring around the position, if one is given."""
    large = frame.resize((frame.width * ENLARGED, frame.height * ENLARGED), Image.Resampling.NEAREST)
    if place:
        x, y = (coordinate * ENLARGED for coordinate in place)
        ImageDraw.Draw(large).ellipse((x - 18, y - 18, x + 18, y + 18), outline="#f97316", width=5)
    return large


def save_film(frames: list[Image.Image], path: Path) -> None:
    """Write the frames as an animated GIF."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("player", help="folder or hub name of a model, or `random`")
    parser.add_argument("--games", type=int, default=20)
    parser.add_argument(
        "--first-seed",
        type=int,
        default=1_000_000,
        help="seed of the first game; far from the training seeds",
    )
    parser.add_argument("--levels", type=int, default=5, help="levels per game")
    parser.add_argument("--digits", default=DIGITS, help="digits that buttons can show")
    parser.add_argument("--max-new-tokens", type=int, default=1, help="longest answer, in tokens")
    parser.add_argument("--film", type=Path, help="save the first game to this GIF file")
    return parser.parse_args()


def main() -> None:
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
