"""Units of measure. A unit has a factor to base units, and the exponents of its dimensions.

Invariants: two units with the same `dimensions` convert into each other by their factors; a word that is not a unit
never gets dimensions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

Dimensions = frozenset[tuple[str, int]]


@dataclass(frozen=True)
class Unit:
    """A unit of measure. A value in base units is the number times `factor`, and times pi to the power `turns`. For
    example, a degree is pi/180 radians, so its `factor` is 1/180 and its `turns` is 1."""

    factor: Fraction
    dimensions: Dimensions
    turns: int = 0


def _unit(factor: str | int, turns: int = 0, **dimensions: int) -> Unit:
    return Unit(Fraction(factor), frozenset(dimensions.items()), turns)


PREFIXES = {"f": -15, "p": -12, "n": -9, "µ": -6, "m": -3, "c": -2, "d": -1, "k": 3, "M": 6, "G": 9}
PREFIX_NAMES = {
    "femto": -15,
    "pico": -12,
    "nano": -9,
    "micro": -6,
    "milli": -3,
    "centi": -2,
    "deci": -1,
    "kilo": 3,
    "mega": 6,
    "giga": 9,
}
METRIC = {
    ("m", "meter", "metre"): _unit(1, m=1),
    ("g", "gram", "gramme"): _unit("1/1000", kg=1),
    ("s", "second"): _unit(1, s=1),
    ("L", "liter", "litre"): _unit("1/1000", m=3),
    ("N", "newton"): _unit(1, kg=1, m=1, s=-2),
    ("J", "joule"): _unit(1, kg=1, m=2, s=-2),
    ("W", "watt"): _unit(1, kg=1, m=2, s=-3),
    ("Pa", "pascal"): _unit(1, kg=1, m=-1, s=-2),
    ("Hz", "hertz"): _unit(1, s=-1),
    ("A", "ampere", "amp"): _unit(1, A=1),
    ("V", "volt"): _unit(1, kg=1, m=2, s=-3, A=-1),
    ("C", "coulomb"): _unit(1, A=1, s=1),
    ("F", "farad"): _unit(1, kg=-1, m=-2, s=4, A=2),
    ("T", "tesla"): _unit(1, kg=1, s=-2, A=-1),
    ("ohm", "Ω"): _unit(1, kg=1, m=2, s=-3, A=-2),
    ("K", "kelvin"): _unit(1, K=1),
    ("mol", "mole"): _unit(1, mol=1),
    ("eV",): _unit("1.602176634e-19", kg=1, m=2, s=-2),
    ("cal", "calorie"): _unit("4.184", kg=1, m=2, s=-2),
    ("Wh",): _unit(3600, kg=1, m=2, s=-2),
    ("bit",): _unit(1, bit=1),
    ("dyn", "dyne"): _unit("1/100000", kg=1, m=1, s=-2),
    ("pc", "parsec"): _unit("3.0856775814913673e16", m=1),
    ("G", "gauss"): _unit("1/10000", kg=1, s=-2, A=-1),
    ("B", "byte"): _unit(8, bit=1),
}
"""Units that take prefixes. The first name is a symbol and takes short prefixes (`km`). The other names take long
prefixes (`kilometer`)."""
OTHERS = {
    ("in", "inch", "inches"): _unit("0.0254", m=1),
    ("ft", "foot", "feet"): _unit("0.3048", m=1),
    ("yd", "yard"): _unit("0.9144", m=1),
    ("mi", "mile"): _unit("1609.344", m=1),
    ("erg", "ergs"): _unit("1/10000000", kg=1, m=2, s=-2),
    ("Å", "angstrom"): _unit("1/10000000000", m=1),
    ("AU", "au"): _unit(149597870700, m=1),
    ("ly", "light-year", "lightyear"): _unit(9460730472580800, m=1),
    ("psi",): _unit("6894.757293168", kg=1, m=-1, s=-2),
    ("Torr", "torr", "mmHg"): _unit("101325/760", kg=1, m=-1, s=-2),
    ("dozen",): _unit(12),
    ("acre",): _unit("4046.8564224", m=2),
    ("ha", "hectare"): _unit(10000, m=2),
    ("l",): _unit("1/1000", m=3),
    ("ml",): _unit("1/1000000", m=3),
    ("cc",): _unit("1/1000000", m=3),
    ("gal", "gallon"): _unit("0.003785411784", m=3),
    ("qt", "quart"): _unit("0.000946352946", m=3),
    ("pt", "pint"): _unit("0.000473176473", m=3),
    ("lb", "pound"): _unit("0.45359237", kg=1),
    ("oz", "ounce"): _unit("0.028349523125", kg=1),
    ("tonne",): _unit(1000, kg=1),
    ("min", "minute"): _unit(60, s=1),
    ("h", "hr", "hour"): _unit(3600, s=1),
    ("sec",): _unit(1, s=1),
    ("day",): _unit(86400, s=1),
    ("week",): _unit(604800, s=1),
    ("yr", "year"): _unit(12, month=1),
    ("month",): _unit(1, month=1),
    ("mph",): _unit("0.44704", m=1, s=-1),
    ("kph", "kmh"): _unit("5/18", m=1, s=-1),
    ("atm", "atmosphere"): _unit(101325, kg=1, m=-1, s=-2),
    ("bar",): _unit(100000, kg=1, m=-1, s=-2),
    ("°", "deg", "degree"): _unit("1/180", turns=1, angle=1),
    ("rad", "radian"): _unit(1, angle=1),
    ("rev", "revolution"): _unit(2, turns=1, angle=1),
    ("rpm",): _unit("1/30", turns=1, angle=1, s=-1),
    ("°C", "celsius"): _unit(1, celsius=1),
    ("°F", "fahrenheit"): _unit(1, fahrenheit=1),
    ("unit",): _unit(1, unit=1),
    ("dollar", "usd", "USD", "$", "buck"): _unit(1, usd=1),
    ("cent", "¢"): _unit("1/100", usd=1),
    ("euro", "EUR", "€"): _unit(1, eur=1),
    ("£", "GBP"): _unit(1, gbp=1),
    ("pence", "penny"): _unit("1/100", gbp=1),
    ("¥", "yen", "yuan"): _unit(1, yen=1),
    ("₹", "rupee", "Rs"): _unit(1, rupee=1),
    ("%",): _unit("1/100"),
}
PERCENT = OTHERS[("%",)]


def _names() -> dict[str, Unit]:
    names: dict[str, Unit] = {}
    for (symbol, *words), unit in METRIC.items():
        for name in (symbol, *words):
            names[name] = unit
        for prefixes, bodies in ((PREFIXES, [symbol]), (PREFIX_NAMES, words)):
            for prefix, power in prefixes.items():
                for body in bodies:
                    names[prefix + body] = Unit(unit.factor * Fraction(10) ** power, unit.dimensions)
    for symbols, unit in OTHERS.items():
        names.update(dict.fromkeys(symbols, unit))
    for name, unit in list(names.items()):
        if len(name) > 2:
            names.setdefault(f"{name}s", unit)
            names.setdefault(name.capitalize(), unit)
            names.setdefault(f"{name.capitalize()}s", unit)
    names["lbs"], names["hrs"], names["yrs"], names["mins"], names["secs"] = (
        names[name] for name in ("lb", "hr", "yr", "min", "sec")
    )
    return names


NAMES = _names()
RAISED_BY = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
PART = re.compile(
    r"(°\s?[CF](?![a-zA-Z])|[^\W\d_]+|[°%$€£¥¢₹])(?:\s*\^\s*\{?\s*(-?\d)\s*\}?|(?<=[a-zA-Z])([23])(?!\d))?"
)
SHARE = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


def read_unit(text: str) -> Unit | None:
    """Return the unit that the whole text names, such as `km/h`, `square feet` or `m s^{-2}`, or None."""
    text = SHARE.sub(r"\1/\2", text.replace('"', " ")).replace("\\mu", "µ").replace("μ", "µ").replace("\\Omega", "Ω")
    text = re.sub(r"\\cdot|\\times|\*|\.(?=\s|$)|\b(?:of angle|old)\b", " ", re.sub(r"\bper\b", "/", text)).replace(
        "{}", ""
    )
    sides = text.replace("(", " ").replace(")", " ").split("/")
    factor, turns, exponents, found = Fraction(1), 0, dict[str, int](), False
    for number, side in enumerate(sides):
        sign, raised, rest = (-1 if number else 1), 1, side.strip().strip("{}").strip()
        last: tuple[Unit, int] | None = None
        while rest:
            part = PART.match(rest)
            if part is None:
                return None
            rest = rest[part.end() :].lstrip(" -")
            name = part[1].replace(" ", "")
            power = int(part[2] or part[3] or 1)
            if name in ("squared", "cubed") and last is not None:
                unit, power = last[0], RAISED_BY[name] - 1
                power *= sign
            elif name in RAISED_BY and rest:
                raised = RAISED_BY[name]
                continue
            elif name in NAMES:
                unit, power, raised = NAMES[name], sign * power * raised, 1
            else:
                return None
            if not -9 <= power <= 9:
                return None
            last, found = (unit, power), True
            factor *= unit.factor**power
            turns += unit.turns * power
            for dimension, exponent in unit.dimensions:
                exponents[dimension] = exponents.get(dimension, 0) + exponent * power
        if not side.strip():
            return None
    if not found:
        return None
    return Unit(factor, frozenset((name, power) for name, power in exponents.items() if power), turns)
