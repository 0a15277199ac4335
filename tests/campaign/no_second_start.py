"""A campaign's service with a planted bug: it starts only on an empty data folder."""

from __future__ import annotations

from pathlib import Path

from campaign import service


def main(folder: str, *arguments: str) -> None:
    if Path(folder, "data", "outrider.sqlite3").exists():
        raise RuntimeError("there are data")
    service.main(folder, *arguments)
