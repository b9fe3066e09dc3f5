# SPDX-License-Identifier: Apache-2.0
"""YAML and command-line text to values, values to the types that options declare, and values back to YAML.

Types an option may have: `bool`, `int`, `float`, `str`, `list[...]`, `tuple[...]`, `dict[str, Any]`, `Any`,
and unions of them with `None` and with words (`Literal["auto"]`). No input crashes the process or fills the
memory: reading either succeeds or raises a ValueError.
"""

import io
import json
import math
import os
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.hints.missing_paths import missing
from verl.config.hints.yaml_errors import explain

NULL_WORDS = ("null", "None", "~", "")
YAML_WORDS = {"null", "none", "true", "false", "yes", "no", "on", "off", "y", "n", ".inf", ".nan"}
PLAIN_YAML_TEXT = re.compile(r"([A-Za-z_/]|\.(?=[A-Za-z./]))[\w./@\-]*(:[\w./@\-]+)*")
REFERENCE = re.compile(r"\$\{(\.*)([^${}:]+)\}")  # leading dots count the levels up, as in relative imports
REFERENCE_START = re.compile(r"(\\*)\$\{")
MAX_SHOWN = 200  # characters of a value in an error message
MAX_DEPTH = 32  # levels of nesting; the deepest option has five
MAX_BYTES = 1 << 20  # of a file; one with every option and its help has about 60,000
MAX_BITS = 1024  # of an integer; Python refuses to print much larger ones
# Raised by the constructors of PyYAML and OmegaConf for words such as `0b_`, `!!int x` or `!!bool x`.
UNREADABLE = (
    yaml.YAMLError, OmegaConfBaseException, ArithmeticError, AttributeError, LookupError, OSError, TypeError,
    ValueError,
)  # fmt: skip


class YamlTextError(ValueError):
    """Text that is not YAML."""

    def __init__(self, error: yaml.YAMLError, text: str) -> None:
        self.line, self.problem = explain(error, text)
        super().__init__(f"line {self.line}: {self.problem}" if self.line else self.problem)


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the sections of a YAML file; references such as `${a.b}` stay unresolved."""
    if not os.path.isfile(path):  # unlike `Path.is_file`, false for a name that is too long
        raise ValueError(str(missing("file", path)))
    if path.suffix == ".toml":
        raise ValueError(
            f"{path} is TOML; a config is YAML: write `[a.b]` as `a:` and, indented, `b:`, `x = 1` as `x: 1`"
        )
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes; a config file has at most {MAX_BYTES}")
    try:
        content = _parse(path.read_text(encoding="utf-8"), lambda text: OmegaConf.load(io.StringIO(text)))
    except YamlTextError as error:
        raise ValueError(f"{path}, {error}" if error.line else f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not valid YAML: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold sections such as `data:` at the top level, got a list")
    return {str(key): value for key, value in content.items()}


def read_option(text: str, hint: Any) -> Any:
    """Return the value of an option of type `hint` on the command line."""
    members = members_of(hint)
    if text in ("null", "~") or (text in NULL_WORDS and (type(None) in members or (hint is Any and text))):
        return None  # which an option that cannot be null refuses, as it does in a file
    # Plain text for a text option (`001`, `a: b`) stays as it is, unless it is written as YAML.
    takes_containers = hint is Any or any(get_origin(member) for member in members)
    if str in members and not text.startswith(("'", '"', "[", "{") if takes_containers else ("'", '"')):
        return text
    try:
        return _parse(text, lambda text: OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except YamlTextError as error:
        raise ValueError(error.problem) from error  # it has one line


def resolve_references(values: dict[str, Any]) -> dict[str, Any]:
    """Replace `${a.b}` and `${oc.env:NAME}` by the values; a ValueError names a dangling or circular one."""
    try:
        _check_growth(values)
        resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
        _check_values(resolved)
    except OmegaConfBaseException as error:
        variable = next((name for _, name in REFERENCE.findall(str(values)) if name in os.environ), None)
        hint = f"; write `${{oc.env:{variable}}}` for the environment variable" if variable else ""
        raise ValueError(f"`{error.full_key or ''}`: {_one_line(error)}{hint}") from error
    except RecursionError as error:
        raise ValueError("the chain of `${...}` references is too long to follow") from error
    assert isinstance(resolved, dict), "a mapping resolves to a mapping"
    return {str(key): value for key, value in resolved.items()}


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return nested mappings with one value, under a dotted key."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def merged(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Return nested mappings with the values of `upper` where both have one."""
    result = dict(lower)
    for key, value in upper.items():
        both_mappings = isinstance(value, dict) and isinstance(lower.get(key), dict)
        result[key] = merged(lower[key], value) if both_mappings else value
    return result


def _parse(text: str, parse: Callable[[str], Any]) -> Any:
    try:
        _check_depth(text)
        values = OmegaConf.to_container(parse(text), resolve=False)
        _check_values(values)
    except yaml.YAMLError as error:
        raise YamlTextError(error, text) from error
    except UNREADABLE as error:
        raise ValueError(_one_line(error)) from error
    return values


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    # The message of these is only the offending value.
    return f"{type(error).__name__} {text}" if isinstance(error, LookupError | AttributeError) else text


def _check_depth(text: str) -> None:
    # libyaml builds values by recursion in C, which crashes the process at a depth of about ten thousand.
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1
            raise ValueError(f"line {line}: mappings and lists are nested more than {MAX_DEPTH} deep")


def _check_values(value: Any, key: str = "") -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            _check_values(name, key)
            _check_values(item, f"{key}.{name}" if key else f"{name}")
    elif isinstance(value, list | tuple):
        for item in value:
            _check_values(item, key)
    elif isinstance(value, str) and value.encode(errors="ignore").decode() != value:
        raise ValueError(f"`{key}` must be text that can be written as UTF-8, got {value!r:.80}")
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"`{key}` must have at most {MAX_BITS} bits, got {value.bit_length()}")
    elif not isinstance(value, int | float | str | None):
        raise ValueError(f"`{key}` must be a number, text, list or mapping, got {type(value).__name__}")


def _check_growth(values: dict[str, Any]) -> None:
    # `a: ${b}${b}`, `b: ${c}${c}`, ... doubles with each line, so the size is computed before resolving.
    sizes: dict[tuple[str, ...], int] = {}

    def size(key: tuple[str, ...], value: Any) -> int:
        if key in sizes:
            return sizes[key]
        sizes[key] = total = 1  # the size of a circular reference, which OmegaConf rejects
        if isinstance(value, str):
            total = len(value)
            for dots, name in REFERENCE.findall(value):
                base = key[: len(key) - len(dots)] if dots else ()
                target = (*base, *name.replace("[", ".").replace("]", "").split("."))
                total += size(target, _at(values, target))
        for name, child in _children(value).items():
            total += size((*key, name), child)
        if total > MAX_BYTES:
            raise ValueError(f"`{'.'.join(key)}` refers to more than {MAX_BYTES} characters or values")
        sizes[key] = total
        return total

    size((), values)


def _children(value: Any) -> dict[str, Any]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {str(name): child for name, child in pairs}


def _at(value: Any, key: tuple[str, ...]) -> Any:
    for name in key:
        value = _children(value).get(name)
    return value


def convert(value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint`, or raise a ValueError that starts with "must be"."""
    members = members_of(hint)
    # As on the command line, an empty text is null where null is allowed: as a path it would be this folder.
    is_word = isinstance(value, str) and value in NULL_WORDS and str not in members
    if value is None and str in members and any(map(get_origin, members)) and type(None) not in members:
        return ""  # no files
    is_null = value is None or is_word or (value == "" and type(None) in members)
    if is_null and (type(None) in members or hint is Any):
        return None
    # `str` accepts any scalar, so the stricter members of a union are tried first.
    for member in sorted(members, key=lambda kind: kind is str):
        if not is_null and member is not type(None):
            try:
                return _convert_one(value, member)
            except (ValueError, OverflowError):  # OverflowError: an integer beyond the range of a float
                continue
    raise ValueError(f"must be {describe(hint)}, got {show(value)}")


def _convert_one(value: Any, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin in (list, tuple):
        return _convert_items(value, origin, get_args(hint))
    if hint in (int, float):
        return _as_number(value, hint)
    if hint is bool and (value in (0, 1) or str(value).lower() in ("true", "false")):
        return value == 1 or str(value).lower() == "true"
    if hint is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    is_literal = origin is Literal and value in get_args(hint)
    if hint is Any or is_literal or (origin is dict and isinstance(value, dict)):
        return value
    raise ValueError


def _convert_items(value: Any, origin: type, arguments: tuple[Any, ...]) -> Any:
    is_open = origin is list or Ellipsis in arguments
    if isinstance(value, str) and Ellipsis in arguments:
        value = [value]  # `trainer.logger=console` is a list of one
    if not isinstance(value, list | tuple) or not (is_open or len(value) == len(arguments)):
        raise ValueError
    kinds = [arguments[0]] * len(value) if is_open else arguments
    return origin(_convert_one(item, kind) for item, kind in zip(value, kinds, strict=True))


def _as_number(value: Any, kind: type) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    number = float(value)
    if not math.isfinite(number) or (kind is int and not number.is_integer()):
        raise ValueError
    return number if kind is float else int(value if isinstance(value, int) else number)


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def describe(hint: Any) -> str:
    """Return the type in words: "an integer or null"."""
    return " or ".join(_describe_one(member) for member in members_of(hint))


def _describe_one(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)} items, each {describe(arguments[0])}"
    if origin in (list, tuple):
        return f"a list, each item {describe(arguments[0])}"
    if origin is Literal:
        return " or ".join(arguments)
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "null"}
    return "a mapping" if origin is dict else names.get(hint, "any value")


def show(value: Any) -> str:
    """Return a value as error messages quote it, shortened if it is long."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def yaml_text(value: Any) -> str:
    """Return a value as YAML on one line; reading it back gives the same value."""
    if isinstance(value, float):
        return _yaml_float(value)
    if isinstance(value, str):
        is_plain = PLAIN_YAML_TEXT.fullmatch(value) and value.lower() not in YAML_WORDS
        return value if is_plain else _quoted(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{yaml_text(key)}: {yaml_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(yaml_text(item) for item in value) + "]"
    return json.dumps(value)


def _quoted(text: str) -> str:
    # Unlike JSON, YAML has a single escape for a character beyond the first 65,536.
    literal = REFERENCE_START.sub(lambda match: 2 * match[1] + "\\${", text)
    escaped = (json.dumps(char)[1:-1] if char < "\x7f" else f"\\U{ord(char):08x}" for char in literal)
    return '"' + "".join(escaped) + '"'


def _yaml_float(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    mantissa, _, exponent = repr(value).partition("e")
    if not exponent:
        return mantissa
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent)}"
