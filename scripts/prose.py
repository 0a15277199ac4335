"""Measures the prose of Python packages: docstrings and comments, as pronouns and personifications per 1,000 words.

    python scripts/prose.py src/outrider [OTHER_PACKAGE_DIR ...] [--rooms] [--fragments] [--sample N --seed S]

Prints one row per package. `--rooms` adds one row for each folder of the first package. `--fragments` lists docstrings
that start with a word of OPENINGS, which often have no verb. `--sample N` prints N docstrings and comments drawn at
random, for a reader to judge. Standard library only; the packages are parsed and never imported.

The numbers only show a direction: a reader decides whether a sentence is plain. Words within backquotes are code and do
not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# The module is found because Python puts the folder of a script that is run by path into the module search path.
from shape import docstrings, says_something, strings_below_assignments

PRONOUNS = re.compile(
    "it|its|itself|they|them|their|theirs|this|that|these|those|what|which|who|whom|whose|ones?|such|others?"
    "|something|anything"
)
PERSONIFICATIONS = re.compile(
    "says?|said|saying|tells?|told|telling|know|knows|knew|known|hears?|heard|trust|trusts|trusted"
    "|believe|believes|believed|bears?|bore|want|wants|wanted|ask|asks|asked|asking"
)
OPENINGS = ("Of", "Those", "As", "By", "That", "What", "Which", "Whose", "Where", "How", "Whether")

WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)


@dataclass(frozen=True)
class Text:
    """One docstring or one block of comment lines."""

    path: Path
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        return [word.lower() for word in WORD.findall(CODE.sub(" ", self.text))]


@dataclass(frozen=True)
class Prose:
    words: int
    pronouns: float
    """Number per 1,000 words."""
    personifications: float
    """Number per 1,000 words."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the prose of docstrings and comments.")
    parser.add_argument("packages", nargs="+", type=Path)
    parser.add_argument("--rooms", action="store_true", help="add a row for each folder of the first package")
    parser.add_argument("--fragments", action="store_true", help="list docstrings that start like a fragment")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="print N texts of the first package")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    texts = {package: list(texts_of(package)) for package in options.packages}
    first = options.packages[0]
    print(f"{'':40}   words  pronouns  personifications")
    for package, written in texts.items():
        show(package.name, written)
    if options.rooms:
        for room in sorted(path for path in first.iterdir() if path.is_dir()):
            if written := [text for text in texts[first] if text.path.is_relative_to(room)]:
                show(f"  {room.name}", written)
        show("  (files at the top)", [text for text in texts[first] if text.path.parent == first])
    if options.fragments:
        for text in texts[first]:
            if text.text.split(maxsplit=1)[0].rstrip(",") in OPENINGS:
                print(f"{text.path}:{text.line}: {text.text.splitlines()[0]}")
    for text in random.Random(options.seed).sample(texts[first], options.sample):
        print(f"\n{text.path}:{text.line}\n{text.text}")


def show(name: str, texts: Sequence[Text]) -> None:
    prose = measure(texts)
    print(f"{name:40} {prose.words:7,} {prose.pronouns:9.1f} {prose.personifications:17.1f}")


def measure(texts: Sequence[Text]) -> Prose:
    words = [word for text in texts for word in text.words]
    per_1000 = 1000 / max(1, len(words))
    return Prose(
        words=len(words),
        pronouns=per_1000 * sum(PRONOUNS.fullmatch(word) is not None for word in words),
        personifications=per_1000 * sum(PERSONIFICATIONS.fullmatch(word) is not None for word in words),
    )


def texts_of(package: Path) -> Iterator[Text]:
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(source)))
        for node in (*docstrings(nodes), *strings_below_assignments(nodes)):
            assert isinstance(node.value, ast.Constant)
            if text := str(node.value.value).strip():
                yield Text(path, node.lineno, text)
        yield from comments_of(path, source)


def comments_of(path: Path, source: str) -> Iterator[Text]:
    """Yield the comments of a file. Comment lines directly below one another are one text."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or not says_something(token):
            continue
        if block and token.start[0] != last + 1:
            yield Text(path, first, "\n".join(block))
            block = []
        if not block:
            first = token.start[0]
        last = token.start[0]
        block.append(token.string.lstrip("# "))
    if block:
        yield Text(path, first, "\n".join(block))


if __name__ == "__main__":
    main()
