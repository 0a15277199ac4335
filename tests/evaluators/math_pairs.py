"""The labelled pairs of math_pairs.toml, and the confusion table in docs/evaluators/math.md."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("math_pairs.toml")


@dataclass(frozen=True)
class Pair:
    """`right` is the label that a maths teacher would give, `reward` the evaluator's reward."""

    family: str
    gold: str
    answer: str
    right: bool
    reward: float
    relative_tolerance: float | None

    @property
    def reply(self) -> str:
        return self.answer if self.family.startswith("replies") else f"<answer>{self.answer}</answer>"


def read_pairs() -> list[Pair]:
    pairs = []
    for family, golds in tomllib.loads(FILE.read_text()).items():
        for gold, case in golds.items():
            for right in (True, False):
                odd = case.get("missed" if right else "believed", [])
                assert set(odd) <= set(case["right" if right else "wrong"]), (gold, odd)
                for answer in case["right" if right else "wrong"]:
                    reward = float(right != (answer in odd))
                    pairs.append(Pair(family, gold, answer, right, reward, case.get("relative_tolerance")))
    return pairs


def confusion_table(pairs: list[Pair]) -> list[tuple[str, ...]]:
    """Return the rows of the table: the family, and its right and wrong answers with reward 1 and 0."""
    counts = Counter((pair.family, pair.right, pair.reward) for pair in pairs)
    cells = ((True, 1.0), (True, 0.0), (False, 0.0), (False, 1.0))
    families = list(dict.fromkeys(pair.family for pair in pairs))
    rows = [(family, *(str(counts[family, *cell]) for cell in cells)) for family in families]
    sums = [sum(int(row[place]) for row in rows) for place in range(1, 5)]
    return [*rows, ("all", *map(str, sums))]
