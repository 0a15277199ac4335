"""Compares an answer with gold answers, using math-verify. Runs in a separate process (see `zygote.py`).

math-verify's own time limits are off, because they need SIGALRM and do not stop C code. The limits of the process apply
instead.
"""

from __future__ import annotations

import re
from typing import Any

from math_verify import parse, verify
from sympy import Derivative, Expr, Integral, Limit, MatrixBase, Product, Sum

DELIMITERS = ("$", "\\(", "\\[", "\\boxed")
CALCULATIONS = (Derivative, Integral, Limit, Product, Sum)
WRITTEN = re.compile(
    r"""\\(?:operatorname\*?\s*\{\s*)?
        (?: (?:i{1,3}|o|small)nt | sum | prod | lim | gcd | lcm | max | min | [dt]?binom | choose | det ) (?![a-zA-Z])
      | \\[dt]?frac \s* \{? \s* (?: d | \\partial ) [^{}]* \}? \s* \{? \s* (?: d | \\partial ) \s* [a-zA-Z]""",
    re.VERBOSE,
)
"""LaTeX for a calculation. math-verify evaluates some of these calculations while parsing, so its result does not show
that the text had a calculation."""
WARM = (
    ("\\frac{1}{2}", "So it is $\\boxed{0.5}$."),
    ("\\{1,2\\}", "$\\boxed{\\{2,1\\}}$"),
    ("2\\sqrt{3}", "$\\boxed{\\sqrt{12}}$"),
    ("50\\%", "The final answer is $0.5$. I hope it is correct."),
    ("x^2+2x+1", "$\\boxed{(x+1)^2}$"),
    ("[0,\\infty)", "$\\boxed{[0,\\infty)}$"),
    ("\\frac{\\pi}{4}", "$\\boxed{\\arctan 1}$"),
    ("1000", "The answer is 1,000"),
    ("\\sin(2x)", "$\\boxed{2\\sin x\\cos x}$"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "$\\boxed{\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}}$"),
    ("x=3", "$\\boxed{3}$"),
    ("x>3", "$\\boxed{(3,\\infty)}$"),
    ("\\text{Monday}", "\\boxed{Monday}"),
)
"""Gold answers and answers to compare once before any fork. Otherwise each check would spend 0.1 s on loading and
building the same objects."""


def warm_up() -> None:
    for gold, answer in WARM:
        _equal(_parsed(gold, whole=True), _parsed(answer, whole=False))


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Compare the request's `answer` with its `golds`. If the request has no `answer`, check that the golds are usable.

    With `answer`, the result has the `equal` gold or None, the text `found` in the answer, and `calculates`.
    `calculates` is true if the answer is an unevaluated calculation and no gold is one. (Otherwise an answer that
    repeats the integral in the question would equal the gold.) If `whole` is true, the text is only the answer;
    otherwise the answer is extracted from the text. Without `answer` the result has the number of the first `unusable`
    gold, or None, and the reason `why`."""
    golds = [(gold, _parsed(gold, whole=True)) for gold in request["golds"]]
    if "answer" not in request:
        other = _parsed("1", whole=True)
        for number, (_, parsed) in enumerate(golds):
            # math-verify returns a text that it cannot parse unchanged.
            if all(isinstance(part, str) for part in parsed):
                return {"unusable": number, "why": "does not parse"}
            _equal(parsed, other)  # this comparison must also end within the time limit
            if not _equal(parsed, parsed):
                return {"unusable": number, "why": "does not equal itself"}
            if _too_small(parsed):
                why = "is so small that its rounding makes other numbers equal to it"
                return {"unusable": number, "why": why}
        return {"unusable": None}
    answer = _parsed(request["answer"], whole=request["whole"])
    found = next((part for part in answer if isinstance(part, str)), None)
    if _calculates(answer) and not any(_calculates(parsed) for _, parsed in golds):
        return {"found": found, "equal": None, "calculates": True}
    equal = next((gold for gold, parsed in golds if _equal(parsed, answer)), None)
    return {"found": found, "equal": equal}


def _parsed(text: str, *, whole: bool) -> list[Any]:
    """Parse the text with math-verify. LaTeX without delimiters is put into a box, because math-verify would otherwise
    use only the last number of the text."""
    if whole and not any(mark in text for mark in DELIMITERS):
        text = f"\\boxed{{{text}}}"
    return list(parse(text, parsing_timeout=None))


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    return bool(gold and answer and verify(gold, answer, timeout_seconds=None))


def _calculates(parsed: list[Any]) -> bool:
    """Return True if the text has an unevaluated calculation, which may be the calculation that the task requires."""
    return any(
        WRITTEN.search(part) is not None if isinstance(part, str) else bool(part.has(*CALCULATIONS)) for part in parsed
    )


def _too_small(parsed: list[Any]) -> bool:
    """Return True if math-verify treats a number in the gold (alone, or within an equation or a set) as equal to 1.25
    times the number."""
    rest = [part for part in parsed if not isinstance(part, str)]
    while rest:
        part = rest.pop()
        if not isinstance(part, Expr):
            rest += getattr(part, "args", ())
        elif not isinstance(part, MatrixBase) and part.is_number:
            value = part.doit().evalf()  # the parser leaves 1-1 and 50% unevaluated
            if value.is_real and value != 0 and _equal([part], [part * 1.25]):
                return True
    return False
