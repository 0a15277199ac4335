"""Turns the text of an answer into a value: a quantity, a list, a point, a region of real numbers, an equation, a
matrix.

math-verify's parser reads expressions. This module reads what surrounds them: units, bases, brackets, relations and
words. Invariant: no part of a text is ignored. A text that is not fully understood becomes `Words`, which equal only
the same words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from typing import TypeGuard

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from sympy import Expr, Set, Symbol

from outrider.evaluators.checks.math_text import MULTIPLES, alternatives, clean, closing, split
from outrider.evaluators.checks.math_units import OTHERS, Unit, read_unit


class Unreadable(Exception):
    """The text cannot be read as an expression."""


@dataclass(frozen=True)
class Words:
    text: str


@dataclass(frozen=True)
class Quantity:
    """A number or an expression.

    unit: the unit of measure.
    noun: the words for counted things: `apples` in `3 apples`.
    rounded: the rounded decimal after the number: `0.33` in `1/3 ≈ 0.33`."""

    value: Expr
    unit: Unit | None = None
    noun: frozenset[str] = frozenset()
    rounded: Expr | None = None


@dataclass(frozen=True)
class Based:
    """A number whose text names the base, such as `101_2`."""

    digits: str
    base: int


@dataclass(frozen=True)
class Clock:
    """A time of day. `minutes` counts from midnight. `half` is `a` (a.m.), `p` (p.m.), or None if unknown."""

    minutes: int
    half: str | None


@dataclass(frozen=True)
class Ratio:
    parts: tuple[Expr, ...]


@dataclass(frozen=True)
class Residue:
    r"""A residue class. In `x \equiv 3 \pmod 7`, `written` is 3, `modulus` is 7 and `name` is `x`."""

    written: Expr
    modulus: Expr
    name: str | None


@dataclass(frozen=True)
class Several:
    """Several values in any order: a list of answers or, if `braces` is true, a set."""

    items: tuple[Value, ...]
    braces: bool = False


@dataclass(frozen=True)
class Coordinates:
    """Values in a fixed order, such as a point. `bracket` is `(`, `[`, or `|` for a column vector."""

    items: tuple[Value, ...]
    bracket: str


@dataclass(frozen=True)
class Grid:
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class Region:
    """A set of real numbers. `name` is the variable in the text, if there is one."""

    points: Set
    name: str | None = None


@dataclass(frozen=True)
class Halfspace:
    """An inequality in several variables: `side` < 0 if `strict` is true, else `side` <= 0."""

    side: Expr
    strict: bool


@dataclass(frozen=True)
class Assigned:
    """A name and its value, such as `x = 3` or `f(x) = x^2`."""

    name: str
    value: Value
    sides: tuple[Expr, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class System:
    """Several variables and their values, such as `x = 1, y = 2`."""

    values: tuple[tuple[str, Value], ...]


@dataclass(frozen=True)
class Equation:
    """The equation `side` = 0, such as `x + y - 1` = 0."""

    side: Expr


Value = (
    Words | Quantity | Based | Clock | Ratio | Residue | Several | Coordinates | Grid | Region
    | Halfspace | Assigned | System | Equation
)  # fmt: skip
CUP, CAP, MINUS, SIGN = "\N{UNION}", "\N{INTERSECTION}", "\N{SET MINUS}", "\N{LESS-THAN EQUAL TO OR GREATER-THAN}"
"""Characters that replace LaTeX commands, so that a text can be split at them."""
MAX_PARTS = 64
MAX_DEPTH = 12
COUNTED = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NUMBERS = {word: number for number, word in enumerate(COUNTED)}
BASES = {**NUMBERS, "sixteen": 16}
ORDERED = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
ORDINALS = {word: number for number, word in enumerate(ORDERED, start=1)}
NOTHING = re.compile(
    r"none|empty set|no answer"
    r"|(?:(?:there (?:is|are)|(?:\w+ ){1,3}ha(?:s|ve)) )?no (?:real )?solutions?(?: exists?)?"
)
EVERYTHING = ("all real numbers", "all reals", "all real", "real numbers", "the set of real numbers", "any real number")
NOWHERE = ("dne", "does not exist", "doesnt exist", "undefined", "not defined")
NUMBER_SETS = {"N": "natural numbers", "Z": "integers", "Q": "rational numbers", "C": "complex numbers"}
SHORT_WORDS = ("yes", "no", "on", "odd", "even", "all", "any", "one", "two", "six", "ten", "not", "max", "min")
"""Short words that must not be read as products of variables (`no` as n times o)."""
NO_NOUN = frozenset((
    "and", "or", "not", "no", "nor", "is", "are", "was", "isnt", "wrong", "incorrect", "right", "correct",
    "hence", "so", "then", "than", "if", "but", "else", "between", "maybe", "to", "because", "since", "therefore",
    "thus", "from", "at", "for", "by", "with", "more", "less", "about", "any", "anything", "all", "none",
    "either", "never", "given", "mod", "base", "of", "out", "in", "only", "except", "instead", "unless", "until",
    "through", "versus", "below", "above", "under", "over", "plus", "minus", "point", "negative", "squared", "cubed",
    "factorial", "mistaken", "false", "true", "nope", "score", "half", "halve", "cent",
    *COUNTED, *ORDERED, *(f"{word}teen" for word in ("thir", "four", "fif", "six", "seven", "eigh", "nine")),
    *(f"{word}ty" for word in ("twen", "thir", "for", "fif", "six", "seven", "eigh", "nine")), *MULTIPLES,
    "eleventh", "twelfth", "twentieth", "hundredth", "thousandth", "millionth",
))  # fmt: skip
"""Words that cannot be part of the `noun` of a Quantity."""
EACH = frozenset(("per", "each", "every"))
FUNCTIONS = r"sqrt|arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|ln|log|exp|pi|infinity|infty|theta|alpha|beta|phi"
RELATION = re.compile(r"\\(?:le|ge|ne|in|approx|equiv|sim|simeq)(?![a-zA-Z])|[=<>]")
BASED = re.compile(r'\(?"?([0-9A-Za-z]+)"?\)?\s*(?:_\s*\{?\s*"?\s*(\w+)\s*"?\s*\}?|"?\s*\bbase\s+(\w+)\s*"?)$')
CLOCK = re.compile(r'"?\s*(\d{1,2})\s*:\s*(\d{2})\s*"?\s*"?\s*([aApP])?\s*(?:\.?\s*[mM]\.?)?\s*"?$')
RESIDUE = re.compile(r'(.+?)(?:\\pmod|\\mod|\\bmod|\(\s*"?\s*\\?mod\b\s*"?|"?\s*\bmod\b\s*"?)\s*(.+?)$')
MONEY = re.compile(r'([-+]?)\s*"?\s*(\\\$|[€£¥₹])\s*"?\s*([-+]?[\d.].*)$', re.DOTALL)
NAME = re.compile(
    r"""(?: "[^"]{1,40}" | \\?[A-Za-z] | [A-Z]{2,4} | [A-Za-z][a-z]{3,20} | \|[A-Z]{2}\| | \\overline\s*\{[A-Z]+\}
          | \\vec\s*\{?\s*\w\s*\}?
          | \\(?:alpha|beta|gamma|delta|theta|phi|lambda|mu|omega|sigma|rho|tau|epsilon)
          | [a-z](?:\s*[+-]\s*[a-z]){1,4} | (?:m\s*)?\\(?:angle|triangle|measuredangle)\s*[A-Z]{1,3} )
        (?:_\s*(?:\w|\{\w{1,8}\}))? '* (?:\^\{?-1\}?)? \s* (?:\(\s*[\w,+\-\s]{1,20}\))? $""",
    re.VERBOSE,
)
"""Matches the left side of an assignment: a variable, a sum of variables, a function with its argument, a segment, an
angle, or words."""
COMPOUND = re.compile(r'(\d[\d.]*\s*"?\s*[a-zA-Z]{1,8}\s*"?)\s*(\d[\d.]*\s*"?\s*[a-zA-Z]{1,8}\s*"?)$')
"""Matches a quantity in two units, such as `6 hours 30 minutes`."""
RATIONAL = re.compile(
    r"([-+]?)\s*(?:(\d+)|(\d*)\.(\d+)|(\d+)\s*/\s*(\d+)|\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\})$"
)
UNREAD = ('"', "°", "%", "!!", "...", "\\ldots")
"""Signs that an expression cannot contain. They belong to words, units, omissions and double factorials."""
SPELLING = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
MEANING = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
ENVIRONMENT = re.compile(r"\\begin\s*\{(\w+)\*?\}\s*(?:\{[^{}]*\})?(.*)\\end\s*\{\1\*?\}$", re.DOTALL)
LEAD = re.compile(
    r'"[^"]*\b(?:answer|result|value)\b[^"]*\b(?:is|are)\s*:?\s*"|(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is:?|:) '
)
SCALED = re.compile(r"([^=<>]{1,80}?)\s*(?:\\cdot|\\times)?\s*(\\begin\s*\{[pb]?matrix\}.*)$", re.DOTALL)
OPERATORS = {"<": sympy.Lt, ">": sympy.Gt, "\\le": sympy.Le, "\\ge": sympy.Ge, "\\ne": sympy.Ne}


def read(text: str, *, merge: bool = True, letters: bool = False) -> Value:
    """Return the value of the text of an answer.

    merge: whether commas may group digits. If false, `100,200` is two numbers.
    letters: whether a letter directly after a number is a unit, as in `3m`."""
    text = clean(text)
    if not merge:
        text = re.sub(r"(?<=\d),(?=\d{3})", ", ", text)
    try:
        return _Reader(letters).whole(text, 0)
    except Exception:  # sympy can raise any exception, for example for deeply nested brackets
        return Words(text)


def expression(text: str) -> Expr:
    """Read the text as a number or an expression. Raises Unreadable."""
    if (number := rational(text)) is not None:
        return number
    return _parsed(text)


def rational(text: str) -> Expr | None:
    """Return the value of a plain number or fraction, or None for any other text."""
    found = RATIONAL.match(text.strip())
    if found is None or len(text) > 4000:
        return None
    sign, whole, before, after, above, below, top, bottom = found.groups()
    if whole is not None:
        value = sympy.Integer(whole)
    elif after is not None:
        value = sympy.Rational(int((before or "") + after), 10 ** len(after))
    else:
        under = int(below or bottom)
        if under == 0:
            return None
        value = sympy.Rational(int(above or top), under)
    return -value if sign == "-" else value


def _parsed(text: str) -> Expr:
    if any(sign in text for sign in UNREAD) or _sides(text)[1]:
        raise Unreadable(text)
    if re.search(rf"(?<![\\a-zA-Z])(?!{FUNCTIONS})[a-zA-Z]{{4,}}", text):
        raise Unreadable(text)  # a word is not a product of variables
    text = re.sub(r"\\log_\s*(\w)\s+", r"\\log_{\1} ", text)
    text = re.sub(rf"(?<![\\a-zA-Z])({FUNCTIONS})(?![a-zA-Z])", r"\\\1 ", text).replace("\\infinity", "\\infty")
    text = re.sub(r"\\(exp|sin|cos|tan|ln|log)\s+\(", r"\\\1(", text)
    text = re.sub(r"\\sqrt\s*\(", "\\\\sqrt(", text)
    while (at := text.find("\\sqrt(")) >= 0:
        end = closing(text, at + 5)
        if end < 0:
            raise Unreadable(text)
        text = f"{text[: at + 5]}{{{text[at + 6 : end]}}}{text[end + 1 :]}"
    text = re.sub(r"(\d*)\.(\d*)\s*\\(?:overline|bar|dot|overparen)\s*\{?(\d+)\}?", _repeating, text)
    text = re.sub(r"\^\s*(-?\d*\.\d+|-?\d{2,})", r"^{\1}", text)
    text = re.sub(r"(?<![\d.^_}a-zA-Z])(\d+)\s*\\frac\s*\{?\s*(\d+)\s*\}?\s*\{?\s*(\d+)\s*\}?(?![\d^])", _mixed, text)
    text = re.sub(r"(?<![\d.^_}a-zA-Z])(\d+) +(\d+)\s*/\s*(\d+)(?![\d.^a-zA-Z])", _mixed, text)
    if re.search(r"\d\s+[\d.]|\d\.\d+\.", text) or split(text, ",;")[1:]:
        raise Unreadable(text)
    if (number := rational(re.sub(r"^\(([^()]*)\)$", r"\1", text.strip()))) is not None:
        return number  # a mixed number such as `1 1/2`
    text = re.sub(r"(?<!\d)(\d*)\.(\d+)", lambda d: f"\\frac{{{int((d[1] or '') + d[2])}}}{{{10 ** len(d[2])}}}", text)
    text = re.sub(r"(\d)\.(?!\d)", r"\1", text)
    try:
        found = latex2sympy(normalize_latex(text, SPELLING), normalization_config=None, conversion_config=MEANING)
    except Exception as error:  # the parser can raise any exception
        raise Unreadable(text) from error
    if not isinstance(found, Expr) or isinstance(found, sympy.MatrixBase):
        raise Unreadable(text)
    names = {
        symbol: sympy.I if symbol.name == "i" else Symbol(symbol.name, real=True) for symbol in found.atoms(Symbol)
    }
    found = found.xreplace(names)
    if not found.has(sympy.Integral, sympy.Derivative):
        found = found.doit()
    if not isinstance(found, Expr) or found.has(sympy.nan, sympy.zoo, sympy.Float):
        raise Unreadable(text)
    return found


def _repeating(found: re.Match[str]) -> str:
    whole, fixed, again = found.groups()
    below = 10 ** len(fixed) * (10 ** len(again) - 1)
    above = int((whole or "0") + fixed + again) - int((whole or "0") + fixed)
    return f"\\frac{{{above}}}{{{below}}}"


def _mixed(found: re.Match[str]) -> str:
    whole, above, below = found.groups()
    # Without braces, as in `\frac37`, each part is one digit.
    if found.re.pattern.find("frac") >= 0 and "{" not in found[0]:
        digits = above + below
        above, below, rest = digits[0], digits[1:2], digits[2:]
        if rest or not below:
            return found[0]
    if int(above) >= int(below):
        return found[0]
    return f"(\\frac{{{int(whole) * int(below) + int(above)}}}{{{below}}})"


def plain_words(text: str) -> str:
    """Return the text in a form in which words can be compared: lower case, without punctuation, quotes or a leading
    article."""
    text = re.sub(r"\\(?:text|mathrm)?\b|[\"'{}$\\.!?]", " ", text)
    text = re.sub(r"(\d)(?:st|nd|rd|th)\b", r"\1", " ".join(text.lower().split()))
    return re.sub(r"^(?:the|an|a) (?=\w)", "", text.replace(" ,", ","))


class _Reader:
    def __init__(self, letters: bool) -> None:
        self._letters = letters
        self._parts = 0

    def whole(self, text: str, depth: int) -> Value:
        """Read a whole answer, which may be a list of answers."""
        self._parts += 1
        if depth > MAX_DEPTH or self._parts > MAX_PARTS or not text:
            return Words(text)
        if (special := _special(text)) is not None:
            return special
        parts, joint = alternatives(text)
        if len(parts) == 1:
            return self.item(parts[0], depth)
        return self._joined([self.item(part, depth + 1) for part in self._repeat_name(parts)], joint, text)

    def _repeat_name(self, parts: list[str]) -> list[str]:
        """Repeat the name before each value of a list: `x = 1, 2` becomes `x = 1, x = 2`."""
        found = re.match(r"(.*?)=(?!.*=)", parts[0])
        if found and NAME.match(found[1].strip()) and not any(RELATION.search(part) for part in parts[1:]):
            return [parts[0], *(f"{found[1]}={part}" for part in parts[1:])]
        return parts

    def _joined(self, items: list[Value], joint: str, text: str) -> Value:
        if any(
            isinstance(item, Words) and not re.fullmatch(r"[\w' -]{1,60}", plain_words(item.text)) for item in items
        ):
            return Words(text)
        items = [inner for item in items for inner in (item.items if _bare(item) else (item,))]
        regions = [_as_region(item) for item in items]
        if all(region is not None for region in regions) and not all(isinstance(item, Coordinates) for item in items):
            points = [region.points for region in regions if region is not None]
            names = {region.name for region in regions if region is not None} - {None}
            if len(names) > 1:
                return Several(tuple(items))
            both = reduce(sympy.Intersection, points)
            either = reduce(sympy.Union, points)
            together = joint == "and" or (joint == "," and both is not sympy.S.EmptySet)
            return Region(both if together else either, next(iter(names), None))
        if all(isinstance(item, Coordinates) and _endless(item) for item in items):
            return Region(reduce(sympy.Union, [_as_region(item).points for item in items]))  # type: ignore[union-attr]
        named = [item for item in items if isinstance(item, Assigned)]
        if len(named) == len(items) and joint != "or" and len({item.name for item in named}) == len(named):
            return System(tuple(sorted(((item.name, item.value) for item in named), key=lambda pair: pair[0])))
        return Several(tuple(items))

    def item(self, text: str, depth: int) -> Value:
        """Read a single answer, or one item of a list or a set."""
        self._parts += 1
        text = text.strip()
        if depth > MAX_DEPTH or self._parts > MAX_PARTS or not text:
            return Words(text)
        while text.startswith("{") and closing(text, 0) == len(text) - 1:
            inner = text[1:-1].strip()
            if split(inner, ",;")[1:]:
                return self._set(inner, depth)
            text = inner
        if re.fullmatch(r'"\s*(?:\\\$)?[-+]?\d[^"]*"', text):
            text = text.strip('" ')
        if (special := _special(text)) is not None:
            return special
        if re.fullmatch(r"[A-Z][a-z]+|[a-z]{2,}", text) and (text[0].isupper() or text in SHORT_WORDS):
            return Words(text)
        for way in (
            self._based,
            self._clock,
            self._residue,
            self._combined,
            self._related,
            self._bracketed,
            self._grid,
        ):
            if (found := way(text, depth)) is not None:
                return found
        return self._quantity(text, depth)

    def _based(self, text: str, depth: int) -> Value | None:
        found = BASED.match(text)
        if found is None:
            return None
        named = found[2] or found[3]
        base = int(named) if named.isdigit() and len(named) < 3 else BASES.get(named.lower(), 0)
        digits = found[1].upper()
        if not 2 <= base <= 36 or not re.search(r"\d", digits) or (digits[0].isalpha() and len(digits) < 2):
            return None
        if not all(int(digit, 36) < base for digit in digits):
            return Words(text)
        return Based(digits.lstrip("0") or "0", base)

    def _clock(self, text: str, depth: int) -> Value | None:
        text = re.sub(r'(?<=\d)\s*"?\s*\bto\b\s*"?\s*(?=\d)', ":", text)
        if ":" not in text:
            return None
        found = CLOCK.match(text)
        if found and int(found[1]) < 24 and int(found[2]) < 60:
            hours, half = int(found[1]), found[3] and found[3].lower()
            if half:
                hours = hours % 12 + 12 * (half == "p")
            elif hours > 12 or found[1] == "00":
                half = "p" if hours >= 12 else "a"
            return Clock(60 * hours + int(found[2]), half)
        try:
            parts = tuple(expression(part) for part in split(text, ":"))
        except Unreadable:
            return None
        return Ratio(parts) if len(parts) > 1 else None

    def _residue(self, text: str, depth: int) -> Value | None:
        if "mod" not in text:
            return None
        found = RESIDUE.match(text)
        if found is None:
            return None
        name, _, value = found[1].rpartition("\\equiv")
        try:
            modulus = expression(found[2].strip(' "(){}'))
            return Residue(expression(value.strip().rstrip("(").strip()), modulus, name.strip() or None)
        except Unreadable:
            return None

    def _combined(self, text: str, depth: int) -> Value | None:
        """Read a union, an intersection or a difference of sets."""
        if not re.search(r"\\(?:cup|cap|setminus|backslash|bigcup)(?![a-zA-Z])", text) or RELATION.search(text):
            return None
        marked = re.sub(r"\\(?:big)?cup(?![a-zA-Z])", CUP, re.sub(r"\\(?:big)?cap(?![a-zA-Z])", CAP, text))
        marked = re.sub(r"\\(?:setminus|backslash)(?![a-zA-Z])", MINUS, marked)
        for sign, combine in ((CUP, sympy.Union), (MINUS, sympy.Complement), (CAP, sympy.Intersection)):
            parts = split(marked, sign)
            if len(parts) > 1:
                back = [part.replace(CAP, "\\cap ").replace(MINUS, "\\setminus ") for part in parts]
                regions = [_as_region(self.item(part, depth + 1)) for part in back]
                if any(region is None for region in regions):
                    return Words(text)
                return Region(reduce(combine, [region.points for region in regions if region is not None]))
        return None

    def _related(self, text: str, depth: int) -> Value | None:
        sides, signs = _sides(text)
        if not signs:
            return None
        if sides[0] == "" and signs == ["\\approx"]:
            return self.item(sides[1], depth + 1)
        if not all(sides):
            return Words(text)
        if all(sign in ("=", "\\approx", "\\simeq") for sign in signs):
            return self._equal(text, sides, signs, depth)
        if signs == ["\\in"]:
            inner = self.item(sides[1], depth + 1)
            name = _name(sides[0])
            if name is None or isinstance(inner, Words):
                return Words(text)
            if isinstance(inner, Several):
                return Several(tuple(Assigned(name, item) for item in inner.items))
            region = _as_region(inner)
            return Words(text) if region is None else Region(region.points, name)
        if all(sign in OPERATORS for sign in signs):
            return self._inequality(text, sides, signs)
        return Words(text)

    def _inequality(self, text: str, sides: list[str], signs: list[str]) -> Value:
        try:
            parts = [expression(side) for side in sides]
        except Unreadable:
            return Words(text)
        symbols = set[Symbol]().union(*(part.free_symbols for part in parts))
        if not all(part.is_extended_real is not False for part in parts) or not symbols:
            return Words(text)
        if len(symbols) == 1:
            [symbol] = symbols
            points: Set = sympy.S.Reals
            for (left, right), sign in zip(pairwise(parts), signs, strict=True):
                points = sympy.Intersection(points, _solved(left, right, sign, symbol))
            return Region(points, symbol.name)
        if len(signs) == 1 and signs[0] != "\\ne":
            side = parts[0] - parts[1] if signs[0] in ("<", "\\le") else parts[1] - parts[0]
            return Halfspace(side, signs[0] in "<>")
        return Words(text)

    def _equal(self, text: str, sides: list[str], signs: list[str], depth: int) -> Value:
        """Read a text with equal signs, such as `x = 1 + 2 = 3`. If the first side is a name, the text assigns a value
        to this name. If there are only two sides, the name may also be the second side."""
        name = _name(sides[0])
        if name is None and len(sides) == 2 and _name(sides[1]) is not None:
            sides.reverse()
            name = _name(sides[0])
        names = split(sides[0].strip()[1:-1], ",") if sides[0].strip().startswith("(") else []
        if len(names) > 1 and len(sides) == 2 and all(_name(part) for part in names):
            point = self.item(sides[1], depth + 1)
            if isinstance(point, Coordinates) and len(point.items) == len(names):
                pairs = zip((str(_name(part)) for part in names), point.items, strict=True)
                return System(tuple(sorted(pairs, key=lambda pair: pair[0])))
            return Words(text)
        values = sides if name is None else sides[1:]
        if name is not None and len(values) == 1:
            inner = self.item(values[0], depth + 1)
            if isinstance(inner, Quantity) and any(symbol.name == name for symbol in inner.value.free_symbols):
                return Equation(Symbol(name, real=True) - inner.value)
            return inner if isinstance(inner, Words) else Assigned(name, inner, tuple(_expressions(sides)))
        read = [self._quantity(value, depth + 1) for value in values]
        numbers = [one for one in read if isinstance(one, Quantity)]
        if len(numbers) < len(read):
            return Words(text)
        if name is None and len(read) == 2 and any(one.value.free_symbols for one in numbers):
            if any(one.unit or one.noun for one in numbers) or "=" not in signs:
                return Words(text)
            return Equation(numbers[0].value - numbers[1].value)
        if name is None and any(one.value.free_symbols for one in numbers):
            return Words(text)
        value = _of_chain(numbers, signs[len(signs) - len(numbers) + 1 :])
        if value is None:
            return Words(text)
        return value if name is None else Assigned(name, value)

    def _bracketed(self, text: str, depth: int) -> Value | None:
        text = re.sub(r"(?<=[)\]])\s*\^\s*\{?\s*(?:T|\\top|\\intercal)\s*\}?$", "", text)
        if text.startswith("\\{") and text.endswith("\\}"):
            end = closing(text.replace("\\{", " {").replace("\\}", " }"), 1)
            return self._set(text[2:-2].strip(), depth) if end == len(text) - 1 else None
        if (point := re.match(r"[A-Z]'?\s*(?=\([^()]*,)", text)) is not None:
            text = text[point.end() :]
        if text.startswith("]") and text[-1] in "[]" and not text.count("[") + text.count("]") > 2:
            text = f"({text[1:-1]}{')' if text[-1] == '[' else ']'}"
        elif text.startswith("[") and text.endswith("[") and text.count("[") == 2:
            text = f"[{text[1:-1]})"
        if not text or text[0] not in "([" or closing(text, 0) != len(text) - 1:
            return None
        inner = text[1:-1].strip()
        parts = [part.strip() for part in split(inner, ",;")]
        if len(parts) == 1:
            if text[0] == "(" and text[-1] == ")":
                return self.item(inner, depth + 1)
            return self.item(inner, depth + 1) if inner.startswith("\\begin") else None
        items = tuple(self.item(part, depth + 1) for part in parts)
        if any(isinstance(item, Words) and not item.text for item in items):
            return Words(text)
        kind = text[0] + text[-1]
        if kind in ("()", "[]"):
            row = Coordinates(items, text[0])
            return _as_region(row) if _endless(row) else row
        region = _interval(items, kind)
        return region or Words(text)

    def _set(self, inner: str, depth: int) -> Value:
        if not inner:
            return Region(sympy.S.EmptySet)
        condition = re.match(r"([a-zA-Z])\s*(?:\\in\s*(?:\\mathbb\s*\{?R\}?|\\R)\s*)?(?:\\mid|\||:)(.*)$", inner)
        if condition is not None:
            found = self.whole(condition[2].strip(), depth + 1)
            if isinstance(found, Region) and found.name == condition[1]:
                return Region(found.points)
            if isinstance(found, Several) and all(isinstance(item, Assigned) for item in found.items):
                return Several(tuple(item.value for item in found.items if isinstance(item, Assigned)), braces=True)
            if isinstance(found, Assigned):
                return Several((found.value,), braces=True)
            return Words(inner)
        parts, _ = alternatives(inner)
        items: list[Value] = []
        for part in parts:
            item = self.item(part, depth + 1)
            items += item.items if _bare(item) else [item]
        return Several(tuple(items), braces=True)

    def _grid(self, text: str, depth: int) -> Value | None:
        found = ENVIRONMENT.match(text)
        if found is None and (scaled := SCALED.match(text)) is not None:
            return self._scaled(
                expression(scaled[1] + "1" * (scaled[1] == "-")), self._grid(scaled[2], depth + 1), text
            )
        if found is None:
            return Words(text) if text.startswith("\\begin") else None
        if found[1] not in ("pmatrix", "bmatrix", "matrix", "array", "smallmatrix"):
            return Words(text)
        lines = [line for line in re.split(r"\\\\(?:\[[^\]]*\])?", found[2].replace("\\hline", "")) if line.strip()]
        rows = tuple(tuple(self.item(cell, depth + 1) for cell in line.split("&")) for line in lines)
        if not rows or len({len(row) for row in rows}) != 1:
            return Words(text)
        return Coordinates(tuple(row[0] for row in rows), "|") if len(rows[0]) == 1 else Grid(rows)

    def _scaled(self, factor: Expr, value: Value | None, text: str) -> Value:
        """Multiply a vector or a matrix by a number."""

        def times(row: tuple[Value, ...]) -> tuple[Value, ...]:
            return tuple(replace(one, value=factor * one.value) if isinstance(one, Quantity) else one for one in row)

        match value:
            case Grid(rows=rows) if all(isinstance(one, Quantity) for row in rows for one in row):
                return Grid(tuple(map(times, rows)))
            case Coordinates(items=items) if all(isinstance(one, Quantity) for one in items):
                return replace(value, items=times(items))
        return Words(text)

    def _quantity(self, text: str, depth: int) -> Value:
        text = text.strip()
        if (number := rational(text)) is not None:
            return Quantity(number)
        if (words := _number_in_words(text)) is not None:
            return Quantity(words)
        if (lead := LEAD.match(text)) is not None:
            return self.item(text[lead.end() :], depth + 1)
        if (money := MONEY.match(text)) is not None:
            inner = self._quantity(f"{money[1]}{money[3]}".replace("+-", "-"), depth + 1)
            unit = OTHERS_BY_SIGN[money[2]]
            if isinstance(inner, Quantity) and inner.unit in (None, unit) and (not inner.noun or inner.noun & EACH):
                return Quantity(inner.value, unit)
            return Words(text)
        if "\\pm" in text:
            return self._plus_minus(text, depth)
        if (vector := _basis_vector(text)) is not None:
            return Coordinates(tuple(Quantity(part) for part in vector), "(")
        if (compound := COMPOUND.match(text)) is not None:
            parts = [self._quantity(part, depth + 1) for part in compound.groups()]
            if (total := _total(parts)) is not None:
                return total
        for head, tail in _tails(text):
            found = self._with_unit(head, tail)
            if found is not None:
                return found
        try:
            return Quantity(expression(_inline_degrees(text)))
        except Unreadable:
            return Words(text)

    def _plus_minus(self, text: str, depth: int) -> Value:
        if text.count("\\pm") != 1:
            return Words(text)
        pair = tuple(self._quantity(text.replace("\\pm", sign), depth + 1) for sign in ("+", "-"))
        return Several(pair) if all(isinstance(one, Quantity) for one in pair) else Words(text)

    def _with_unit(self, head: str, tail: str) -> Value | None:
        quoted = '"' in tail or "°" in tail or "%" in tail
        unit = read_unit(tail)
        noun = frozenset[str]()
        if unit is None:
            words = plain_words(tail).split()
            if not 1 <= len(words) <= 3 or not all(re.fullmatch(r"[a-z][a-z-]{2,}", word) for word in words):
                return None
            noun = frozenset(word.removesuffix("s") for word in words)
            if not NO_NOUN.isdisjoint(noun.union(words)) or re.search(r"[\\^_*/+=]", tail):
                return None
        elif unit.turns and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", head):
            return None  # the degrees belong to the function's argument, as in `\sin 30°`
        elif not quoted and re.fullmatch(r"[a-zA-Z](?:\^.*)?", tail.strip()) and not (self._letters or tail[0] == " "):
            return None
        try:
            value = expression(_inline_degrees(head))
        except Unreadable:
            return None
        if value.free_symbols and not quoted:
            return None
        return Quantity(value, unit, noun)


OTHERS_BY_SIGN = {"\\$": OTHERS[("dollar", "usd", "USD", "$", "buck")], **{
    sign: unit for names, unit in OTHERS.items() for sign in names if sign in "€£¥₹"
}}  # fmt: skip


def _special(text: str) -> Value | None:
    words = plain_words(text)
    if text in ("\\emptyset", "\\{\\}", "\\{ \\}") or NOTHING.fullmatch(words):
        return Region(sympy.S.EmptySet)
    if text in ("\\mathbb{R}", "\\mathbb R", "\\R", "\\Reals") or words in EVERYTHING:
        return Region(sympy.S.Reals)
    if (known := re.fullmatch(r"\\mathbb\s*\{?([NZQC])\}?", text)) is not None:
        return Words(NUMBER_SETS[known[1]])
    if words in NOWHERE:
        return Words("does not exist")
    sign = "-" if re.match(r"-", text) else ""
    if re.fullmatch(r'[-+]?\s*"?\s*(?:\\infty|infinity|inf|\\infinity)\s*"?', text, re.IGNORECASE):
        return Quantity(-sympy.oo if sign else sympy.oo)
    return None


def _bare(item: Value) -> TypeGuard[Several]:
    return isinstance(item, Several) and not item.braces


def _number_in_words(text: str) -> Expr | None:
    word = plain_words(text)
    number = NUMBERS.get(word, ORDINALS.get(word))
    if number is None and (found := re.fullmatch(r'"?\s*(\d{1,9})\s*"?\s*"?(?:st|nd|rd|th)"?', text)):
        number = int(found[1])
    return None if number is None else sympy.Integer(number)


def _sides(text: str) -> tuple[list[str], list[str]]:
    r"""Split the text at relation signs, such as `=` and `\in`, outside of brackets. Returns the sides and the
    signs."""
    signs: list[str] = []

    def mark(found: re.Match[str]) -> str:
        signs.append(found[0])
        return SIGN

    marked = RELATION.sub(mark, text)
    sides = [side.strip() for side in split(marked, SIGN)]
    if len(sides) != len(signs) + 1:
        return [text], []  # a relation sign is within brackets
    return sides, signs


def _name(text: str) -> str | None:
    text = text.strip()
    if not NAME.match(text) or text in ("\\pi", "e", "i"):
        return None
    return re.sub(r'[\s"{}\\]', "", text)


def _expressions(sides: list[str]) -> Iterator[Expr]:
    try:
        yield from [expression(side) for side in sides]
    except Unreadable:
        return


def _of_chain(numbers: list[Quantity], signs: list[str]) -> Quantity | None:
    """Return the value of numbers joined by signs such as `=`, or None if they differ by more than rounding.

    After `=`, a number may be rounded only if it is not an integer and the first number has no finite decimal form. So
    `1/3 = 0.33` has a value, but `7.01 = 7` and `0.334 = 0.33` do not."""
    first = numbers[0]
    rounded: Expr | None = None
    for one, sign in zip(numbers[1:], signs, strict=True):
        if one.value.free_symbols or first.value.free_symbols:
            if first.value.free_symbols and (len(numbers) > 2 or not one.value.free_symbols):
                first = one
                continue
            return None
        if (one.unit, one.noun) != (first.unit, first.noun):
            if first.unit is not None and one.unit is not None and first.unit.dimensions == one.unit.dimensions:
                if sympy.Rational(first.unit.factor) * first.value == sympy.Rational(one.unit.factor) * one.value:
                    continue
                return None
            if first.unit is not None or first.noun:
                return None
        apart = abs(sympy.N(one.value - first.value, 40))
        if apart < 1e-30:
            first = Quantity(first.value, first.unit or one.unit, first.noun or one.noun)
            continue
        digits = _decimals(one.value)
        if sign == "=" and (one.value.is_Integer or _decimals(first.value) is not None):
            return None
        if digits is None or not apart <= sympy.Rational(1, 10**digits):
            return None
        rounded = one.value
    return Quantity(first.value, first.unit, first.noun, rounded)


def _total(parts: list[Value]) -> Quantity | None:
    """Return the sum of two quantities, as in `6 hours 30 minutes`. Their units must have the same dimensions, and the
    first unit must be the greater one. Returns None if `parts` is anything else."""
    match parts:
        case [Quantity(value=great, unit=Unit() as unit), Quantity(value=small, unit=Unit() as less)]:
            if unit.dimensions == less.dimensions and unit.factor > less.factor:
                share = less.factor / unit.factor
                return Quantity(great + small * sympy.Rational(share.numerator, share.denominator), unit)
    return None


def _decimals(value: Expr) -> int | None:
    """Return the number of decimal places of a number, but at least 2. Returns None if the number has more than 29
    decimal places."""
    if not isinstance(value, sympy.Rational):
        return None
    return next((digits for digits in range(2, 30) if 10**digits % value.q == 0), None)


def _solved(left: Expr, right: Expr, sign: str, symbol: Symbol) -> Set:
    if left == symbol and not right.free_symbols:
        return _ray(right, sign)
    if right == symbol and not left.free_symbols:
        return _ray(left, {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}.get(sign, sign))
    try:
        relation = OPERATORS[sign](left, right)
        if relation in (sympy.true, sympy.false):
            return sympy.S.Reals if relation == sympy.true else sympy.S.EmptySet
        return relation.as_set()
    except Exception:  # sympy cannot solve every inequality, and can raise any exception
        return sympy.ConditionSet(symbol, OPERATORS[sign](left, right), sympy.S.Reals)


def _ray(bound: Expr, sign: str) -> Set:
    if sign == "\\ne":
        return sympy.Complement(sympy.S.Reals, sympy.FiniteSet(bound))
    if sign in ("<", "\\le"):
        return sympy.Interval(-sympy.oo, bound, True, sign == "<")
    return sympy.Interval(bound, sympy.oo, sign == ">", True)


def _endless(row: Coordinates) -> bool:
    return len(row.items) == 2 and any(
        isinstance(item, Quantity) and item.value in (sympy.oo, -sympy.oo) for item in row.items
    )


def _interval(items: tuple[Value, ...], kind: str) -> Region | None:
    if len(items) != 2 or not all(isinstance(item, Quantity) for item in items):
        return None
    low, high = (item.value for item in items if isinstance(item, Quantity))
    try:
        if not (low.is_extended_real and high.is_extended_real) or not bool(low < high):
            return None
        return Region(sympy.Interval(low, high, kind[0] == "(", kind[1] == ")"))
    except TypeError:
        return None


def _as_region(item: Value | None) -> Region | None:
    """Return the set of real numbers that a value may stand for. For example, `(1, 2)` may be an interval. Returns None
    if the value cannot be such a set."""
    if isinstance(item, Region):
        return item
    if isinstance(item, Coordinates) and item.bracket in "([":
        return _interval(item.items, "()" if item.bracket == "(" else "[]")
    if isinstance(item, Several) and item.braces and all(isinstance(one, Quantity) for one in item.items):
        return Region(sympy.FiniteSet(*(one.value for one in item.items if isinstance(one, Quantity))))
    return None


as_region = _as_region


def _tails(text: str) -> Iterator[tuple[str, str]]:
    """Yield each split of the text into a first part (the value) and a second part that may be the value's unit. The
    longest unit comes first."""
    for found in re.finditer(
        r"""(?<=[\d)}!\]"])(?=\s*["a-zA-Z°%€£¢Ω\\µ])|(?<=[a-zA-Z])(?=\s+["a-zA-Z°%]|["°%])""", text
    ):
        head, tail = text[: found.start()], text[found.start() :]
        if len(tail) <= 80 and not re.match(r"\s*\\(?!frac|cdot|text|mu|Omega)", tail) and head.count('"') % 2 == 0:
            yield head, tail


def _inline_degrees(text: str) -> str:
    return re.sub(r"(\d+(?:\.\d+)?)\s*°", r"(\\frac{\1 \\pi}{180})", text) if "\\" in text or "(" in text else text


def _basis_vector(text: str) -> list[Expr] | None:
    """Return the components of a vector that is written with the unit vectors **i**, **j** and **k**."""
    if not re.search(r"\{\s*[ijk]\s*\}|\\(?:hat|vec)\s*\{?\s*\\?[ijk]", text) or re.search(r"[=<>]", text):
        return None
    marked = re.sub(r"(?:\\(?:hat|vec)\s*)?\{\s*\\?([ijk])(?:math)?\s*\}", r" v_\1 ", text)
    try:
        value = expression(marked)
    except Unreadable:
        return None
    names = {symbol.name: symbol for symbol in value.free_symbols}
    basis = [names.get(name, Symbol(name)) for name in ("v_i", "v_j", "v_k")]
    parts = [sympy.expand(value).coeff(one) for one in basis]
    rest = sympy.expand(value - sum(part * one for part, one in zip(parts, basis, strict=True)))
    if rest != 0 or not names:
        return None
    return parts if "v_k" in names else parts[:2]
