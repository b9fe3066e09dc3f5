# SPDX-License-Identifier: Apache-2.0
"""Any config file and any command line results in a config or in an error that names the cause."""

import json
import re
import time

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from verl.config.parsing import MAX_BYTES, read_config_file, resolve_references, yaml_text
from verl.config.ppo import PPOConfig
from verl.config.schema import ConfigError, list_options, load_config, walk_options
from verl.config.text import config_yaml
from verl.trainer.main import main
from verl.trainer.run.exit_status import BAD_INPUT

KEYS = [entry.key for entry in walk_options(PPOConfig)]
OPTIONS = [entry.key for entry in list_options(PPOConfig)]
BASE = [
    "worker.actor.model.model_path=owner/model",
    "data.train_files=owner/rows",
    "data.val_files=owner/rows",
    "worker.reward.reward_function=examples/reward_function/math.py:compute_score",
    "worker.rollout.n=2",
]
NAMES_CAUSE = re.compile(
    r"^\d+ problems? in the configuration:\n(  - .*`[^`]*`|  - an argument must look)", re.S
)

any_text = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates and NUL too
yaml_words = st.sampled_from(
    [
        "null",
        "~",
        "",
        "true",
        "on",
        ".inf",
        "-.nan",
        "1e400",
        "0x" + "f" * 5000,
        "9" * 5000,
        "0b_",
        "0o8",
        "1_0",
        "190:20:30",
        "2001-99-99",
        "=",
        "<<",
        "${a}",
        "${data}",
        "${trainer.nnodes}",
        "${oc.env:NO_SUCH}",
        "${",
        "$",
        "???",
        "!!int x",
        "!!float x",
        "!!bool x",
        "!!timestamp x",
        "!!binary é",
        "!!set {a}",
        "!!python/object:os.system x",
        "*a",
        "&a 1",
        "&a [*a]",
        "{a: 1, a: 2}",
        "[[[[",
        "{? [1]: 2}",
        "{1: 2, null: 3}",
        "|",
        ">-",
        "%",
        "@",
        "`",
        "---",
        "'",
        '"\\ud800"',
        '"\\0"',
        "- 1",
        "\t",
        "\x85",
        "\u2028",
        "# x",
        "{<<: {a: 1}}",
        "{<<: 3}",
        "🙂",
        "é",
    ]
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.just(10**400), st.just(-(10**400)), st.floats(), any_text
)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3)
)
plain_trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**1000), 2**1000) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
)
keys = st.sampled_from(KEYS) | st.lists(
    st.sampled_from(["trainer", "data", "worker", "actor", "", "é", "${x}", "0", "config", "a b"]), max_size=4
).map(".".join)
values = yaml_words | any_text | trees.map(lambda tree: json.dumps(tree)) | st.integers().map(str)
arguments = st.tuples(keys, values).map("=".join) | any_text.filter(
    lambda text: not text.startswith("config=")
)


def check_loads_or_names_the_cause(arguments):
    """Return the config, or None after an error that quotes an option or argument."""
    try:
        return load_config(PPOConfig, [*BASE, *arguments])
    except ConfigError as error:
        assert NAMES_CAUSE.search(str(error)), str(error)
        return None


def check_round_trip(config, folder):
    file = folder / "resolved.yaml"
    file.write_text(config_yaml(config), encoding="utf-8")
    assert load_config(PPOConfig, [f"config={file}"]) == config


@given(st.binary(max_size=200))
def test_any_bytes_as_a_config_file(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)

    check_loads_or_names_the_cause([f"config={tmp_path / 'config.yaml'}"])


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "data", "trainer", "<<", "? x", "&b c", "*b"]), yaml_words),
        max_size=5,
    )
)
def test_any_yaml_words_as_a_config_file(tmp_path, lines):
    text = "\n".join(f"{key}: {value}" for key, value in lines)
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")

    check_loads_or_names_the_cause([f"config={tmp_path / 'config.yaml'}"])


@given(st.dictionaries(st.sampled_from(["data", "trainer", "worker", "x"]) | any_text, trees, max_size=3))
def test_any_tree_as_a_config_file(tmp_path, tree):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8", errors="surrogatepass")

    check_loads_or_names_the_cause([f"config={tmp_path / 'config.yaml'}"])


def doubling(first, line):
    """Return YAML in which every line contains the previous line twice."""
    return f"a0: {first}\n" + "".join(f"a{n}: &a{n} {line.format(n - 1)}\n" for n in range(1, 60))


HOSTILE = {
    "lists in lists": "a: " + "[" * 100_000,
    "closed lists in lists": "a: " + "[" * 40 + "]" * 40,
    "mappings in mappings": "\n".join(" " * depth + "a:" for depth in range(500)),
    "aliases that multiply": doubling("&a0 [x]", "[*a{0}, *a{0}]"),
    "merges that multiply": doubling("&a0 {x: 1}", "{{<<: [*a{0}, *a{0}]}}"),
    "an alias of itself": "a: &a {b: *a}",
    "a reference to itself": "trainer: ${trainer}",
    "references in references": "a: " + "${a" * 3000,
    "a long number": "trainer: {save_freq: " + "9" * 5000 + "}",
    "a long number in hexadecimal": "trainer: {save_freq: 0x" + "f" * 5000 + "}",
    "a word of no number": "trainer: {save_freq: 0b_}",
    "a word of another type": "trainer: {save_freq: !!timestamp x}",
    "bytes": "trainer: {save_freq: !!binary aaaa}",
    "many unknown keys": "".join(f"trainer_{n}: 1\n" for n in range(3000)),
    "a long unknown key": "trainer:\n  ? " + "save_freq" * 20_000 + "\n  : 1",
    "another kind of file": "#" * (MAX_BYTES + 1),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_refused_by_name_within_seconds(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)

    start = time.process_time()
    assert check_loads_or_names_the_cause([f"config={tmp_path / 'config.yaml'}"]) is None
    assert time.process_time() - start < 10


@given(st.lists(arguments, max_size=4))
def test_any_arguments(tmp_path, arguments):
    config = check_loads_or_names_the_cause(arguments)

    if config is not None:
        check_round_trip(config, tmp_path)


@pytest.mark.nightly("verl/config")
@given(st.sampled_from(OPTIONS), values)
def test_any_value_of_any_option(tmp_path, option, value):
    config = check_loads_or_names_the_cause([f"{option}={value}"])

    if config is not None:
        check_round_trip(config, tmp_path)


@pytest.mark.nightly("verl/config")
@given(st.dictionaries(st.text(max_size=5), plain_trees, max_size=3))
@example({"a": "🙂"})
@example({"a": "\x7f\x85\u2028\ufeff"})
@example({"a": "\\\\${b}"})
@example({"a": ".5"})
@example({"a": [float("inf"), float("-inf"), 1e300, 5e-324, -0.0]})
@example({"a": {2: 1, True: "x", 1.5: None}})
def test_yaml_text_reads_back_as_the_same_value(tmp_path, tree):
    file = tmp_path / "tree.yaml"
    file.write_text(
        "".join(f"{yaml_text(key)}: {yaml_text(value)}\n" for key, value in tree.items()), encoding="utf-8"
    )

    assert repr(resolve_references(read_config_file(file))) == repr(tree)


def doubled(key):
    """Return values of each kind that contain the value of a key twice."""
    reference = f"${{{key}}}"
    return {"text": 2 * reference, "list": 2 * [reference], "mapping": {"a": reference, "b": reference}}


@pytest.mark.parametrize("kind", ["text", "list", "mapping"])
def test_references_that_grow_exponentially_are_refused_before_they_are_resolved(kind):
    values = {f"k{n}": doubled(f"k{n + 1}")[kind] for n in range(60)} | {"k60": "x"}

    with pytest.raises(ValueError, match=rf"refers to more than {MAX_BYTES}"):
        resolve_references(values)


def test_references_within_the_limits_are_followed():
    tree = {"a": {"b": "${.c}${..d}", "c": "x"}, "d": "y", "e": ["${a.b}", "${e[0]}"]}

    assert resolve_references(tree) == {"a": {"b": "xy", "c": "x"}, "d": "y", "e": ["xy", "xy"]}
    with pytest.raises(ValueError, match="too long to follow"):
        resolve_references({f"k{n}": f"${{k{n + 1}}}" for n in range(2000)})


@given(st.lists(arguments, max_size=3))
def test_the_command_answers_bad_input_with_its_exit_status(capfd, arguments):
    status = main([*BASE, *arguments, "--dry-run"])
    printed = capfd.readouterr()

    assert status in (0, BAD_INPUT)
    if status:
        assert "Traceback" not in printed.err and re.search("`", printed.err)
