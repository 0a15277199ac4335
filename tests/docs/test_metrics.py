"""docs/metrics.md lists all metrics of the code (`python scripts/metrics_table.py` writes the table)."""

from __future__ import annotations

from metrics_table import PAGE, with_table

from outrider.service.metrics import FAMILIES
from outrider.service.metrics_counts import LIMITS
from outrider.service.metrics_rates import KEPT_SECONDS, STEP_SECONDS

from .pages import page


def test_the_table_is_that_of_the_code() -> None:
    text = PAGE.read_text()
    assert text == with_table(text)
    [table] = page("docs/metrics.md").tables("Metric")
    assert len(table.rows) == len(FAMILIES)


def test_the_bounds_are_those_of_the_code() -> None:
    text = PAGE.read_text()
    assert f"The first {LIMITS.named} engines and the first {LIMITS.named} nodes" in text
    assert f"in each {STEP_SECONDS:g} seconds of the last hour" in text
    assert KEPT_SECONDS == 3600
