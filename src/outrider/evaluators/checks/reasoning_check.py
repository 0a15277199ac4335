"""Scores an answer with the scorers of reasoning-gym. Runs in a separate process (see `zygote.py`).

Invariant: a text that a scorer evaluates as Python cannot call arbitrary functions.
"""

from __future__ import annotations

import math
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset, get_score_answer_fn

from outrider.evaluators.checks.reasoning_sets import EVALUATED, evaluated_in_entry

WARM = ("simple_integration", "polynomial_equations", "countdown", "basic_arithmetic")
TUPLES = ("arc_agi", "rearc")
"""Data sets whose scorers need grids as tuples of tuples. An entry arrives as JSON, so its grids are lists."""


def warm_up() -> None:
    for name in WARM:
        entry = create_dataset(name, size=1, seed=0)[0]
        get_score_answer_fn(name)(entry["answer"], entry)


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Score the request's `answer` to its `entry`, a row of reasoning-gym. The result has either `score`, or `refused`,
    the reason why there is no score.

    Without `answer`, check the entry: its own answer must score 1. The result has `unusable`, which is None or the
    reason why the entry cannot be used."""
    entry = request["entry"]
    name, gold = entry["metadata"]["source_dataset"], entry["answer"]
    answer = request.get("answer", gold).strip()  # some scorers also strip the answer before they evaluate it
    usable = name in DATASETS and all(harmless(text) for text, harmless in evaluated_in_entry(name, entry))
    if "answer" not in request:
        if name not in DATASETS:
            return {"unusable": f"reasoning-gym has no data set {name!r}"}
        if not usable or _refused(name, gold, gold):
            return {"unusable": "a text in it that its scorer evaluates is no plain expression"}
        score = _score(name, gold, entry)
        return {"unusable": None if score == 1 else f"its own answer scores {score}, not 1"}
    if not usable:
        raise ValueError("the entry is not the one that was submitted")
    try:
        if why := _refused(name, answer, gold):
            return {"refused": why}
        score = _score(name, answer, entry)
        return {"score": score} if math.isfinite(score) else {"refused": f"it scores {score}"}
    except Exception as error:
        # A scorer can raise any exception. The agent's answer is the cause: at submission, the scorer accepted the
        # entry's own answer.
        return {"refused": f"the scorer cannot read it: {type(error).__name__}"}


def _refused(name: str, answer: str, gold: str) -> str | None:
    harmless = EVALUATED.get(name)
    if harmless is not None and not harmless(answer):
        return "it is not the plain expression that the scorer of this data set can evaluate"
    # The scorer of complex_arithmetic would give NaN the best score, because min(1.0, nan) is 1.0 in Python.
    if "nan" in "".join(answer.split()).lower() and any(sign.isdigit() for sign in gold):
        return "it is not a number"
    return None


def _score(name: str, answer: str, entry: dict[str, Any]) -> float:
    if name in TUPLES:
        entry = {**entry, "metadata": _tuples(entry["metadata"])}
    return float(get_score_answer_fn(name)(answer, entry))


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(inner) for name, inner in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
