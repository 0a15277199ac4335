"""Compares a gold answer with an answer. Both are values that `math_reading.read` returned.

Invariants: without a tolerance, numbers must be exactly equal (0.33 is not 1/3); a comparison accepts no more than the
table in docs/evaluators/math.md.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import sympy
from math_verify import verify
from sympy import Expr, Set, Symbol

from outrider.evaluators.checks.math_reading import (
    Assigned,
    Based,
    Clock,
    Coordinates,
    Equation,
    Grid,
    Halfspace,
    Quantity,
    Ratio,
    Region,
    Residue,
    Several,
    System,
    Value,
    Words,
    as_region,
    plain_words,
)
from outrider.evaluators.checks.math_units import PERCENT, Unit

DIGITS = 60
"""Number of decimal digits to which irrational numbers are compared."""
SMALL = sympy.Float(10) ** -45
POINTS = 4
"""Number of random points at which two expressions with variables must have the same values."""
TRIES = 12
CHOICE = re.compile(r"\(?[A-J]\)?")
CHOSEN = re.compile(
    r'(?:(?i:"?\s*(?:option|choice|answer)\s*"?)\s*)?"?\s*(?:\(\s*([A-J])\s*\)|([A-J])\s*[).:]|([A-Ja-j])(?=\s*"?$))(.*)$',
    re.DOTALL,
)
OTHER_LETTER = re.compile(r"\b(?:or|and)\b|\([A-J]\)|^\W*[A-J]\W*$|^\s*[,;/&|]")
"""Matches the text after the letter of a choice if this text names another letter, as in `A or B`."""
CONSTANTS = ("C", "c", "K", "k")


class Comparison:
    """Compares two values. `tolerance` is the greatest relative difference of two equal numbers. None means that they
    must be exactly equal."""

    def __init__(self, tolerance: float | None, seed: str) -> None:
        self._tolerance = None if tolerance is None else sympy.Rational(str(tolerance))
        self._random = random.Random(seed)

    def same(self, gold: Value, answer: Value) -> bool:
        if isinstance(gold, Words) or isinstance(answer, Words):
            return (
                isinstance(gold, Words)
                and isinstance(answer, Words)
                and plain_words(gold.text) == plain_words(answer.text) != ""
            )
        if isinstance(gold, Assigned) or isinstance(answer, Assigned):
            return self._same_named(gold, answer)
        if isinstance(gold, System) or isinstance(answer, System):
            return self._same_system(gold, answer)
        if isinstance(gold, Several) or isinstance(answer, Several):
            return self._same_several(gold, answer)
        if isinstance(gold, Region) or isinstance(answer, Region):
            return self._same_region(as_region(gold), as_region(answer))
        match gold, answer:
            case Quantity(), Quantity():
                return self._same_quantity(gold, answer)
            case Coordinates(), Coordinates():
                flat = {"(": "p", "|": "p", "[": "l"}
                return flat[gold.bracket] == flat[answer.bracket] and self._each(gold.items, answer.items)
            case Grid(), Grid():
                return len(gold.rows) == len(answer.rows) and all(map(self._each, gold.rows, answer.rows))
            case Based(), Based():
                return gold == answer
            case Clock(), Clock():
                return self._same_time(gold, answer)
            case Ratio(), Ratio():
                return len(gold.parts) == len(answer.parts) and all(
                    self.equal(one * answer.parts[0], other * gold.parts[0])
                    for one, other in zip(gold.parts, answer.parts, strict=True)
                )
            case (Ratio(parts=(one, other)), Quantity(value=value, unit=None)) | (
                Quantity(value=value, unit=None),
                Ratio(parts=(one, other)),
            ):
                return other != 0 and not value.is_Integer and self.equal(one / other, value)
            case Residue(), Residue():
                names = {gold.name, answer.name} - {None}
                away = (gold.written - answer.written) / gold.modulus
                return len(names) < 2 and gold.modulus == answer.modulus and bool(sympy.simplify(away).is_integer)
            case Quantity(unit=None), Residue():
                return self.equal(gold.value, answer.written)
            case Equation(), Equation():
                return self._proportional(gold.side, answer.side, positive=False)
            case Halfspace(), Halfspace():
                return gold.strict == answer.strict and self._proportional(gold.side, answer.side, positive=True)
        return False

    def _each(self, gold: tuple[Value, ...], answer: tuple[Value, ...]) -> bool:
        return len(gold) == len(answer) and all(map(self.same, gold, answer))

    def _same_named(self, gold: Value, answer: Value) -> bool:
        if not isinstance(answer, Assigned):
            assert isinstance(gold, Assigned)
            if isinstance(answer, Equation) and len(gold.sides) == 2:
                return self._proportional(gold.sides[0] - gold.sides[1], answer.side, positive=False)
            # `5` does not equal `x + y = 5`, because this equation may describe a line.
            of_sum = re.match(r"\w+[+-]", gold.name) is not None
            return not of_sum and not isinstance(answer, System | Equation) and self.same(gold.value, answer)
        if not isinstance(gold, Assigned):
            if isinstance(gold, Equation) and len(answer.sides) == 2:
                return self._proportional(gold.side, answer.sides[0] - answer.sides[1], positive=False)
            if isinstance(gold, Several) and not isinstance(answer.value, Several):
                return self.same(gold, answer.value)
            return not isinstance(gold, System | Equation) and self.same(gold, answer.value)
        of_gold, of_answer = (re.fullmatch(r"(\w+)\((\w)\)", one.name) for one in (gold, answer))
        value = answer.value
        if of_gold and of_answer and of_gold[1] == of_answer[1] and isinstance(value, Quantity):
            if of_gold[2] == of_answer[2]:
                return self.same(gold.value, value)
            if any(symbol.name == of_gold[2] for symbol in value.value.free_symbols):
                return False
            bound = {Symbol(of_answer[2], real=True): Symbol(of_gold[2], real=True)}
            return self.same(gold.value, replace(value, value=value.value.xreplace(bound)))
        if gold.name == answer.name or (of_gold and answer.name == "y") or (of_answer and gold.name == "y"):
            return self.same(gold.value, value)
        if len(gold.sides) == len(answer.sides) == 2:
            return self._proportional(gold.sides[0] - gold.sides[1], answer.sides[0] - answer.sides[1], positive=False)
        return False

    def _same_system(self, gold: Value, answer: Value) -> bool:
        if isinstance(gold, System) and isinstance(answer, System):
            return [name for name, _ in gold.values] == [name for name, _ in answer.values] and self._each(
                tuple(value for _, value in gold.values), tuple(value for _, value in answer.values)
            )
        system, other = (gold, answer) if isinstance(gold, System) else (answer, gold)
        assert isinstance(system, System)
        values = tuple(value for _, value in system.values)
        if isinstance(other, Coordinates) and other.bracket != "[":
            pairs = (values, other.items) if system is gold else (other.items, values)
            return self._each(*pairs)
        if isinstance(other, Several) and not other.braces and len({name[0] for name, _ in system.values}) == 1:
            both = (Several(values), other) if system is gold else (other, Several(values))
            return self._same_several(*both)
        return False

    def _same_several(self, gold: Value, answer: Value) -> bool:
        ones = gold.items if isinstance(gold, Several) else (gold,)
        others = answer.items if isinstance(answer, Several) else (answer,)
        if isinstance(answer, Region) and isinstance(answer.points, sympy.FiniteSet):
            others = tuple(Quantity(point) for point in answer.points.args)
        for one, side in ((gold, ones), (answer, others)):
            if not isinstance(one, Several | Quantity | Assigned | Region | Coordinates):
                return False
            # A set whose only element is a set differs from that element.
            if len(side) == 1 and isinstance(side[0], Several | Region):
                return False
        ones, others = self._distinct(ones, gold), self._distinct(others, answer)
        if len(ones) != len(others):
            return False
        left = list(others)
        for one in ones:
            match = next((number for number, other in enumerate(left) if self.same(one, other)), None)
            if match is None:
                return False
            del left[match]
        return True

    def _distinct(self, items: tuple[Value, ...], whole: Value) -> tuple[Value, ...]:
        """Return `items`, without repetitions if `whole` is a set."""
        if not (isinstance(whole, Several) and whole.braces):
            return items
        kept: list[Value] = []
        for item in items:
            if not any(item == other for other in kept):
                kept.append(item)
        return tuple(kept)

    def _same_region(self, gold: Region | None, answer: Region | None) -> bool:
        if gold is None or answer is None or (gold.name and answer.name and gold.name != answer.name):
            return False
        if gold.points == answer.points:
            return True
        ones, others = _pieces(gold.points), _pieces(answer.points)
        if ones is not None and others is not None:
            return len(ones) == len(others) and all(map(self._same_piece, ones, others))
        try:
            return bool(sympy.SymmetricDifference(gold.points, answer.points).is_empty)
        except Exception:  # sympy cannot compare all sets, and can raise any exception
            return False

    def _same_piece(self, one: sympy.Interval, other: sympy.Interval) -> bool:
        return (
            (one.left_open, one.right_open) == (other.left_open, other.right_open)
            and self.equal(one.start, other.start)
            and self.equal(one.end, other.end)
        )

    @staticmethod
    def _same_time(gold: Clock, answer: Clock) -> bool:
        if gold.half and not answer.half:
            return gold.minutes % 720 == answer.minutes % 720
        return gold.minutes == answer.minutes or (not gold.half and gold.minutes % 720 == answer.minutes % 720)

    def _same_quantity(self, gold: Quantity, answer: Quantity) -> bool:
        if answer.rounded is not None and gold.value == answer.rounded:
            answer = replace(answer, value=answer.rounded)
        one, other = gold.unit, answer.unit
        if gold.noun and answer.noun and not (gold.noun <= answer.noun or answer.noun <= gold.noun):
            return False
        if (gold.noun and other is not None) or (one is not None and answer.noun):
            return False
        if one is not None and other is not None:
            return one.dimensions == other.dimensions and self.equal(
                _in_base_units(gold.value, one), _in_base_units(answer.value, other)
            )
        unit = one or other
        if unit is None:
            return self.equal(gold.value, answer.value)
        with_unit, bare = (gold.value, answer.value) if one is not None else (answer.value, gold.value)
        sides = (with_unit, bare) if one is not None else (bare, with_unit)
        exact = _in_base_units(with_unit, unit)
        if not unit.dimensions or unit.turns:  # `50%` may also be given as 0.5, `a dozen` as 12, and `180°` as pi
            if self.equal(*((exact, bare) if one is not None else (bare, exact))):
                return True
            if unit == PERCENT and not (bare.is_number and bool(abs(bare) > 1)):
                return False
            if unit.turns and bare.has(sympy.pi):
                return False
        return self.equal(*sides)

    def equal(self, gold: Expr, answer: Expr) -> bool:
        """Return True if the expressions are equal: as numbers, or as functions of their variables."""
        if gold == answer:
            return True
        if isinstance(gold, sympy.Rational) and isinstance(answer, sympy.Rational) and self._tolerance is None:
            return False
        if not gold.free_symbols and not answer.free_symbols:
            return self._equal_numbers(gold, answer)
        if gold.has(sympy.Integral, sympy.Derivative) or answer.has(sympy.Integral, sympy.Derivative):
            return bool(verify(gold, answer, timeout_seconds=None))
        answer = _constant_renamed(gold, answer)
        if gold == answer:
            return True
        symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
        return self._vanishes(gold - answer, symbols, scale=gold)

    def _equal_numbers(self, gold: Expr, answer: Expr) -> bool:
        if gold.is_infinite or answer.is_infinite:
            return False
        away = sympy.N(gold - answer, DIGITS)
        if not away.is_comparable and not away.is_number:
            return False
        size = abs(sympy.N(gold, DIGITS))
        try:
            if self._tolerance is not None:
                return bool(abs(away) <= self._tolerance * size)
            return bool(abs(away) <= SMALL * max(size, SMALL))
        except TypeError:
            return False

    def _vanishes(self, difference: Expr, symbols: list[Symbol], scale: Expr) -> bool:
        """Return True if `difference` is 0 at POINTS random points. The seed is the gold answer, so an agent cannot
        predict the points."""
        agreed = 0
        for attempt in range(TRIES):
            sign = -1 if attempt % 2 else 1
            point = {
                symbol: sympy.Rational(sign * self._random.randrange(10**6, 3 * 10**6), 10**6 + 3) for symbol in symbols
            }
            value = sympy.N(difference.xreplace(point), DIGITS)
            size = abs(sympy.N(scale.xreplace(point), DIGITS))
            if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo) or not size.is_finite:
                continue
            try:
                if not bool(abs(value) <= SMALL * (1 + size)):
                    return False
            except TypeError:
                return False
            agreed += 1
            if agreed == POINTS:
                return True
        return False

    def _proportional(self, gold: Expr, answer: Expr, *, positive: bool) -> bool:
        """Return True if one expression is a constant multiple of the other. If `positive` is true, the constant must
        be positive."""
        symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
        point = {symbol: sympy.Rational(self._random.randrange(10**6, 3 * 10**6), 10**6 + 3) for symbol in symbols}
        if not symbols or gold.free_symbols != answer.free_symbols:
            return False
        below = gold.xreplace(point)
        if below.equals(0):
            return False
        ratio = sympy.nsimplify(answer.xreplace(point) / below) if below.is_Rational else answer.xreplace(point) / below
        if not ratio.is_number or ratio.equals(0) or (positive and not bool(ratio > 0)):
            return False
        return self._vanishes(answer - ratio * gold, symbols, scale=answer)


def chosen(gold: str, answer: str) -> bool | None:
    """If the gold answer is a single letter (of a multiple choice), return whether the answer chooses the same letter.
    Otherwise return None."""
    letter = CHOICE.fullmatch(gold)
    if letter is None:
        return None
    found = CHOSEN.match(answer.replace("{", "").replace("}", ""))
    if found is None or OTHER_LETTER.search(found[4]):
        return False
    return str(found[1] or found[2] or found[3]).upper() == gold.strip("()")


def _in_base_units(value: Expr, unit: Unit) -> Expr:
    return value * sympy.Rational(unit.factor.numerator, unit.factor.denominator) * sympy.pi**unit.turns


def _pieces(points: Set) -> list[sympy.Interval] | None:
    """Return the intervals of a set in ascending order, or None if some parts of it are not intervals."""
    parts = points.args if isinstance(points, sympy.Union) else (points,)
    if not all(isinstance(part, sympy.Interval) for part in parts):
        return None
    return sorted(parts, key=lambda part: float(part.start))


def _constant_renamed(gold: Expr, answer: Expr) -> Expr:
    """Return the answer, in which the constant of integration gets the name that it has in the gold answer."""
    ours, theirs = (
        [term for term in expr.as_ordered_terms() if isinstance(term, Symbol) and term.name in CONSTANTS]
        for expr in (gold, answer)
    )
    if len(ours) == len(theirs) == 1 and ours != theirs and ours[0] not in answer.free_symbols:
        return answer.xreplace({theirs[0]: ours[0]})
    return answer
