"""Writes the contents of each preset into the last section of its page, docs/harnesses/NAME.md, and the table of common
options into docs/harnesses.md.

Run the script by hand after a preset has changed; a test compares the pages with the presets. The text above the
section stays as it is. Invariant: the script does not change a page that is up to date.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from outrider.harnesses.common_options import COMMON
from outrider.harnesses.presets import DIALECT, Install, Preset, load_preset, preset_names

PAGES = Path(__file__).parent.parent / "docs" / "harnesses"
OVERVIEW = PAGES.with_suffix(".md")
HEADING = "## The preset"
REGISTRIES = {"npm": "npm", "pip": "PyPI"}


def section(preset: Preset) -> str:
    """Return the section of a preset: its heading and its tables."""
    name = f"{preset.name}.toml"
    lines = [HEADING, ""]
    lines += [f"[`{name}`](../../src/outrider/harnesses/presets/{name}), as `scripts/harness_pages.py` writes it down."]
    lines += _table(("Setting", "Value"), _settings(preset))
    lines += _table(("Common option", "Here"), _common(preset))
    lines += _table(("Its variable", "Value"), ((_code(key), _code(value)) for key, value in preset.env.items()))
    lines += _table((f"`{DIALECT}`", "Words"), _words(preset))
    return "\n".join(lines) + "\n"


def with_section(text: str, preset: Preset) -> str:
    """Return a page's text with the section of the preset as its last section."""
    return text.split(f"{HEADING}\n")[0].rstrip("\n") + "\n\n" + section(preset)


def options_table() -> str:
    """Return the table in docs/harnesses.md: each agent program, with the common options that it takes."""
    columns = ("Program", "Version", "MCP servers", "Skills", "Images", "Sub-agents", *map(_code, COMMON))
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for preset in map(load_preset, preset_names()):
        if preset.install is None:
            continue
        servers = ", ".join(preset.mcp.entries) if preset.mcp else "no"
        found = (preset.certified.image, preset.certified.subagent)
        takes = (preset.name, preset.install.version, servers, "yes" if preset.skills else "no", *found)
        lines.append(f"| {' | '.join((*takes, *(_has(preset, name) for name in COMMON)))} |")
    return "\n".join(lines) + "\n"


def with_options_table(text: str) -> str:
    """Return the text of docs/harnesses.md with the table of programs and common options."""
    before, _, rest = text.partition("| Program | Version |")
    after = rest.partition("\n\n")[2]
    return f"{before}{options_table()}\n{after}"


def _has(preset: Preset, name: str) -> str:
    if name not in preset.options:
        return "no"
    return ", ".join(preset.options[name].dialects) or "yes"


def _common(preset: Preset) -> Iterator[tuple[str, str]]:
    for name, common in COMMON.items() if preset.install else ():
        option = preset.options.get(name)
        if option is None:
            yield _code(name), f"refused: {preset.refused.get(name, 'not mapped')}"
            continue
        choices = f" {_codes(map(str, option.choices))}." if option.choices else ""
        dialects = f" In the dialects {_codes(option.dialects)}." if option.dialects else ""
        yield _code(name), f"{option.help or common.help}{choices}{dialects}"


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
    if preset.mcp:
        yield "[MCP servers](../mcp-and-skills.md)", f"{_codes(preset.mcp.entries)}, in {_code(preset.mcp.file)}"
    else:
        yield "[MCP servers](../mcp-and-skills.md)", "none"
    yield "[skills](../mcp-and-skills.md#skills)", f"in {_code(preset.skills.folder)}" if preset.skills else "none"
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


def _codes(texts: Iterable[str]) -> str:
    return ", ".join(map(_code, texts))


def _code(text: str) -> str:
    return "`{}`".format(text.replace("|", "\\|"))


def main() -> None:
    OVERVIEW.write_text(with_options_table(OVERVIEW.read_text("utf-8")), "utf-8")
    for name in preset_names():
        path = PAGES / f"{name}.md"
        path.write_text(with_section(path.read_text("utf-8"), load_preset(name)), "utf-8")


if __name__ == "__main__":
    main()
