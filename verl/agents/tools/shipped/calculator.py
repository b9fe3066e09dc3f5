# SPDX-License-Identifier: Apache-2.0
"""A calculator: arithmetic with exact integers, and the functions of `math`.

An expression is parsed and walked, never run as Python.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from verl.agents.interface import CallRefusedError

MAX_CHARACTERS = 1000
MAX_BITS = 1 << 14  # of an integer: about 5000 digits
MAX_DIGITS = 400  # that are rounded; no number is longer after its point
SIGNS = str.maketrans({"^": "**", "\u00d7": "*", "\u00f7": "/", "\u2212": "-"})  # that people write
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
NAMES = {"pi": math.pi, "e": math.e, "tau": math.tau, "inf": math.inf}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "floor", "ceil")},
    **{name: getattr(math, name) for name in ("sin", "cos", "tan", "asin", "acos", "atan", "atan2")},
    **{name: getattr(math, name) for name in ("sinh", "cosh", "tanh", "degrees", "radians", "hypot", "gcd")},
    "abs": abs,
    "round": lambda number, digits=0: round(number, max(-MAX_DIGITS, min(digits, MAX_DIGITS)) or None),
    "min": min,
    "max": max,
}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression, for example (17.5 - 3) * 2**10 / sqrt(2).

    Args:
        expression: Numbers, + - * / // % **, parentheses, pi, e, and functions such as sqrt, log, factorial.
    """
    text = expression.strip().translate(SIGNS)
    if len(text) > MAX_CHARACTERS:
        raise CallRefusedError(f"an expression has at most {MAX_CHARACTERS} characters")
    try:
        return _shown(_value(ast.parse(text, mode="eval").body))
    except SyntaxError as error:
        raise CallRefusedError(f"not an arithmetic expression: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise CallRefusedError("not an arithmetic expression: it is nested too deeply") from None
    except (ValueError, ArithmeticError, TypeError) as error:
        raise CallRefusedError(f"not computed: {error}") from None


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in NAMES:
        return NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_value(node.left), _value(node.right))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return _bounded(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        arguments = [_value(argument) for argument in node.args]
        if node.func.id == "factorial":
            return _factorial(*arguments)
        if node.func.id in FUNCTIONS:
            return _bounded(FUNCTIONS[node.func.id](*arguments))
    known = ", ".join([*NAMES, "factorial", *FUNCTIONS])
    raise ValueError(f"{ast.unparse(node)[:100]!r} is not arithmetic; known are {known}")


def _power(base: Any, exponent: Any) -> Any:
    is_whole = isinstance(base, int) and isinstance(exponent, int)
    if is_whole and exponent > 0 and base.bit_length() * exponent > MAX_BITS and abs(base) > 1:
        raise ValueError("the number is too large")
    power = base**exponent
    if isinstance(power, complex):
        raise ValueError("the power of a negative number is not real")
    return power


def _factorial(number: Any) -> int:
    if not isinstance(number, int) or number * number.bit_length() > MAX_BITS:
        raise ValueError("factorial takes a small whole number")
    return math.factorial(number)


def _bounded(number: Any) -> Any:
    if isinstance(number, int) and number.bit_length() > MAX_BITS:
        raise ValueError("the number is too large")
    return number


def _shown(number: Any) -> str:
    if isinstance(number, float) and number.is_integer() and abs(number) < 1e15:
        return str(int(number))
    return format(number, ".12g") if isinstance(number, float) else str(number)
