# SPDX-License-Identifier: Apache-2.0
"""Config trees: frozen dataclasses of fields declared with `option(...)`, loaded from YAML and arguments.

One declaration gives the default, the check, the help text and the line in the example YAML. To add an
option, add one field. A rule between options goes into the method `problems(path)` of the lowest dataclass
that sees them all: it yields a sentence per broken rule; `path` is the key of the section. What a user
should know about a valid config comes from `notes(path)` likewise. The top dataclass may have tables
`REFUSED` and `INERT`, by name or dotted key: options that accept only their default, and options without
effect; and `RENAMED`: another program's keys, for errors. An option of type `dict[str, Section]` holds
sections that the user names.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from verl.config.files.paths import extension_in_file, is_extension
from verl.config.hints.arguments import quoted, spelling, whole_arguments
from verl.config.hints.missing_paths import MissingPath
from verl.config.hints.renamed_keys import RenamedKeys
from verl.config.hints.unknown_keys import ANY_NAME, MAX_KEY, Suggestion, suggest
from verl.config.parsing import (
    convert,
    members_of,
    merged,
    nested,
    read_config_file,
    read_option,
    resolve_references,
    show,
)

C = TypeVar("C")
is_section: Callable[[Any], bool] = dataclasses.is_dataclass  # of a field's type; others are options
QUOTED_OPTION = re.compile(r"`([\w.]+)")
SECTION_NAME = re.compile(r"[A-Za-z_][\w-]*")  # that a user gives a section
MAX_SUGGESTIONS = 10  # each takes tens of milliseconds; more unknown keys belong to another program


class ConfigError(ValueError):
    """All problems of a config at once; `problems` holds them one by one."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  - ".join([f"{count} in the configuration:", *self.problems]))


@dataclasses.dataclass(frozen=True)
class OptionInfo:
    """Declaration of an option."""

    help: str  # one sentence with the unit and the meaning of special values
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    also: tuple[Any, ...] = ()  # values allowed outside the range, such as -1 for "never"
    resolve: Callable[[Any], Any] | None = None  # maps a value to what the program uses, or raises
    extension: str | None = None  # kind of extension, `file.py:NAME`, that it takes in addition to `choices`
    alias: str | None = None  # another name of the option, in the same section
    example: Any = None  # value in `examples/config.yaml` if it is not the default; a mapping for a section
    unavailable: str | None = None  # set from `REFUSED`
    inert: str | None = None  # set from `INERT`

    def range_text(self) -> str:
        """Return the range in words, such as "at least 1, or -1"; empty without a range."""
        bounds = (("at least", self.minimum), ("at most", self.maximum))
        text = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
        return text + "".join(f", or {value}" for value in self.also)


class OptionEntry(NamedTuple):
    """An option or section of a config tree."""

    key: str
    hint: Any  # its type
    default: Any
    info: OptionInfo


def option(default: Any, help: str, **declared: Any) -> Any:
    """Declare an option, or a section, of a config dataclass with the fields of `OptionInfo`.

    A default that is a class or a function is called for each config.
    """
    metadata = {"option": OptionInfo(help, **declared)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def load_config(
    cls: type[C],
    arguments: Sequence[str] = (),
    *,
    defaults_for: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
) -> C:
    """Return the config that `arguments` describe.

    Later wins: the defaults, the YAML files named by `config=FILE`, the arguments `section.option=value`.
    `defaults_for` maps the values, still with their references, to further defaults by option.

    Raises:
        ConfigError: Names every unknown key, wrong value and broken rule.
    """
    problems: list[str] = []
    hints = {entry.key: entry.hint for entry in documented_options(cls) if not is_section(entry.hint)}
    declared = reduce(merged, (nested(entry.key, entry.default) for entry in list_options(cls)), {})
    layers: dict[str, Any] = {}
    names = {
        _join(entry.key.rpartition(".")[0], entry.info.alias): entry.key
        for entry in walk_options(cls)
        if entry.info.alias
    }
    for argument in arguments:
        if argument.startswith("config="):
            layers = merged(layers, _without_aliases(_read_file(argument.removeprefix("config=")), names))
    for argument, is_divided in whole_arguments(arguments):
        if is_divided:
            problems.append(f"the shell divides an argument at spaces: write {quoted(argument)}")
            continue
        key, equals, text = argument.partition("=")
        key = _without_alias(key, names)
        if not equals or "" in key.split("."):
            hint = f": pass a file as `config={argument}`" if argument.endswith((".yaml", ".yml")) else ""
            problems.append(f"an argument must look like `section.option=value`, got {show(argument)}{hint}")
        elif key != "config":
            try:
                value = read_option(text, _hint_of(key, hints))
                if value == {} and key in hints:
                    layers = merged(layers, nested(key, None))  # mappings are merged, an empty one clears
                layers = merged(layers, nested(key, value))
            except ValueError as error:
                problems.append(f"`{key}` cannot be read from {show(text)}: {error}")
    try:
        if defaults_for is not None:
            further = defaults_for(merged(declared, layers))
            declared = reduce(merged, (nested(key, value) for key, value in further.items()), declared)
        values = resolve_references(merged(declared, layers))
    except ValueError as error:
        raise ConfigError([*problems, str(error)]) from error
    return _Builder(cls, problems).build(values)


def check_config(config: Any) -> None:
    """Raise a ConfigError with every wrong value and broken rule of a config that was built in Python."""
    _Builder(type(config)).build(dataclasses.asdict(config))


def walk_options(
    cls: type, path: str = "", examples: Mapping[str, Any] | None = None, top: type | None = None
) -> Iterator[OptionEntry]:
    """Yield the options of a config class in order, sections after them, each followed by its options."""
    limits = [getattr(top or cls, name, {}) for name in ("REFUSED", "INERT")]
    # A class that inherits sections declares its own options after them.
    for entry, hint in sorted(_fields(cls), key=lambda field: is_section(field[1])):
        info: OptionInfo = entry.metadata["option"]
        key = _join(path, entry.name)
        refused, inert = (table.get(key) or table.get(entry.name) for table in limits)
        example = (examples or {}).get(entry.name, info.example)
        info = dataclasses.replace(info, example=example, unavailable=refused, inert=inert)
        make = entry.default_factory
        yield OptionEntry(key, hint, entry.default if make is dataclasses.MISSING else make(), info)
        if is_section(hint):
            yield from walk_options(hint, key, example, top or cls)


def list_options(cls: type) -> list[OptionEntry]:
    """Return every option of a config class in order, without the sections."""
    return [entry for entry in walk_options(cls) if not is_section(entry.hint)]


def documented_options(cls: type) -> list[OptionEntry]:
    """Return every option and section in order, and after each option that holds named sections theirs."""
    documented = []
    for entry in walk_options(cls):
        documented.append(entry)
        kind = named_section(entry.hint)
        if kind is not None:
            path = _join(entry.key, ANY_NAME)
            documented.append(OptionEntry(path, kind, kind, entry.info))
            documented += walk_options(kind, path, top=cls)
    return documented


def named_section(hint: Any) -> type | None:
    """Return the class of the sections that an option holds by name, or None for any other option."""
    arguments = get_args(hint)
    return arguments[1] if get_origin(hint) is dict and is_section(arguments[1]) else None


def plain(value: Any) -> Any:
    """Return the value of an option with its named sections as mappings."""
    if not isinstance(value, dict):
        return value
    return {name: dataclasses.asdict(item) if is_section(item) else item for name, item in value.items()}


def config_notes(config: Any) -> list[str]:
    """Return a sentence for each option that was set and has no effect."""
    inert = [
        f"`{entry.key}` has no effect: {entry.info.inert}"
        for entry in list_options(type(config))
        if entry.info.inert and value_at(config, entry.key) != entry.default
    ]
    return [*inert, *_from_sections(config, "notes")]


def value_at(config: Any, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


class _Builder:
    """Build a config tree from nested mappings, collecting every problem."""

    def __init__(self, cls: type, problems: Sequence[str] = ()) -> None:
        self.cls = cls
        self.options = {entry.key: entry for entry in documented_options(cls)}
        self.problems = list(problems)
        self.renamed: RenamedKeys | None = getattr(cls, "RENAMED", None)
        self.found: list[tuple[str, str]] = []  # unknown keys with their entries in `renamed`
        self.broken: set[str] = set()  # options with a problem; rules about them are not checked

    def build(self, values: Any) -> Any:
        config = self._section(self.cls, values, "")
        if self.renamed is not None:
            self.problems[:0] = self.renamed.problems(self.found)
        for problem in _from_sections(config, "problems"):
            if not self.broken.intersection(QUOTED_OPTION.findall(problem)):
                self.problems.append(problem)
        if self.problems:
            raise ConfigError(self.problems)
        return config

    def _section(self, cls: type, values: Any, path: str) -> Any:
        if not isinstance(values, dict):
            self._complain(path, f"`{path}` is a section and must be a mapping, got {show(values)}")
            values = {}
        hints = {entry.name: hint for entry, hint in _fields(cls)}
        for name in values:
            if name not in hints:
                self._complain_unknown(_join(path, str(name)), values[name])
        built = {}
        for name, hint in hints.items():
            key = _join(path, name)
            if is_section(hint):
                built[name] = self._section(hint, values.get(name, {}), key)
            elif name in values:
                built[name] = self._option(self.options[key], values[name])
        return cls(**built)

    def _option(self, entry: OptionEntry, value: Any) -> Any:
        kind = named_section(entry.hint)
        try:
            value = convert(value, entry.hint)
            if kind is not None:
                return {name: self._named(kind, name, item, entry.key) for name, item in value.items()}
            _check_value(value, entry)
            return _resolved(value, entry.info)
        except (ValueError, OSError) as error:  # OSError: a path may be too long for the system to look up
            keys = {_join(entry.key, str(name)) for name in value} if isinstance(value, dict) else set()
            if self.renamed and keys & self.renamed.keys.keys():  # a section of another program
                self._complain_unknown(entry.key, value)
                return entry.default
            separator = " " if str(error).startswith("must") else ": "
            hint = spelling(entry.key, members_of(entry.hint), value)
            text = MissingPath if isinstance(error, FileNotFoundError) else str
            self._complain(entry.key, text(f"`{entry.key}`{separator}{error}{hint}"))
            return entry.default

    def _named(self, kind: type, name: Any, values: Any, path: str) -> Any:
        key = _join(path, str(name))
        if SECTION_NAME.fullmatch(str(name)) is None:
            self._complain(key, f"`{path}`: a name is a letter, then letters, digits, -, _, got {show(name)}")
        self.options |= {entry.key: entry for entry in walk_options(kind, key, top=self.cls)}
        return self._section(kind, values, key)

    def _complain(self, key: str, problem: str) -> None:
        self.broken.add(key)
        self.problems.append(problem)

    def _complain_unknown(self, key: str, value: Any) -> None:
        found = self.renamed and self.renamed.find(key)
        if self.renamed and found:
            self.found.append((key, found))
            self.broken.add(self.renamed.keys[found].option or key)
        elif isinstance(value, dict) and value:
            for name, item in value.items():
                self._complain_unknown(_join(key, str(name)), item)
        else:
            found = self._suggestion(key)
            self.broken.add((found and found.option) or key)
            section = key.rpartition(".")[0]
            is_known = section in self.options and is_section(self.options[section].hint)
            listed = f" {section}" if is_known else ""
            remedy = found.text if found else f"`--help{listed}` lists the options"
            self._complain(key, f"`{key[:MAX_KEY]}` is not an option; {remedy}")

    def _suggestion(self, key: str) -> Suggestion | None:
        if len(self.problems) >= MAX_SUGGESTIONS:
            return None
        usable = [
            entry.key
            for entry in self.options.values()
            if not is_section(entry.hint) and not entry.info.unavailable and not entry.info.inert
        ]
        return suggest(key, usable)


def _resolved(value: Any, info: OptionInfo) -> Any:
    if value is None:
        return None
    if info.extension is not None:
        if isinstance(value, tuple):
            return tuple(extension_in_file(item) if is_extension(item) else item for item in value)
        if is_extension(value) or not info.choices:
            return extension_in_file(value)
    return info.resolve(value) if info.resolve else value


def _check_value(value: Any, entry: OptionEntry) -> None:
    info = entry.info
    if value is None:
        return
    items, verb = (value, "hold only") if isinstance(value, tuple | list) else ([value], "be one of")
    own = ", or be `FILE.py:NAME`" if info.extension else ""
    for item in items:
        if info.choices and item not in info.choices and not (info.extension and is_extension(item)):
            raise ValueError(f"must {verb} {list(info.choices)}{own}, got {show(item)}")
    if info.unavailable and value != entry.default:
        default = show(entry.default)
        raise ValueError(f"must be {default}, got {show(value)}: this version has no {info.unavailable}")
    if isinstance(value, int | float) and value not in info.also:
        is_low = info.minimum is not None and value < info.minimum
        if is_low or (info.maximum is not None and value > info.maximum):
            raise ValueError(f"must be {info.range_text()}, got {show(value)}")


def _from_sections(config: Any, method: str, path: str = "") -> Iterator[str]:
    """Yield what a method of each section yields, the inner sections first."""
    for entry, hint in _fields(type(config)):
        key, value = _join(path, entry.name), getattr(config, entry.name)
        if is_section(hint):
            yield from _from_sections(value, method, key)
        elif named_section(hint) is not None:
            for name, section in value.items():
                yield from _from_sections(section, method, _join(key, name))
    if hasattr(config, method):
        yield from getattr(config, method)(path)


def _hint_of(key: str, hints: Mapping[str, Any]) -> Any:
    """Return the type of an option, also of one in a section that the user named."""
    for holder, hint in hints.items():
        if named_section(hint) is not None and key.startswith(f"{holder}."):
            key = f"{holder}.{ANY_NAME}.{key.removeprefix(f'{holder}.').partition('.')[2]}"
    return hints.get(key, Any)


def _read_file(name: str) -> dict[str, Any]:
    try:
        return read_config_file(Path(os.path.abspath(os.path.expanduser(name))))
    except ValueError as error:
        raise ConfigError([f"`config`: {error}"]) from error


def _without_aliases(values: dict[str, Any], names: Mapping[str, str], path: str = "") -> dict[str, Any]:
    """Return the sections of a file with each alias replaced by the option's name."""
    result = {}
    for name, value in values.items():
        key = names.get(written := _join(path, str(name)), written)
        name = key.rpartition(".")[2] if key != written else name
        result[name] = _without_aliases(value, names, key) if isinstance(value, dict) else value
    return result


def _without_alias(key: str, names: Mapping[str, str]) -> str:
    """Replace the aliases of an option and of its section in a dotted key."""
    section, _, name = key.rpartition(".")
    key = _join(_without_alias(section, names), name) if section else key
    return names.get(key, key)


@cache
def _fields(cls: type) -> list[tuple[dataclasses.Field, Any]]:
    hints = get_type_hints(cls)
    return [(entry, hints[entry.name]) for entry in dataclasses.fields(cls) if entry.init]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
