# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import pytest

from verl.config.hints.renamed_keys import SINGLE, RenamedKey, RenamedKeys
from verl.config.schema import ConfigError, load_config, option

KEYS = """
repeats:
  spare.engine: [engine, motor., spare.]
shared: [motor.fuel]
keys:
  Engine:
    engine.watts: motor.power; kilowatts here
    engine.fuel: motor.fuel
    motor.fuel.grade: motor.fuel; by name
    engine.turbo.size: motor.power
    engine.turbo: none; there is no turbo
    spare.engine.turbo.size: none; there is one size
  The rest:
    "*.note": none; notes are not read
    tire.width: motor.power
""" + "".join(f"    tire.t{number}: motor.t{number}\n" for number in range(SINGLE))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(KEYS)
    return RenamedKeys("abc", "docs/abc.md", file)


@dataclass(frozen=True)
class Motor:
    power: float = option(1.0, help="Kilowatts.")
    fuel: str | None = option(None, help="What burns.")


@dataclass(frozen=True)
class Boat:
    motor: Motor = option(Motor, help="Motor.")

    def problems(self, path):
        if self.motor.fuel is None:
            yield "`motor.fuel` must be set"


@pytest.fixture
def problems_of(others, monkeypatch):
    monkeypatch.setattr(Boat, "RENAMED", others, raising=False)

    def problems(*arguments):
        with pytest.raises(ConfigError) as raised:
            load_config(Boat, arguments)
        return raised.value.problems

    return problems


def test_a_key_of_another_program_is_answered_with_its_name_here_before_any_guess(problems_of):
    # The rule about `motor.fuel` is not checked, because it was given under its other name.
    assert problems_of("engine.fuel=oil", "engine.watts=3", "motor.powr=2") == [
        "`engine.fuel` is abc's name for `motor.fuel`",
        "`engine.watts` is abc's name for `motor.power`: kilowatts here",
        "`motor.powr` is not an option; did you mean `motor.power`?",
    ]


def test_a_key_in_a_yaml_file_is_answered_in_the_same_way(problems_of, tmp_path):
    (tmp_path / "abc.yaml").write_text("engine: {fuel: oil, note: x}\n")

    assert problems_of(f"config={tmp_path / 'abc.yaml'}") == [
        "`engine.fuel` is abc's name for `motor.fuel`",
        "`engine.note` is a key of abc without a counterpart here: notes are not read",
    ]


def test_a_section_of_another_program_that_is_an_option_here_is_answered_key_by_key(problems_of):
    assert problems_of("motor.fuel.grade=95", "motor.fuel.brand=x", "motor.power=2") == [
        "`motor.fuel.grade` is abc's name for `motor.fuel`: by name",
        "`motor.fuel.brand` is not an option; `--help` lists the options",
    ]
    assert problems_of("motor.fuel.brand=x") == ["`motor.fuel` must be text or null, got {'brand': 'x'}"]


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("engine.watts", "engine.watts"),
        ("+engine.watts", "engine.watts"),  # as Hydra's command line adds a key
        ("engine.turbo.size", "engine.turbo.size"),  # takes precedence over its section
        ("engine.turbo.blades.color", "engine.turbo"),
        ("engine.turbo", "engine.turbo"),
        ("engine.watts.color", None),  # an entry with an option covers only itself
        ("mast.note", "*.note"),
        ("engine.turbo.note", "engine.turbo"),
        ("mast", None),
    ],
)
def test_an_entry_covers_its_key_and_without_an_option_all_keys_below(others, key, entry):
    assert others.find(key) == entry


def test_a_huge_key_is_looked_up_quickly_and_quoted_in_part(others):
    hostile = "engine.turbo." + "a." * 300_000 + "a"

    assert others.find(hostile) == "engine.turbo"
    assert others.find(hostile.removeprefix("engine.turbo.")) is None
    (problem,) = others.problems([(hostile, "engine.turbo")])
    assert len(problem) < 300


def test_a_section_repeats_another_for_another_model_unless_an_option_is_shared_or_a_key_is_listed(others):
    assert others.keys["spare.engine.watts"] == RenamedKey("spare.power", "kilowatts here")
    assert others.keys["spare.engine.fuel"] == RenamedKey("motor.fuel")
    assert others.keys["spare.engine.turbo"] == RenamedKey(None, "there is no turbo")
    assert others.keys["spare.engine.turbo.size"] == RenamedKey(None, "there is one size")


def test_a_section_without_counterpart_is_reported_once(problems_of):
    (problem,) = problems_of("engine.turbo.a=1", "engine.turbo.b=1", "motor.fuel=oil")

    assert problem == "`engine.turbo` is a key of abc without a counterpart here: there is no turbo"


def test_many_keys_become_one_table_by_section_and_one_list(problems_of):
    arguments = [f"tire.t{number}=1" for number in range(SINGLE)]
    arguments += ["tire.width=1", "engine.watts=2", "engine.turbo.a=1", "mast.note=1", "motor.fuel=oil"]

    table, absent_keys = problems_of(*arguments)

    kept = ", ".join(f"t{number}" for number in range(SINGLE))
    assert [line.rstrip() for line in table.splitlines()] == [
        f"{SINGLE + 2} keys of abc have another name here (docs/abc.md):",
        "      tire",
        "        width -> motor.power",
        f"        {kept} -> motor.*",
        "      engine",
        "        watts -> motor.power; kilowatts here",
    ]
    assert absent_keys.splitlines() == [
        "2 keys and sections of abc have no counterpart here (docs/abc.md gives the reasons):",
        "      engine: turbo",
        "      *: note",
    ]
