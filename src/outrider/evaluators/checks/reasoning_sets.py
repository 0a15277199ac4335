"""Lists the data sets of reasoning-gym that cannot be used, and checks texts that scorers evaluate as Python code.

Such a text must be a plain literal, sum or formula. The module is pure. Invariant: a text that passes can call only
FUNCTIONS, and cannot read an attribute or hide code in a string. The evaluation of such a text may still take forever.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from outrider.errors import InvalidField

NO_GOLD = "its entries have no answer of their own to check the scorer with"
UNUSABLE = {
    "boxnet": NO_GOLD,
    "codeio": "the same seed gives another entry each time",
    "coin_flip": "its scorer pays in full for the first digit of the answer",
    "composite": "it is made of other data sets: name those",
    "game_of_life_halting": "its scorer pays in full for any answer",
    "graph_color": NO_GOLD,
    "prime_factorization": "its scorer fails on answers that are no numbers",
    "propositional_logic": NO_GOLD,
    "puzzle24": "its scorer pays in full for 24 made of other numbers",
    "rubiks_cube": NO_GOLD,
    "rush_hour": NO_GOLD,
}
"""The data sets of reasoning-gym 0.1.25 that are refused, with the reasons."""

LITERAL = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Name, ast.Load),
    *(ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator),
)
SUM = (ast.Expression, ast.Constant, ast.UnaryOp, ast.UAdd, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div)
SUM_SIGNS = re.compile(r"[0-9\s+*/()-]+", re.ASCII)
FORMULA = (*SUM, ast.Pow, ast.Name, ast.Load, ast.Call)
FORMULA_SIGNS = re.compile(r"[0-9A-Za-z\s.+*/()-]+", re.ASCII)
VARIABLE = re.compile(r"[A-Za-z]")
FUNCTIONS = frozenset(
    (
        *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs"),
    )
)
"""Functions that a formula may call. `Integral` is left out: the scorer differentiates the answer, so an answer that
just repeats the question's integral would count as right."""


def is_literal(text: str) -> bool:
    """Return True if `eval` can safely be called with the text: it consists only of constants, collections, names and
    operators. A text that is no Python expression is also safe, because `eval` runs nothing of it."""
    try:
        tree = _tree(text)
    except (SyntaxError, ValueError):
        return True  # `eval` would raise the same error and run nothing
    return all(isinstance(node, LITERAL) for node in ast.walk(tree))


def is_sum(text: str) -> bool:
    """Return True for a text that is safe for sympy's `parse_expr`: whole numbers with + - * / and brackets. Names are
    not allowed, because sympy's constants would let an answer make numbers that the task does not give. For example,
    log(E) is 1."""
    return SUM_SIGNS.fullmatch(text) is not None and _is_python_of(text, SUM)


def is_formula(text: str) -> bool:
    """Return True for a text that is safe for sympy's `parse_expr`: numbers, variables of one letter, pi, operators and
    FUNCTIONS. The text must be plain Python, because `parse_expr` rewrites any other notation before it evaluates the
    text."""
    return FORMULA_SIGNS.fullmatch(text) is not None and _is_python_of(text, FORMULA)


def _is_python_of(text: str, kinds: tuple[type[ast.AST], ...]) -> bool:
    try:
        nodes = list(ast.walk(_tree(text)))
    except (SyntaxError, ValueError):
        return False
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    called = {id(node.func) for node in calls}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    values = [name.id for name in names if id(name) not in called]
    return (
        all(isinstance(node, kinds) for node in nodes)
        and all(isinstance(call.func, ast.Name) and not call.keywords for call in calls)
        and all(name.id in FUNCTIONS for name in names if id(name) in called)
        and all(value == "pi" or VARIABLE.fullmatch(value) for value in values)
    )


def _tree(text: str) -> ast.AST:
    """Parse a text in the way `eval` does: spaces and tabs at the start are skipped."""
    return compile(text.lstrip(" \t"), "answer", "eval", ast.PyCF_ONLY_AST, dont_inherit=True)


EVALUATED: dict[str, Callable[[str], bool]] = {
    "string_insertion": is_literal,
    "spiral_matrix": is_literal,
    "binary_matrix": is_literal,
    "n_queens": is_literal,
    "simple_integration": is_formula,
    "intermediate_integration": is_formula,
    "polynomial_multiplication": is_formula,
    "countdown": is_sum,
}
"""Maps a data set to the function that tests an answer before the scorer evaluates it as Python. Scorers of other data
sets do not evaluate answers."""


def evaluated_in_entry(name: str, entry: dict[str, Any]) -> list[tuple[str, Callable[[str], bool]]]:
    """Return the texts in the entry that its scorer evaluates as Python. Each text is paired with the test that it must
    pass."""
    match name:
        case "number_sorting":
            return [(str(entry["answer"]), is_literal)]
        case "polynomial_multiplication":
            return [(str(entry["answer"]), is_formula)]
        case "simple_integration" | "intermediate_integration":
            return [(str(entry["metadata"].get("integrand")), is_formula)]
        case _:
            return []


def can_be_scored(name: str, entry: dict[str, Any]) -> bool:
    """Return True if every text that the scorer evaluates as Python is safe: those in the entry, and its own answer."""
    texts = [*evaluated_in_entry(name, entry)]
    if name in EVALUATED:
        texts.append((entry["answer"], EVALUATED[name]))
    return all(is_plain(text) for text, is_plain in texts)


def check_data_set(name: str, *, field: str) -> None:
    """Raise InvalidField if the data set is one of UNUSABLE."""
    if name in UNUSABLE:
        raise InvalidField(f"the data set {name!r} cannot be used: {UNUSABLE[name]}", field=field)
