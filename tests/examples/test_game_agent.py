# SPDX-License-Identifier: Apache-2.0
"""The game agent: a real browser plays the page, the trainer reads its rows, a model learns to win."""

import importlib
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.agents.test_environments import begin, step
from tests.helpers.browser import open_browser
from tests.helpers.training import ROOT
from verl.agents.environments.loading import load_environments
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.data.loader import make_loaders
from verl.data.readers import load_readers, load_tokenizer, media_options
from verl.models.tiny import save_tiny_model
from verl.rewards.function import load_reward_function

FOLDER = ROOT / "examples" / "game_agent"
pytestmark = pytest.mark.browser


@pytest.fixture
def modules(monkeypatch):
    """The example's modules `game` and `collect`, as its commands import them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("game", "collect")
    yield [importlib.import_module(name) for name in names]
    for name in names:
        del sys.modules[name]


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 168, "height": 84})
    yield context.new_page()
    context.close()


def test_a_player_that_reads_the_page_wins_every_game_and_its_rows_name_the_largest_number(
    modules, page, tmp_path
):
    game_module, collect = modules
    game, rows = game_module.Game(page), []
    for seed in range(4):
        game.start(seed)
        rows += collect.collect_game(game, game_module.expert, seed, tmp_path, "x")
        assert game.is_over and game.num_right == 5

    for row in rows:
        left, _, right, _ = row["box"]
        assert row["numbers"].index(max(row["numbers"])) == int((left + right) / 2) // 56
        image = Image.open(tmp_path / row["images"][0]).convert("RGB")
        assert image.size == (168, 84)
        red, green, blue = image.getpixel((int(left) + 5, 5))  # the button's colour, beside its digit
        assert row["answer"] == {red: "red", green: "green", blue: "blue"}[max(red, green, blue)]
    assert len({row["answer"] for row in rows}) == 3


def test_a_game_is_the_same_every_time_and_clicks_elsewhere_are_wrong(modules, page):
    game_module, _ = modules
    game = game_module.Game(page)

    def play(player):
        game.start(seed=7)
        seen = []
        while not game.is_over:
            seen.append((game.screenshot(), game.buttons()))
            game.click(player(game))
        return seen, game.num_right

    wrong_names, num_right = play(lambda _: "purple")
    buttons = [found for _, found in wrong_names]
    assert num_right == 0
    assert play(lambda _: "purple")[0] == wrong_names
    chosen = game_module.random_player(random.Random(0))
    assert [found for _, found in play(chosen)[0]] == buttons  # levels do not follow from clicks
    game.click("red")
    assert game.level == 5  # the game is over


def test_what_is_collected_is_read_by_the_trainers_data_and_scored_by_its_reward(modules, page, tmp_path):
    game_module, collect = modules
    (tmp_path / "images").mkdir()
    game = game_module.Game(page)
    game.start(seed=1, levels=8)
    rows = collect.collect_game(
        game, game_module.random_player(random.Random(1)), 1, tmp_path / "images", "x"
    )
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = save_tiny_model(tmp_path / "model", "qwen2_5_vl")
    config = load_config(
        PPOConfig,
        [
            f"config={FOLDER / 'train.yaml'}", f"data.train_files={tmp_path / 'x.jsonl'}",
            f"data.val_files={tmp_path / 'x.jsonl'}", f"data.image_dir={tmp_path / 'images'}",
            f"data.format_prompt={FOLDER / 'prompt.jinja'}", "data.num_workers=0",
            f"worker.reward.reward_function={FOLDER / 'reward.py'}:compute_score",
            f"worker.actor.model.model_path={model}", "data.rollout_batch_size=8",
            "worker.actor.global_batch_size=8", "worker.rollout.n=64",
            f"trainer.save_checkpoint_path={tmp_path / 'out'}",
        ],
    )  # fmt: skip
    tokenizer = load_tokenizer(str(model))

    options = media_options(config.data, config.worker.rollout)
    readers = load_readers(config.worker.actor.model, None, options, cache=None)

    (batch,) = make_loaders(config.data, readers, tmp_path / "out").train

    answers = batch.non_tensor_batch["ground_truth"].tolist()
    assert sorted(answers) == sorted(row["answer"] for row in rows)
    assert all(
        len(tokenizer.encode(name)) == 1 for name in game_module.NAMES
    )  # one sampled token is an answer
    prompt = tokenizer.decode(batch.batch["prompts"][0])
    assert "Which number is the largest? Answer with the colour of its button" in prompt
    assert prompt.count("<|image_pad|>") == 18  # 168 x 84 pixels, 28 x 28 each
    reward = load_reward_function(f"{FOLDER / 'reward.py'}:compute_score")
    said = [("red", "red"), ("blue", "red"), ("purple", "red"), ("", "red"), ("Red.", "red")]
    scores = reward.score([{"response": word, "ground_truth": truth} for word, truth in said])
    assert [score["overall"] for score in scores] == pytest.approx([1.0, 0.1, 0.0, 0.0, 1.0])


@pytest.mark.slow
def test_training_turns_a_player_that_loses_into_one_that_clicks_right_four_times_in_five(browser, tmp_path):
    environment = os.environ | {
        "FOLDER": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip

    ended = subprocess.run(
        ["bash", str(FOLDER / "run.sh")], env=environment, capture_output=True, text=True, timeout=3000
    )

    assert ended.returncode == 0, ended.stderr[-4000:]
    results = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"player"')]
    guesses, before, after = [result["right"] / result["clicks"] for result in results]
    assert 0.15 < guesses < 0.55 and before < 0.55  # of 100 clicks a third, give or take four deviations
    assert after > 0.8
    assert Image.open(tmp_path / "after.gif").n_frames == 6  # five levels, and the end


@pytest.mark.heavy
@pytest.mark.nightly("examples", "verl/agents")
def test_the_environment_plays_whole_games_and_the_page_judges_each_click(modules, page):
    game_module, _ = modules
    options = MultiTurnConfig(
        enable=True, environment=f"{FOLDER / 'env.py'}:NumberGame", tool_timeout_s=120.0
    )
    game, played = game_module.Game(page), {}

    with ToolPool(options) as pool:
        for key in ("expert", "silent"):
            opening = begin(pool, key, seed=7)
            assert opening.messages[0]["content"][0] == {"type": "image"}
            game.start(7)
            images, rewards, is_done = [opening.images[0]["bytes"]], [], False
            while not is_done:
                assert pixels(images[-1]) == pixels(game.screenshot())  # of the same level
                name = game_module.expert(game) if key == "expert" else "purple"
                seen = step(pool, f"{name}.", key=key)
                game.click(name)
                images.append(seen.images[0]["bytes"])
                rewards.append(seen.reward)
                is_done = seen.done
            played[key] = rewards
            pool.end(key)

    assert played == {"expert": [1.0] * 5, "silent": [0.0] * 5}


def pixels(png):
    return Image.open(io.BytesIO(png)).convert("RGB").tobytes()


def test_the_run_of_whole_games_is_a_config_that_loads():
    config = load_config(
        PPOConfig,
        [
            f"config={FOLDER / 'train_env.yaml'}",
            "data.train_files=/dev/null",
            "data.val_files=/dev/null",
            "worker.actor.model.model_path=model",
        ],
    )

    assert config.worker.rollout.multi_turn.environment == f"{FOLDER / 'env.py'}:NumberGame"
    assert load_environments(config.worker.rollout.multi_turn)[0].name == "NumberGame"
