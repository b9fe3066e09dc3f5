# SPDX-License-Identifier: Apache-2.0
import re
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest

from verl.config.files.paths import (
    data_source,
    existing_file,
    function_in_file,
    model_source,
    writable_folder,
)
from verl.config.hints.unknown_keys import suggest
from verl.config.schema import (
    ConfigError,
    check_config,
    config_notes,
    load_config,
    option,
    walk_options,
)
from verl.config.text import config_yaml, example_yaml, help_text, options_page


@dataclass(frozen=True)
class Wheel:
    size: int = option(4, help="Inches.", minimum=1, also=(-1,), example=6)
    spokes: int | None = option(None, help="Spokes; null is a disc.")
    color: str = option("red", help="Paint.", choices=("red", "blue", "gold"))


@dataclass(frozen=True)
class Engine:
    power: float = option(1.0, help="Kilowatts.", minimum=0.0, maximum=10.0)
    fuel: str = option("none", help="Fuel.")
    quiet: bool = option(False, help="Make no noise.")


@dataclass(frozen=True)
class Car:
    name: str = option("car", help="Name.")
    owner: str | None = option(None, help="Owner.")
    tags: tuple[str, ...] = option(("a", "b"), help="Tags.")
    files: str | list[str] = option("", help="Papers.")
    range_km: tuple[float, float] = option((1.0, 2.0), help="Shortest and longest.")
    extra: dict[str, Any] = option(dict, help="Anything.")
    armed: bool = option(False, help="Arm it.")
    wheel: Wheel = option(Wheel, help="Wheel.")
    engine: Engine = option(Engine, help="Engine.", example={"power": 2.0})
    trailer: Wheel = option(Wheel, help="Trailer.")
    REFUSED = {"fuel": "combustion", "trailer.color": "painted trailers"}  # noqa: RUF012 (read only)
    INERT = {"quiet": "it is always silent"}  # noqa: RUF012

    def problems(self, path):
        if self.wheel.size > 5 and self.engine.power < 2:
            yield f"`wheel.size` ({self.wheel.size}) must be at most 5 with `engine.power` below 2"


def problems_of(*arguments):
    with pytest.raises(ConfigError) as raised:
        load_config(Car, arguments)
    return raised.value.problems


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("tags=[console,swanlab]", ("console", "swanlab")),  # after a shell has removed the quotes
        ("tags=['console','swanlab']", ("console", "swanlab")),
        ('tags=["console","wandb"]', ("console", "wandb")),
        ("tags=console", ("console",)),
        ("armed=True", True),
        ("armed=true", True),
        ("armed=false", False),
        ("armed=1", True),
        ("name=001", "001"),
        ("name=1e-6", "1e-6"),
        ("name=a: b", "a: b"),
        ("name=x=y", "x=y"),
        ("name='quoted'", "quoted"),
        ("name='null'", "null"),
        ("owner=null", None),
        ("owner=None", None),
        ("owner=", None),
        ("name=", ""),
        ("files=null", ""),
        ("files=one@train", "one@train"),
        ('files=["one","two"]', ["one", "two"]),
        ('extra={"a":1,"b":{"c":[1,2]}}', {"a": 1, "b": {"c": [1, 2]}}),
        ("extra.a=1e-6", {"a": 1e-6}),
        ("extra.a=None", {"a": None}),
        ("range_km=[1,2.5]", (1.0, 2.5)),
    ],
)
def test_every_command_line_form_is_read(argument, expected):
    config = load_config(Car, [argument])

    value = getattr(config, argument.split("=")[0].split(".")[0])
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("name", ["name", "armed", "wheel.size"])
@pytest.mark.parametrize("word", ["null", "~"])
def test_null_means_the_same_on_the_command_line_and_in_a_file(name, word, tmp_path):
    file = tmp_path / "car.yaml"
    section, _, key = name.rpartition(".")
    file.write_text(f"{section}: {{{key}: {word}}}\n" if section else f"{key}: {word}\n")

    problems = []
    for argument in (f"{name}={word}", f"config={file}"):
        with pytest.raises(ConfigError) as caught:
            load_config(Car, [argument])
        problems.append(caught.value.problems)

    assert problems[0] == problems[1] and problems[0][0].endswith("got null"), problems


@pytest.mark.parametrize(("text", "expected"), [("1.0e-6", 1e-6), ("1e-6", 1e-6), ("3", 3.0), ("0.5", 0.5)])
def test_numbers_are_read_in_every_notation(text, expected):
    assert load_config(Car, [f"engine.power={text}"]).engine.power == expected


def test_a_whole_number_may_be_written_as_a_float():
    assert load_config(Car, ["wheel.size=1e1", "engine.power=3"]).wheel.size == 10


def test_an_empty_text_is_null_in_a_file_as_on_the_command_line(tmp_path):
    file = tmp_path / "car.yaml"
    file.write_text("name: ''\nowner: ''\nfiles: ''\n")

    config = load_config(Car, [f"config={file}"])

    assert config == load_config(Car, ["name=", "owner=", "files="])
    assert (config.name, config.owner, config.files) == ("", None, "")  # text that cannot be null stays text


def test_an_empty_mapping_on_the_command_line_clears_that_of_a_file(tmp_path):
    file = tmp_path / "car.yaml"
    file.write_text("extra: {a: 1, b: {c: 2}}\nwheel: {color: blue}\n")

    assert load_config(Car, [f"config={file}", "extra={}"]).extra == {}
    assert load_config(Car, [f"config={file}", "extra={}", "extra.d=3"]).extra == {"d": 3}
    assert load_config(Car, [f"config={file}", "extra={a: 4}"]).extra == {"a": 4, "b": {"c": 2}}
    # A section keeps its options.
    assert load_config(Car, [f"config={file}", "wheel={}"]).wheel.color == "blue"


def test_arguments_override_files_and_files_override_defaults(tmp_path):
    file = tmp_path / "car.yaml"
    file.write_text("name: from_file\nowner: from_file\nextra: {a: 1, b: 2}\nwheel: {color: blue}\n")

    config = load_config(Car, ["owner=first", f"config={file}", "owner=second", "extra.b=3"])

    assert (config.name, config.owner, config.wheel.color) == ("from_file", "second", "blue")
    assert config.extra == {"a": 1, "b": 3}
    assert config.wheel.size == 4


def test_a_yaml_value_may_refer_to_another_option(tmp_path):
    file = tmp_path / "car.yaml"
    file.write_text("owner: ${name}_owner\n")

    assert load_config(Car, [f"config={file}", "name=x"]).owner == "x_owner"


def test_a_reference_to_nothing_is_an_error(tmp_path):
    file = tmp_path / "car.yaml"
    file.write_text("owner: ${nothing}\n")

    (problem,) = problems_of(f"config={file}")

    assert "`owner`" in problem and "nothing" in problem


def test_a_config_is_read_only():
    with pytest.raises(FrozenInstanceError):
        load_config(Car).name = "other"


def test_all_problems_are_reported_together():
    problems = problems_of("wheel.size=0", "engine.power=b", "naame=x", "wheel.color=pink", "armed=perhaps")

    assert problems == [
        "`naame` is not an option; did you mean `name`?",
        "`armed` must be true or false, got 'perhaps'",
        "`wheel.size` must be at least 1, or -1, got 0",
        "`wheel.color` must be one of ['red', 'blue', 'gold'], got 'pink'",
        "`engine.power` must be a number, got 'b'",
    ]


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("engine.power=11", "`engine.power` must be at least 0.0 and at most 10.0, got 11.0"),
        ("engine.power=.nan", "`engine.power` must be a number, got nan"),
        ("wheel.size=1.5", "`wheel.size` must be an integer, got 1.5"),
        ("wheel.size=true", "`wheel.size` must be an integer, got true"),
        ("wheel.size=null", "`wheel.size` must be an integer, got null"),
        ("range_km=[1]", "`range_km` must be a list of 2 items, each a number, got [1]"),
        ("extra=5", "`extra` must be a mapping, got 5"),
        ("wheel=5", "`wheel` is a section and must be a mapping, got 5"),
        ("wheel", "an argument must look like `section.option=value`, got 'wheel'"),
        ("car.yaml", "an argument must look like `section.option=value`, got 'car.yaml': pass a file as"),
        ("wheel..size=3", "an argument must look like `section.option=value`, got 'wheel..size=3'"),
        ("config=nowhere.yaml", "`config`: no file "),
        ("tags=[1,", "`tags` cannot be read from '[1,': "),
    ],
)
def test_a_wrong_value_is_named_with_rule_and_value(argument, problem):
    (found,) = problems_of(argument)

    assert found.startswith(problem)


@pytest.mark.parametrize("text", ["wheel: {size: [1,", "- a\n- b\n", "name: a\nname: b\n"])
def test_a_broken_file_is_named(tmp_path, text):
    file = tmp_path / "car.yaml"
    file.write_text(text)

    (problem,) = problems_of(f"config={file}")

    assert str(file) in problem


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("wheel.sizze", "wheel.size"),
        ("size", "wheel.size"),  # the section is missing
        ("engine.color", "wheel.color"),  # the wrong section
        ("motor.power", "engine.power"),
        ("zzzz.qqqq", None),
    ],
)
def test_an_unknown_key_suggests_the_nearest(key, nearest):
    options = [entry.key for entry in walk_options(Car) if "." in entry.key]

    found = suggest(key, options)

    assert (found and found.option) == nearest
    (problem,) = problems_of(f"{key}=1")
    assert problem.startswith(f"`{key}` is not an option; ")


def test_a_rule_is_not_checked_if_one_of_its_options_is_invalid():
    assert len(problems_of("wheel.size=x", "engine.power=1")) == 1
    assert problems_of("wheel.size=6") == ["`wheel.size` (6) must be at most 5 with `engine.power` below 2"]


def test_a_refused_option_is_accepted_at_its_default_only():
    load_config(Car, ["engine.fuel=none", "trailer.color=red", "wheel.color=blue"])

    assert problems_of("engine.fuel=oil", "trailer.color=blue") == [
        "`engine.fuel` must be 'none', got 'oil': this version has no combustion",
        "`trailer.color` must be 'red', got 'blue': this version has no painted trailers",
    ]


def test_an_option_without_effect_is_reported_when_it_was_set():
    assert config_notes(load_config(Car)) == []
    assert config_notes(load_config(Car, ["engine.quiet=true"])) == [
        "`engine.quiet` has no effect: it is always silent"
    ]


def test_a_config_built_in_python_is_checked_the_same_way():
    check_config(Car())
    with pytest.raises(ConfigError, match=r"`wheel\.size` must be at least 1, or -1, got 0"):
        check_config(Car(wheel=Wheel(size=0)))


def test_the_example_holds_every_option_with_its_example_value(tmp_path):
    file = tmp_path / "car.yaml"
    file.write_text(example_yaml(Car))

    config = load_config(Car, [f"config={file}"])

    assert config.wheel.size == 6
    assert config.engine.power == 2.0
    assert "# Inches. (at least 1, or -1)\n  size: 6\n" in file.read_text()


def test_options_that_a_class_adds_to_inherited_sections_come_before_them():
    @dataclass(frozen=True)
    class Inner:
        size: int = option(1, help="Size.")

    @dataclass(frozen=True)
    class Base:
        first: int = option(1, help="First.")
        inner: Inner = option(Inner, help="Inner.")

    @dataclass(frozen=True)
    class Derived(Base):
        second: int = option(2, help="Second.")

    keys = [entry.key for entry in walk_options(Derived)]

    assert keys == ["first", "second", "inner", "inner.size"]


def test_a_printed_config_loads_to_the_same_config(tmp_path):
    arguments = [
        "name=yes",
        "owner=a: #b",
        "extra={a: [1, null, 'x y']}",
        "engine.power=1e-6",
        "files=[a,b@c]",
    ]
    config = load_config(Car, arguments)
    file = tmp_path / "car.yaml"
    file.write_text(config_yaml(config))

    assert load_config(Car, [f"config={file}"]) == config


def test_help_finds_a_section_and_a_name():
    assert "wheel.size=4" in help_text(Car)
    assert "engine.power" not in help_text(Car, "wheel")
    assert help_text(Car, "powe").count("engine.power=") == 1
    with pytest.raises(ConfigError, match="has this in its name"):
        help_text(Car, "sunroof")


def test_the_page_of_options_has_a_heading_for_each_section_and_a_row_for_each_option():
    page = options_page(Car)

    assert re.findall(r"^## `(.+)`$", page, re.MULTILINE) == ["wheel", "engine", "trailer"]
    assert "| `size` | an integer; at least 1, or -1 | `4` | Inches. |" in page
    assert "| `color` | `red`, `blue`, `gold` | `red` | Paint. |" in page
    assert '| `fuel` | text | `"none"` | Fuel. (only "none": this version has no combustion) |' in page
    assert page.index("| `name` | text | `car` | Name. |") < page.index("## `wheel`")
    assert "| `quiet` | true or false | `false` | Make no noise. (no effect: it is always silent) |" in page


def test_the_page_of_options_escapes_markdown_and_html():
    @dataclass(frozen=True)
    class Odd:
        inner: str = option("a", help="A <b> in a|b, not `a|b_c` or a_b.")

    @dataclass(frozen=True)
    class Outer:
        odd: Odd = option(Odd, help="Odd.")

    assert "| A &lt;b> in a\\|b, not `a\\|b_c` or a\\_b. |" in options_page(Outer)


def test_paths_become_absolute_and_must_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "reward.py").write_text("from m import main\n\ndef score(): ...")
    (tmp_path / "model").mkdir()

    assert existing_file("./rows.jsonl") == str(tmp_path / "rows.jsonl")
    assert data_source("rows.jsonl@test") == f"{tmp_path}/rows.jsonl@test"
    assert data_source("hiyouga/math12k@train") == "hiyouga/math12k@train"
    assert data_source("openai/gsm8k/main@train[:10]") == "openai/gsm8k/main@train[:10]"
    assert function_in_file("reward.py:score") == f"{tmp_path}/reward.py:score"
    assert function_in_file("reward.py") == f"{tmp_path}/reward.py"
    assert model_source("model") == str(tmp_path / "model")
    assert model_source("Qwen/Qwen2.5-7B-Instruct") == "Qwen/Qwen2.5-7B-Instruct"


@pytest.mark.parametrize(
    ("resolve", "text"),
    [
        (existing_file, "missing.jinja"),
        (data_source, "missing.parquet@train"),
        (data_source, "./missing"),
        (data_source, "rows@"),
        (data_source, "a/b/c/d@train"),
        (model_source, "/models/missing"),
        (model_source, "a/b/c"),
        (function_in_file, "missing.py:score"),
        (function_in_file, "package.module"),
        (function_in_file, "/"),
    ],
)
def test_a_missing_path_is_an_error(resolve, text):
    with pytest.raises((FileNotFoundError, ValueError)):
        resolve(text)


def test_a_missing_path_in_a_folder_that_exists_is_no_subset_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()

    with pytest.raises(FileNotFoundError):
        data_source("data/math/rows@train")


def test_a_function_must_be_in_its_file(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def score(): ...")

    with pytest.raises(ValueError, match=r"reward\.py has no function 'scor'.* one of \['score'\]"):
        function_in_file(f"{file}:scor")
    with pytest.raises(ValueError, match="has no function 'main'"):
        function_in_file(str(file))
    file.write_text("from elsewhere import *")
    assert function_in_file(f"{file}:anything") == f"{file}:anything"
    file.write_text("def score(:")
    with pytest.raises(ValueError, match=r"reward\.py, line 1: "):
        function_in_file(f"{file}:score")


def test_a_folder_that_cannot_be_written_is_an_error_and_nothing_is_left_behind(tmp_path):
    (tmp_path / "file").write_text("")

    assert writable_folder(str(tmp_path / "a" / "b")) == str(tmp_path / "a" / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    for text in (str(tmp_path / "file" / "a"), "/proc/checkpoints"):
        with pytest.raises(ValueError, match="must be a folder that can be written"):
            writable_folder(text)


def test_a_folder_as_a_config_is_named_as_what_it_is():
    with pytest.raises(ConfigError) as caught:
        load_config(Car, ["config=/"])

    assert caught.value.problems == ["`config`: / is no file"]
