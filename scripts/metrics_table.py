"""Writes the table of metrics of service/metrics.py into docs/metrics.md.

Run the script by hand after a metric has changed; a test compares the page with the code.
"""

from __future__ import annotations

from pathlib import Path

from outrider.service.metrics import FAMILIES, Family

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
HEAD = "| Metric | Kind | Labels | Meaning |\n|---|---|---|---|\n"


def with_table(page: str) -> str:
    """Return the page's text with its table of metrics replaced by the current table."""
    before, _, after = page.partition(HEAD)
    _, _, rest = after.partition("\n\n")
    return f"{before}{HEAD}{''.join(map(_row, FAMILIES))}\n{rest}"


def _row(family: Family) -> str:
    name = f"{family.name}_total" if family.kind == "counter" else family.name
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"| `{name}` | {family.kind} | {labels} | {family.help} |\n"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
