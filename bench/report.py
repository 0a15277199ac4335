"""A run's report: printed as tables, and written as JSON and Markdown. The benchmark `sampling` also gets a picture."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.plots import sampling_svg
from bench.rounds import combined
from bench.sheets import sheets
from bench.tables import Results, Sheet
from bench.targets import targets

FOLDER = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
BEGIN = "<!-- Written by `make bench` from bench/results. -->"
END = "<!-- The end of what `make bench` writes. -->"
PACKAGES = ("outrider", "aiohttp", "httptools", "msgspec", "orjson", "renderers", "tokenizers", "uvicorn", "uvloop")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`load` is the machine's load average (one minute) at the beginning and the end of the run: a run on a busy
    machine is worth less. `seconds` is the duration of each benchmark."""

    at: str
    machine: dict[str, Any]
    load: tuple[float, float]
    seconds: dict[str, float]
    quick: bool
    results: Results
    rounds: tuple[Results, ...] = ()
    against: tuple[Results, ...] = ()

    def figures(self) -> Results:
        """The results, in which each figure has its range over the rounds."""
        return combined(self.rounds) if self.rounds else self.results


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30), 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def show(report: Report, console: Console) -> None:
    for sheet in sheets(report.figures()):
        caption = escape(sheet.note) or None
        table = Table(title=sheet.title, title_justify="left", caption=caption, caption_justify="left")
        for number, column in enumerate(sheet.columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
    console.print(_circumstances(report))


def write_json(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(msgspec.to_builtins(report), option=orjson.OPT_INDENT_2) + b"\n")


def keep(report: Report) -> Path:
    """Write the report of all benchmarks: the results folder gets a JSON file named by date, a Markdown file of the
    newest results, and the sampler's picture; the README gets the targets."""
    path = FOLDER / f"{report.at[:10]}.json"
    write_json(report, path)
    (FOLDER / "latest.md").write_text(markdown(report))
    (FOLDER / "sampling.svg").write_text(sampling_svg(report.results["sampling"]))
    README.write_text(with_targets(README.read_text(), report))
    return path


def latest() -> Report:
    """Read the newest stored report."""
    return msgspec.json.decode(max(FOLDER.glob("*.json")).read_bytes(), type=Report)


def with_targets(page: str, report: Report) -> str:
    """Return the page with the report's targets in place of the text between BEGIN and END. Raises ValueError if the
    page lacks one of the two."""
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise ValueError(f"the page has no {END if begun else BEGIN}")
    sheet = targets(report.figures())
    return f"{before}{BEGIN}\n\n{_markdown_table(sheet)}\n\n{sheet.note}\n\n{END}{after}"


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def markdown(report: Report) -> str:
    parts = [f"# Benchmarks of {report.at[:10]}", _circumstances(report), "What each means: [README](../README.md)."]
    for sheet in sheets(report.figures()):
        parts += [f"## {sheet.title}", _markdown_table(sheet)]
        if sheet.note:
            parts.append(sheet.note)
    return "\n\n".join(parts) + "\n"


def _markdown_table(sheet: Sheet) -> str:
    widths = [max(len(row[at]) for row in (sheet.columns, *sheet.rows)) for at in range(len(sheet.columns))]
    lines = [_aligned(sheet.columns, widths)]
    lines.append("|" + "|".join("-" * (width + 1) + ("-" if at == 0 else ":") for at, width in enumerate(widths)) + "|")
    lines += [_aligned(row, widths) for row in sheet.rows]
    return "\n".join(lines)


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
    return "| " + " | ".join(cells) + " |"


def _circumstances(report: Report) -> str:
    about = report.machine
    took = sum(report.seconds.values())
    several = f" Medians of {len(report.rounds)} rounds, with the smallest and the largest." if report.rounds else ""
    return (
        f"{about['cores']} cores ({about['cpu']}), {about['memory_gib']} GiB, {about['kernel']}, "
        f"Python {about['python']}, load {report.load[0]:.1f} before and {report.load[1]:.1f} after, "
        f"{took:.0f} s{' (quick)' if report.quick else ''}.{several}"
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
