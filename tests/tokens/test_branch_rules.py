"""Every rule about branches decides in some session."""

from __future__ import annotations

import pytest

from outrider.tokens.branches.classify import RULES, TURN_RULES, Lineage

from . import test_branches, test_compactions
from .harnesses import Harness


@pytest.mark.deep
def test_every_rule_decides_in_some_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the sessions of `test_branches` and `test_compactions` again. A rule that never decides would be
    superfluous."""
    seen: set[str] = set()
    lines = Harness.lines

    def noting(harness: Harness) -> list[Lineage]:
        found = lines(harness)
        seen.update(line.rule for line in found)
        return found

    monkeypatch.setattr(Harness, "lines", noting)
    for name, session in (vars(test_branches) | vars(test_compactions)).items():
        if name.startswith("test_"):
            session()
    assert seen == {rule.name for rule in RULES} | {rule.name for rule in TURN_RULES}
