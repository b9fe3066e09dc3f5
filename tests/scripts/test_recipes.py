# SPDX-License-Identifier: Apache-2.0
"""The recipes of the documentation: each is one command that runs, and its page has what it came to."""

import re

import pytest

from scripts import recipes
from scripts.recipes import Outcome
from verl.models.tiny import save_tiny_model

OUTCOME = Outcome(before=0.125, after=0.9, minutes=7.4, curve={0: 0.125, 10: 0.6, 20: 0.9})
FIGURES = re.compile(r"^\| (\d\.\d\d \| \d\.\d\d \| \d+ \| \d+) \|$", re.MULTILINE)
REAL = {"sums", "dapo", "cold_start", "lora", "critic", "judge", "distillation", "pass_at_k"}
SMALLEST = ("trainer.max_steps=1", "trainer.val_freq=1", "data.val_batch_size=16")


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A copy of the pages, for the script to write to."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    for page in recipes.PAGES.glob("*.md"):
        (folder / page.name).write_text(page.read_text())
    monkeypatch.setattr(recipes, "PAGES", folder)
    monkeypatch.setattr(recipes, "PICTURES", tmp_path / "images")
    return folder


def test_the_index_has_a_line_for_each_page():
    assert len(recipes.names()) == 10
    assert sorted(recipes.names()) == sorted({page.stem for page in recipes.PAGES.glob("*.md")} - {"index"})


@pytest.mark.parametrize("name", recipes.names())
def test_a_page_and_the_index_have_the_same_figures_and_a_curve(name):
    (figures,) = FIGURES.findall(recipes.page_of(name).read_text())

    (line,) = re.findall(rf"^.*\({name}\.md\).*$", recipes.page_of("index").read_text(), re.MULTILINE)
    assert line.endswith(f"| {figures} |")
    assert (recipes.PICTURES / f"{name}.svg").read_text().startswith("<?xml")


def test_figures_are_written_into_the_page_and_its_line_of_the_index_alone(pages):
    before = {page.name: page.read_text() for page in pages.glob("*.md")}

    recipes.write("lora", OUTCOME)
    recipes.write("lora", OUTCOME)

    changed = {name for name, text in before.items() if (pages / name).read_text() != text}
    assert changed == {"lora.md", "index.md"}
    assert FIGURES.findall((pages / "lora.md").read_text()) == ["0.12 | 0.90 | 20 | 7"]
    lines = zip(before["index.md"].splitlines(), (pages / "index.md").read_text().splitlines(), strict=True)
    assert [new for old, new in lines if old != new] == [
        "| [LoRA](lora.md) | SmolLM2 | sums | 0.12 | 0.90 | 20 | 7 |"
    ]


def test_the_same_curve_is_the_same_picture(tmp_path):
    for name in ("first", "second"):
        recipes.draw(OUTCOME, tmp_path / name / "lora.svg")

    first, second = ((tmp_path / name / "lora.svg").read_bytes() for name in ("first", "second"))
    assert first == second


def test_a_recipe_runs_in_its_folder_with_further_arguments_of_its_last_command(pages, tmp_path):
    line = r"""printf '{"val_before": 0.25, "val_after": 1, "curve": {"0": 0.25, "%s": 1}}\n'"""
    (pages / "lora.md").write_text(
        f"# LoRA\n\n```bash\ntouch {tmp_path}/first\nrecorded() {{ {line} $#; }}\nrecorded\n```\n"
    )

    outcome = recipes.run("lora", tmp_path / "run", ["a.b=c"])

    assert (outcome.before, outcome.after, outcome.curve) == (
        0.25,
        1,
        {0: 0.25, 3: 1},
    )  # --folder FOLDER a.b=c
    assert (tmp_path / "first").exists()


def test_a_recipe_that_fails_ends_the_script_and_leaves_its_page(pages, tmp_path, capfd):
    (pages / "lora.md").write_text("# LoRA\n\n```bash\necho why; fails()  { return 3; }; fails\n```\n")
    before = {page.name: page.read_text() for page in pages.glob("*.md")}

    assert recipes.main(["lora", "--folder", str(tmp_path / "run")]) == 1

    shown = capfd.readouterr()
    assert "== lora\nwhy\n" in shown.out and "exit status 3" in shown.err
    assert {page.name: page.read_text() for page in pages.glob("*.md")} == before


@pytest.mark.parametrize(
    "command",
    [
        "true",
        "echo hello",
        "echo '[1]'",
        """echo '{"val_before": 0.1, "curve": {"0": 0.1}}'""",
        """echo '{"val_before": 0.1, "val_after": 0.2, "curve": {}}'""",
        """echo '{"val_before": 0.1, "val_after": NaN, "curve": {"0": 0.1}}'""",
        """echo '{"val_before": 0.1, "val_after": 0.2, "curve": {"0": null}}'""",
        """echo '{"val_before": 0.1, "val_after": 0.2, "curve": [0.1]}'""",
        """false | echo '{"val_before": 0.1, "val_after": 0.2, "curve": {"0": 0.1}}'""",
    ],
)
def test_a_recipe_without_an_outcome_is_one_error_and_writes_nothing(pages, tmp_path, capfd, command):
    (pages / "lora.md").write_text(f"# LoRA\n\n```bash\n{command} #\n```\n")
    before = {page.name: page.read_text() for page in pages.glob("*.md")}

    assert recipes.main(["lora", "--folder", str(tmp_path / "run")]) == 1

    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("lora: ")
    assert {page.name: page.read_text() for page in pages.glob("*.md")} == before
    assert not recipes.PICTURES.exists()


def test_an_unknown_recipe_is_answered_with_the_names(capsys):
    with pytest.raises(SystemExit):
        recipes.main(["lara"])

    assert "no recipe lara; there are sums, dapo" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_runs_in_its_smallest_size(name, tmp_path):
    if name in REAL:  # a tiny model stands in for SmolLM2, which is a package of 93 MB
        save_tiny_model(tmp_path / "model", "qwen2")

    outcome = recipes.run(name, tmp_path, SMALLEST)

    assert set(outcome.curve) == {0, 1}
    assert 0 <= outcome.before <= 1 and 0 <= outcome.after <= 1
