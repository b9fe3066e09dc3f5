# SPDX-License-Identifier: Apache-2.0
"""The mistakes of a new user that need no model, with the real commands."""

import os

import pytest

from benchmarks.mistakes import MISTAKES, chosen, faults, make, write_run

CHEAP = chosen([], "nothing")


@pytest.fixture(scope="module")
def working(tmp_path_factory):
    folder = tmp_path_factory.mktemp("working")
    write_run(folder, "nothing")
    return folder


@pytest.fixture
def heavy_imports(tmp_path, monkeypatch):
    """Record the heavy packages that commands import instead of importing them."""
    record = tmp_path / "imported"
    record.touch()
    for name in ("torch", "ray", "transformers", "vllm"):
        (tmp_path / f"{name}.py").write_text(f"open({str(record)!r}, 'a').write('{name} ')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return record


@pytest.mark.nightly("benchmarks", "verl/config", "verl/trainer")
@pytest.mark.parametrize("mistake", CHEAP, ids=lambda mistake: mistake.name)
def test_the_answer_names_the_mistake_and_the_remedy_and_does_not_mislead(mistake, working, heavy_imports):
    answer = make(mistake, working)

    assert answer.faults == [], answer.output
    assert heavy_imports.read_text() == ""


def test_the_mistakes_are_at_least_those_of_a_first_time_user():
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 60
    assert all(mistake.must_say for mistake in MISTAKES)


def test_an_answer_is_judged_by_its_words_its_status_and_its_length():
    mistake = next(each for each in CHEAP if each.name == "unknown key algorithm.beta")
    good = "`algorithm.beta` is not an option; TRL's `beta` is `algorithm.kl_coef` here"

    assert list(faults(mistake, 2, good)) == []
    assert list(faults(mistake, 0, good)) == ["exit status 0"]
    assert list(faults(mistake, 2, good.replace("kl_coef", "x"))) == ["does not say '`algorithm.kl_coef`'"]
    assert list(faults(mistake, 2, f"{good}, or worker.prime.beta")) == ["says 'worker.prime'"]
    assert list(faults(mistake, 2, good + "\nline" * 12)) == ["13 lines"]
    assert "Traceback" in next(faults(mistake, 1, f"Traceback (most recent call last)\n{good}"))
