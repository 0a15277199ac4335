"""Compares an answer with gold answers, using math-verify. Runs in a separate process (see `zygote.py`).

math-verify's own time limits are switched off, because they need SIGALRM and do not stop C code. The process itself has
a time limit instead.
"""

from __future__ import annotations

import re
from typing import Any

from math_verify import parse

from outrider.evaluators.checks.math_comparison import CHOICE, Comparison, chosen
from outrider.evaluators.checks.math_reading import Quantity, Several, Value, Words, plain_words, read
from outrider.evaluators.checks.math_text import candidates, clean, unsure
from outrider.evaluators.checks.math_units import read_unit

UNIT_AFTER = re.compile(
    r"[\s$]*(?:\\[)\]])?\s*(?:\\(?:text|mathrm)\s*\{)?\s*([a-zA-Z°%][a-zA-Z/^\d ]{0,30}?)\s*(?:[}.,;$\n]|$)"
)
"""Matches the text after a LaTeX box if this text begins with a word that may be a unit."""
WRITTEN = re.compile(
    r"""\\(?:operatorname\*?\s*\{\s*)?
        (?: (?:i{1,3}|o|small)nt | sum | prod | lim | gcd | lcm | max | min | [dt]?binom | choose | det ) (?![a-zA-Z])
      | \\[dt]?frac \s* \{? \s* (?: d | \\partial ) [^{}]* \}? \s* \{? \s* (?: d | \\partial ) \s* [a-zA-Z]""",
    re.VERBOSE,
)
"""Matches LaTeX that contains a calculation to be done, such as an integral. The text is searched instead of the parsed
value, because parsing already evaluates some calculations."""
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
    ("12 \\text{ cm}", "0.12 m"),
    ("(1, 2)", "(1.5, 2^x)"),
    ("x<-1 \\text{ or } x>1", "(-\\infty,-1)\\cup(1,\\infty)"),
    ("y=2x+1", "2x-y+1=0"),
    ("2+3i", "3i+2.0"),
    ("3 \\pm \\ln 2", "3+\\ln 2, 3+\\ln 5"),
    ("\\frac{1+\\sqrt{5}}{2}", "\\frac12+\\frac{\\sqrt5}{2}"),
    ("-\\frac{a}{b} x_1^{1/2}", "-(a/b) \\cdot \\sqrt{x_1}"),
    ("5! \\cdot 2^{10}", "3 \\times 10^{5} - 1/2 + 1/3"),
    ("\\sin\\frac{\\pi}{3}", "\\frac{\\sqrt3}{2}"),
    ("\\log_{2} 8 + e^{2x}", "|x| + e^{-x}"),
    ("\\frac{-5}{3}", "-1\\frac{2}{3} + \\frac{3\\cdot 3}{7}"),
    ("2(\\frac{a}{2})", "(\\frac{24}{7}) x"),
)
"""Pairs of a gold answer and an answer. Each pair is compared once before the first fork. Otherwise every check would
spend 0.1 s on loading and building the same objects."""


def warm_up() -> None:
    for gold, answer in WARM:
        _equal(gold, read(gold), answer, None)


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Compare an answer with gold answers, or check that gold answers are usable.

    The request has these fields:

    - `golds`: the gold answers.
    - `answer`: the answer. Without it, only the gold answers are checked.
    - `whole`: true if `answer` is only the answer, false if it is a reply with the answer.
    - `after`: the text after the answer, which may begin with a unit.
    - `relative_tolerance`: the greatest relative difference of equal numbers, or None.

    With `answer`, the result has `found`, the text of the answer, and `equal`, the equal gold answer or None.
    `calculates` is true if the answer is an unevaluated calculation, such as an integral, and no gold answer is an
    unevaluated calculation. In this case `equal` is None, because the answer may just repeat the question. Without
    `answer`, the result has `unusable`, which is the index of the first unusable gold answer or None, and `why`, the
    reason."""
    golds = [(gold, read(gold)) for gold in request["golds"]]
    tolerance = request.get("relative_tolerance")
    if "answer" not in request:
        for number, (gold, value) in enumerate(golds):
            if isinstance(value, Words) and not _is_text(value.text):
                return {"unusable": number, "why": "does not parse"}
            # Also compare the gold answer with another answer. If this takes too long, the time limit ends the check,
            # and the task is refused.
            _equal(gold, value, "1", tolerance)
            if not _equal(gold, value, gold, tolerance):
                return {"unusable": number, "why": "does not equal itself"}
        return {"unusable": None}
    texts = [request["answer"]] if request["whole"] else candidates(request["answer"])
    if request["whole"] and (unit := UNIT_AFTER.match(request.get("after", ""))) and read_unit(unit[1]) is not None:
        texts.insert(0, f"{request['answer']} \\text{{{unit[1]}}}")
    if not request["whole"] and not any(_readable(text) for text in texts) and not unsure("".join(texts[:1])):
        texts += [part for part in parse(request["answer"], parsing_timeout=None) if isinstance(part, str)]
    texts = [text for text in texts if text.strip()]
    found = next((text for text in texts if _readable(text)), next(iter(texts), None))
    if found is None:
        return {"found": None, "equal": None}
    if _calculates(found) and not any(_calculates(gold) for gold, _ in golds):
        return {"found": found, "equal": None, "calculates": True}
    equal = next((gold for gold, value in golds if _equal(gold, value, found, tolerance)), None)
    if equal is None and texts[0] != found:
        equal = next(
            (gold for gold, value in golds if in_words(gold, value) and _equal(gold, value, texts[0], None)), None
        )
    return {"found": found, "equal": equal}


def _calculates(text: str) -> bool:
    """Return True if the text contains an unevaluated calculation, such as an integral."""
    return WRITTEN.search(text) is not None or WRITTEN.search(clean(text)) is not None


def in_words(gold: str, value: Value) -> bool:
    return isinstance(value, Words) or CHOICE.fullmatch(clean(gold)) is not None


def _readable(text: str) -> bool:
    return not isinstance(read(text), Words)


def _is_text(text: str) -> bool:
    """Return True if the text consists of words."""
    return re.search(r"[^\W_]", plain_words(text)) is not None and not re.search(r"[\\^_=<>+*/{}]", clean(text))


def _equal(gold: str, value: Value, answer: str, tolerance: float | None) -> bool:
    plain = clean(gold).replace('"', "").strip()
    letter = chosen(plain, clean(answer))
    if letter is not None:
        return letter
    if clean(gold) == clean(answer):
        return True
    if isinstance(value, Words) and plain_words(clean(gold)) == plain_words(clean(answer)) != "":
        return True
    has_unit = isinstance(value, Quantity) and value.unit is not None
    given = read(answer, letters=has_unit)
    compare = Comparison(tolerance, seed=gold)
    try:
        if compare.same(value, given):
            return True
        if isinstance(value, Several) and isinstance(given, Quantity | Several):
            return compare.same(value, read(answer, merge=False))
    except Exception:
        # sympy can raise any exception. The answer then counts as not equal, because the answer is the cause: at
        # submission, the gold answer was compared with itself without an exception.
        return False
    return False
