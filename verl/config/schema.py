# SPDX-License-Identifier: Apache-2.0
"""Config trees: frozen dataclasses of fields declared with `option(...)`, loaded from YAML and arguments.

One declaration gives the default, the check, the help text and the line in the example YAML. A rule about one
option stands in its `option`; a rule about a section, or between sections, in a method of the lowest
dataclass that sees all of them: `problems(path)` yields a sentence for each problem; `path` is its key. To
add an option, add one field.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_origin, get_type_hints

from verl.config.config_source import read_argument, read_config_file, resolve_references
from verl.config.renamed_keys import RenamedKeys
from verl.config.values import NULL_WORDS, convert, members_of, show

C = TypeVar("C")
QUOTED_OPTION = re.compile(r"`([\w.]+)")  # how a problem names the options it is about
MAX_KEY = 200  # characters of a key that could be a misspelt one
MAX_SUGGESTIONS = 10  # each takes tens of milliseconds; more unknown keys are those of another program
MIN_SIMILARITY = 0.6  # below it a suggestion confuses more than it helps


class ConfigError(ValueError):
    """All problems of a config at once; `problems` holds them one by one."""

    def __init__(self, problems: Sequence[str]) -> None:
        """Join `problems` into one message, a line for each."""
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(
            "\n".join([f"{count} in the configuration:", *(f"  - {text}" for text in self.problems)])
        )


@dataclasses.dataclass(frozen=True)
class OptionInfo:
    """What a field declares beside its default; see `option`."""

    help: str
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    also: tuple[Any, ...] = ()
    resolve: Callable[[Any], Any] | None = None
    example: Any = None
    unavailable: str | None = None
    supported: tuple[Any, ...] | None = None
    inert: str | None = None

    def range_text(self) -> str:
        """Return the range in words, such as "at least 1, or -1"; empty without a range."""
        bounds = [
            text
            for text in (
                None if self.minimum is None else f"at least {self.minimum}",
                None if self.maximum is None else f"at most {self.maximum}",
            )
            if text
        ]
        return " and ".join(bounds) + "".join(f", or {value}" for value in self.also)


NO_SECTION = OptionInfo(help="")  # what surrounds the top of a tree


class OptionEntry(NamedTuple):
    """One option or section in a tree: its dotted key, its type, its default and its declaration."""

    key: str
    hint: Any
    default: Any
    info: OptionInfo


def option(
    default: Any = None,
    *,
    help: str,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    also: tuple[Any, ...] = (),
    resolve: Callable[[Any], Any] | None = None,
    example: Any = None,
    unavailable: str | None = None,
    supported: tuple[Any, ...] | None = None,
    inert: str | None = None,
) -> Any:
    """Declare one documented option of a config dataclass.

    Args:
        default: The value when nobody sets it; a class or a function makes a new value each time.
        help: One sentence with the unit and the meaning of special values.
        choices: The closed set of values.
        minimum: Smallest value.
        maximum: Largest value.
        also: Values allowed outside the range, such as -1 for "never".
        resolve: Turns the value into what the program uses (an absolute path), or raises.
        example: The value in `examples/config.yaml`, where it differs from the default; for a
            section a mapping.
        unavailable: Names the feature that this option belongs to and that is not built: any other value than
            `supported` is then an error. On a section it covers every option inside.
        supported: The values that work although the feature is unavailable; the default alone if not given.
        inert: Says why the value has no effect here; another value than the default is told to the user.
    """
    info = OptionInfo(help, choices, minimum, maximum, also, resolve, example, unavailable, supported, inert)
    if callable(default):
        return dataclasses.field(default_factory=default, metadata={"option": info})
    return dataclasses.field(default=default, metadata={"option": info})


def load_config(cls: type[C], arguments: Sequence[str] = (), moved: RenamedKeys | None = None) -> C:
    """Return the config that `arguments` describe.

    Later wins: the defaults, the YAML files named by `config=FILE`, the arguments `section.option=value`.

    Args:
        cls: The dataclass at the top of the tree.
        arguments: As on the command line.
        moved: The keys of another program, which errors then name by what they are called here.

    Raises:
        ConfigError: Names every unknown key, wrong value and broken rule.
    """
    problems: list[str] = []
    layers: dict[str, Any] = default_values(cls)
    for path in _named_files(arguments):
        layers = _merged(layers, _read_file(path))
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or "" in key.split("."):
            hint = f": a file is given as `config={argument}`" if argument.endswith((".yaml", ".yml")) else ""
            problems.append(f"an argument must look like `section.option=value`, got {show(argument)}{hint}")
        elif key != "config":
            try:
                layers = _merged(layers, _nest(key, _read_value(cls, key, text)))
            except ValueError as error:
                problems.append(f"`{key}` cannot be read from {show(text)}: {error}")
    try:
        values = resolve_references(layers)
    except ValueError as error:
        raise ConfigError([*problems, str(error)]) from error
    return _Builder(cls, problems, moved).build(values)


def check_config(config: Any) -> None:
    """Check every option and every rule of a config that was built in Python.

    Raises:
        ConfigError: Names every wrong value and broken rule.
    """
    _Builder(type(config)).build(dataclasses.asdict(config))


def default_values(cls: type) -> dict[str, Any]:
    """Return the defaults of a config class as nested mappings."""
    values = {}
    for entry, hint in _fields(cls):
        if is_section(hint):
            values[entry.name] = default_values(hint)
        else:
            values[entry.name] = _default(entry)
    return values


def walk_options(cls: type, path: str = "", section: OptionInfo = NO_SECTION) -> Iterator[OptionEntry]:
    """Yield options in order, sections behind them, each with what its section declares for it."""
    # A class that inherits sections declares its own options behind them.
    for entry, hint in sorted(_fields(cls), key=lambda field: is_section(field[1])):
        info: OptionInfo = entry.metadata["option"]
        unavailable = info.unavailable or section.unavailable
        example = (section.example or {}).get(entry.name, info.example)
        if unavailable and example not in (info.supported or ()):
            example = None
        info = dataclasses.replace(info, unavailable=unavailable, example=example)
        key = _join(path, entry.name)
        yield OptionEntry(key, hint, _default(entry), info)
        if is_section(hint):
            yield from walk_options(hint, key, info)


def list_options(cls: type) -> list[OptionEntry]:
    """Return every option of a config class in order, those of sections under their dotted keys."""
    return [entry for entry in walk_options(cls) if not is_section(entry.hint)]


def config_notes(config: Any) -> list[str]:
    """Return a sentence for each option that was set and has no effect."""
    return [
        f"`{entry.key}` has no effect: {entry.info.inert}"
        for entry in list_options(type(config))
        if entry.info.inert and value_at(config, entry.key) != entry.default
    ]


def is_section(hint: Any) -> bool:
    """Whether a field's type is a section, not a single option."""
    return dataclasses.is_dataclass(hint)


def value_at(config: Any, key: str) -> Any:
    """Return the value under a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def nearest_key(key: str, cls: type) -> str | None:
    """Return the option or section that an unknown key most likely meant, also from another section."""
    best, best_score = None, 0.0
    if len(key) > MAX_KEY:
        return None
    for candidate, _, _, info in walk_options(cls):
        name_score = _similarity(key.rpartition(".")[2], candidate.rpartition(".")[2])
        path_score = _similarity(key, candidate)
        if max(name_score, path_score) < MIN_SIMILARITY:
            continue
        score = 2 * name_score + path_score - 0.5 * bool(info.unavailable)
        if score > best_score:
            best, best_score = candidate, score
    return best


class _Builder:
    """Builds a config tree from nested mappings and collects every problem on the way."""

    def __init__(self, cls: type, problems: Sequence[str] = (), moved: RenamedKeys | None = None) -> None:
        self.cls = cls
        self.problems = list(problems)
        self.moved = moved
        self.found: list[tuple[str, str]] = []  # unknown keys that are another program's, and their entries
        self.broken: set[str] = set()  # options already complained about: no rule is checked on their account

    def build(self, values: Any) -> Any:
        config = self._build_section(self.cls, values, "", None)
        if self.moved is not None:
            self.problems[:0] = self.moved.problems(self.found)
        for problem in _rule_problems(config):
            if not self.broken.intersection(QUOTED_OPTION.findall(problem)):
                self.problems.append(problem)
        if self.problems:
            raise ConfigError(self.problems)
        return config

    def _build_section(self, cls: type, values: Any, path: str, unavailable: str | None) -> Any:
        if not isinstance(values, dict):
            self._complain(path, f"`{path}` is a section and must be a mapping, got {show(values)}")
            values = {}
        known = {entry.name: (entry, hint) for entry, hint in _fields(cls)}
        for name in values:
            if name not in known:
                self._complain_unknown(_join(path, str(name)), values[name])
        built = {}
        for name, (entry, hint) in known.items():
            info: OptionInfo = entry.metadata["option"]
            reason = info.unavailable or unavailable
            key = _join(path, name)
            if is_section(hint):
                built[name] = self._build_section(hint, values.get(name, {}), key, reason)
            elif name in values:
                built[name] = self._build_option(key, values[name], entry, hint, reason)
        return cls(**built)

    def _build_option(
        self, key: str, value: Any, entry: dataclasses.Field, hint: Any, reason: str | None
    ) -> Any:
        info: OptionInfo = entry.metadata["option"]
        default = _default(entry)
        try:
            value = convert(value, hint)
            _check_value(value, default, info, reason)
            return info.resolve(value) if info.resolve and value is not None else value
        except (ValueError, OSError) as error:  # a path may be too long for the system to look for
            text = str(error)
            self._complain(key, f"`{key}` {text}" if text.startswith("must") else f"`{key}`: {text}")
            return default

    def _complain(self, key: str, problem: str) -> None:
        self.broken.add(key)
        self.problems.append(problem)

    def _complain_unknown(self, key: str, value: Any) -> None:
        entry = None if self.moved is None else self.moved.find(key)
        if self.moved is not None and entry is not None:
            self.found.append((key, entry))
            self.broken.add(self.moved.keys[entry].option or key)
            return
        if isinstance(value, dict) and value:
            for name, item in value.items():
                self._complain_unknown(_join(key, str(name)), item)
            return
        nearest = nearest_key(key, self.cls) if len(self.problems) < MAX_SUGGESTIONS else None
        if nearest:
            self.broken.add(nearest)
        remedy = f"did you mean `{nearest}`?" if nearest else "`--help` lists every option"
        self._complain(key, f"`{key[:MAX_KEY]}` is not an option; {remedy}")


def _check_value(value: Any, default: Any, info: OptionInfo, reason: str | None) -> None:
    """Raise a ValueError if one value breaks its option's declaration."""
    if value is None:
        return
    if isinstance(value, tuple | list) and info.choices:
        unknown = [item for item in value if item not in info.choices]
        if unknown:
            raise ValueError(f"must hold only {list(info.choices)}, got {show(unknown[0])}")
        return
    if info.choices and value not in info.choices:
        raise ValueError(f"must be one of {list(info.choices)}, got {show(value)}")
    allowed = (info.supported or (default,)) if reason else None
    if allowed is not None and value not in allowed:
        rule = show(allowed[0]) if len(allowed) == 1 else f"one of {list(allowed)}"
        because = f": this version has no {reason}" if reason else ""
        raise ValueError(f"must be {rule}, got {show(value)}{because}")
    if isinstance(value, int | float) and not isinstance(value, bool) and value not in info.also:
        too_small = info.minimum is not None and value < info.minimum
        too_large = info.maximum is not None and value > info.maximum
        if too_small or too_large:
            raise ValueError(f"must be {info.range_text()}, got {show(value)}")


def _rule_problems(config: Any, path: str = "") -> Iterator[str]:
    """Yield what the sections say about themselves, children first."""
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if dataclasses.is_dataclass(value):
            yield from _rule_problems(value, _join(path, entry.name))
    if hasattr(config, "problems"):
        yield from config.problems(path)


def _named_files(arguments: Sequence[str]) -> list[Path]:
    names = [argument.removeprefix("config=") for argument in arguments if argument.startswith("config=")]
    return [Path(os.path.abspath(os.path.expanduser(name))) for name in names]


def _read_file(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file; without it nothing else of the config can be judged."""
    try:
        return read_config_file(path)
    except ValueError as error:
        raise ConfigError([f"`config`: {error}"]) from error


def _read_value(cls: type, key: str, text: str) -> Any:
    """Return the value of an argument; plain text for a text option (`001`, `a: b`) stays as it is."""
    hint = next((entry.hint for entry in list_options(cls) if entry.key == key), Any)
    members = members_of(hint)
    if text in NULL_WORDS and (type(None) in members or (hint is Any and text)):
        return None
    is_text_option = any(member is str for member in members)
    takes_more = any(get_origin(member) for member in members) or hint is Any
    if (
        is_text_option
        and not (takes_more and text.startswith(("[", "{")))
        and not text.startswith(("'", '"'))
    ):
        return text
    return read_argument(text)


def _merged(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Return both mappings as one; where both have a value, `upper` wins, and mappings are merged inside."""
    result = dict(lower)
    for key, value in upper.items():
        both_mappings = isinstance(value, dict) and isinstance(lower.get(key), dict)
        result[key] = _merged(lower[key], value) if both_mappings else value
    return result


def _nest(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def _fields(cls: type) -> list[tuple[dataclasses.Field, Any]]:
    hints = get_type_hints(cls)
    return [(entry, hints[entry.name]) for entry in dataclasses.fields(cls) if entry.init]


def _default(entry: dataclasses.Field) -> Any:
    if entry.default is not dataclasses.MISSING:
        return entry.default
    assert entry.default_factory is not dataclasses.MISSING, "option() gives every field a default"
    return entry.default_factory()


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _similarity(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()
