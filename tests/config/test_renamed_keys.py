# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import pytest

from verl.config.renamed_keys import SINGLE, RenamedKey, RenamedKeys, absent
from verl.config.schema import ConfigError, load_config, option

OTHERS = RenamedKeys(
    program="abc",
    page="docs/abc.md",
    keys={
        "engine.watts": RenamedKey("motor.power", "kilowatts here"),
        "engine.fuel": RenamedKey("motor.fuel"),
        "engine.turbo.size": RenamedKey("motor.power"),
        "engine.turbo": absent("nothing turns"),
        "*.note": absent("notes are not read"),
        **{f"tyre.t{number}": RenamedKey(f"motor.t{number}") for number in range(SINGLE)},
        "tyre.width": RenamedKey("motor.power"),
    },
)


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


def problems_of(*arguments):
    with pytest.raises(ConfigError) as raised:
        load_config(Boat, arguments, OTHERS)
    return raised.value.problems


def test_a_key_of_another_program_is_named_by_what_it_is_here_before_any_guess():
    # `motor.watts` is nearer to an option than to an entry, and is guessed; `motor.fuel` is not asked for.
    assert problems_of("engine.fuel=oil", "engine.watts=3", "motor.powr=2") == [
        "`engine.fuel` is abc's name of `motor.fuel`",
        "`engine.watts` is abc's name of `motor.power`: kilowatts here",
        "`motor.powr` is not an option; did you mean `motor.power`?",
    ]


def test_a_key_in_a_yaml_file_is_named_in_the_same_way(tmp_path):
    (tmp_path / "abc.yaml").write_text("engine: {fuel: oil, note: x}\n")

    assert problems_of(f"config={tmp_path / 'abc.yaml'}") == [
        "`engine.fuel` is abc's name of `motor.fuel`",
        "`engine.note` is abc's and has no counterpart here: notes are not read",
    ]


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("engine.watts", "engine.watts"),
        ("+engine.watts", "engine.watts"),  # as Hydra's command line adds a key
        ("engine.turbo.size", "engine.turbo.size"),  # before the section around it
        ("engine.turbo.blades.colour", "engine.turbo"),
        ("engine.turbo", "engine.turbo"),
        ("engine.watts.colour", None),  # an entry with an option stands for itself alone
        ("mast.note", "*.note"),
        ("engine.turbo.note", "engine.turbo"),
        ("mast", None),
    ],
)
def test_an_entry_stands_for_its_key_and_without_an_option_for_all_below(key, entry):
    assert OTHERS.find(key) == entry


def test_a_key_without_end_is_looked_up_at_once_and_told_in_part():
    hostile = "engine.turbo." + "a." * 300_000 + "a"

    assert OTHERS.find(hostile) == "engine.turbo"
    assert OTHERS.find(hostile.removeprefix("engine.turbo.")) is None
    (problem,) = OTHERS.problems([(hostile, "engine.turbo")])
    assert len(problem) < 300


def test_a_section_without_counterpart_is_told_once():
    (problem,) = problems_of("engine.turbo.a=1", "engine.turbo.b=1", "motor.fuel=oil")

    assert problem == "`engine.turbo` is abc's and has no counterpart here: nothing turns"


def test_many_keys_become_one_table_by_section_and_one_list():
    arguments = [f"tyre.t{number}=1" for number in range(SINGLE)]
    arguments += ["tyre.width=1", "engine.watts=2", "engine.turbo.a=1", "mast.note=1", "motor.fuel=oil"]

    table, absent_keys = problems_of(*arguments)

    kept = ", ".join(f"t{number}" for number in range(SINGLE))
    assert [line.rstrip() for line in table.splitlines()] == [
        f"{SINGLE + 2} keys are abc's; here they are (docs/abc.md):",
        "      tyre",
        "        width -> motor.power",
        f"        {kept} -> motor.*",
        "      engine",
        "        watts -> motor.power; kilowatts here",
    ]
    assert absent_keys.splitlines() == [
        "2 keys and sections of abc have no counterpart here (docs/abc.md says why):",
        "      engine: turbo",
        "      *: note",
    ]
