"""The sampler's comparison as a picture: an SVG of bars, written without a plotting library."""

from __future__ import annotations

from html import escape
from typing import Any

BAR, GAP, LEFT, WIDTH = 16, 6, 250, 760
COLOURS = {"static": "#9aa5b1", "synchronous": "#d08c60", "asynchronous": "#3f7f93"}


def sampling_svg(found: dict[str, Any]) -> str:
    """Return a chart of the batches per hour for each way and fraction of useless prompts, relative to synchronous
    waves of 3 batches."""
    parts: list[str] = []
    top = 34
    for useless in dict.fromkeys(row["useless"] for row in found["simulated"]):
        rows = [row for row in found["simulated"] if row["useless"] == useless]
        waves = next(row["per_batch"] for row in rows if row["way"].endswith("waves of 3 batches"))
        longest = max(waves / row["per_batch"] for row in rows)
        parts.append(f'<text x="0" y="{top}" font-weight="bold">{100 * useless:.0f} % of prompts teach nothing</text>')
        top += GAP
        for row in rows:
            ratio = waves / row["per_batch"]
            length = (WIDTH - LEFT - 150) * ratio / longest
            colour = COLOURS[row["way"].partition(",")[0]]
            note = f"{ratio:.1f} ({100 * row['idle']:.0f} % idle)"
            parts += [
                f'<text x="{LEFT - 8}" y="{top + 12}" text-anchor="end">{escape(row["way"])}</text>',
                f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>',
                f'<text x="{LEFT + length + 6:.1f}" y="{top + 12}">{note}</text>',
            ]
            top += BAR + GAP
        top += 26
    size = f'width="{WIDTH}" height="{top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    back = f'<rect {size} fill="white"/>'
    title = '<text x="0" y="14">Batches per hour, beside synchronous waves of 3 batches</text>'
    return "\n".join((head, back, title, *parts, "</svg>")) + "\n"
