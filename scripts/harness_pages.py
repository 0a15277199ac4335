"""Writes the contents of each preset into its page: the last section of docs/harnesses/NAME.md.

Run the script by hand after a preset has changed; a test compares the pages with the presets. The text above the
section stays as it is. Invariant: the script does not change a page that is up to date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outrider.harnesses.presets import DIALECT, Install, Preset, load_preset, preset_names

PAGES = Path(__file__).parent.parent / "docs" / "harnesses"
HEADING = "## The preset"
REGISTRIES = {"npm": "npm", "pip": "PyPI"}


def section(preset: Preset) -> str:
    """Return the section of a preset: its heading and its tables."""
    name = f"{preset.name}.toml"
    lines = [HEADING, ""]
    lines += [f"[`{name}`](../../src/outrider/harnesses/presets/{name}), as `scripts/harness_pages.py` writes it down."]
    lines += _table(("Setting", "Value"), _settings(preset))
    lines += _table(("Its variable", "Value"), ((_code(key), _code(value)) for key, value in preset.env.items()))
    lines += _table((f"`{DIALECT}`", "Words"), _words(preset))
    return "\n".join(lines) + "\n"


def with_section(text: str, preset: Preset) -> str:
    """Return a page's text with the section of the preset as its last section."""
    return text.split(f"{HEADING}\n")[0].rstrip("\n") + "\n\n" + section(preset)


def _settings(preset: Preset) -> Iterator[tuple[str, str]]:
    if preset.install is not None:
        yield from _installation(preset.install)
    yield "dialects, the default first", _codes(preset.dialects)
    yield "command", _code(" ".join(preset.command))
    if preset.stdin:
        yield "standard input", _code(preset.stdin)
    if preset.answer:
        yield "final answer", "standard output"
    if preset.files:
        yield "config files below HOME", _codes(file.path for file in preset.files)
    if preset.logs:
        yield "own logs below HOME", _codes(preset.logs)
    yield "`nonzero_exit`", _code(preset.nonzero_exit)


def _installation(install: Install) -> Iterator[tuple[str, str]]:
    yield f"packages, from {REGISTRIES[install.kind]}", _codes(install.packages)
    if install.node is not None:
        yield "runs on", f"Node.js {install.node}"
    else:
        yield "runs on", f"Python {install.python}" if install.python else "the Python that runs Outrider"
    for command in install.after:
        yield "then run", _code(" ".join(command))


def _words(preset: Preset) -> Iterator[tuple[str, str]]:
    for dialect, words in preset.words.items():
        yield _code(dialect), ", ".join(f"{name} {_code(value)}" for name, value in words.items())


def _table(columns: tuple[str, str], rows: Iterator[tuple[str, str]]) -> list[str]:
    """Return the lines of a table after an empty line; no lines for a table without rows."""
    body = [f"| {' | '.join(row)} |" for row in rows]
    return ["", f"| {' | '.join(columns)} |", "|---|---|", *body] if body else []


def _codes(texts: Iterator[str] | tuple[str, ...]) -> str:
    return ", ".join(map(_code, texts))


def _code(text: str) -> str:
    return "`{}`".format(text.replace("|", "\\|"))


def main() -> None:
    for name in preset_names():
        path = PAGES / f"{name}.md"
        path.write_text(with_section(path.read_text("utf-8"), load_preset(name)), "utf-8")


if __name__ == "__main__":
    main()
