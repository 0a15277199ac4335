"""Every `outrider ...` that a page names is a command that exists, with options that it has."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

import click
import pytest

from outrider.cli.command_line import CliGroup
from outrider.cli.commands import commands
from outrider.cli.terminal import Terminal

from .pages import PAGES, ROOT, Page

END_OF_COMMAND = re.compile(r"[|&;<>()]+")
ROOT_OPTIONS = {"--help", "-h", "--version"}
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
COMMANDS = commands()


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of each `outrider` command in a shell text."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    for is_end, words in itertools.groupby(lexer, lambda word: bool(END_OF_COMMAND.fullmatch(word))):
        command = list(itertools.dropwhile(ASSIGNMENT.match, words))
        if not is_end and command[:1] == ["outrider"]:
            yield command[1:]


class Shown(NamedTuple):
    """A command on a page. If `whole`, the command is shown as a user types it; otherwise it is only named."""

    where: str
    words: list[str]
    whole: bool


def shown(page: Page) -> Iterator[Shown]:
    """Yield the commands of console blocks and of inline code."""
    for block in page.blocks:
        if block.info == "console":
            for line in block.text.splitlines():
                if line.startswith("$ "):
                    yield from (Shown(block.where, words, True) for words in command_lines(line[2:]))
    for span in page.spans:
        # `list|add|rm` stands for three commands; a shell's pipe has spaces around it.
        for choice in itertools.product(*(word.split("|") if "|" in word else [word] for word in span.split(" "))):
            yield from (Shown(page.name, words, False) for words in command_lines(" ".join(choice)))


def complaint(words: list[str], *, whole: bool = True) -> str | None:
    """Parse a command without running it. Returns the error, or None. A missing argument is an error only if the
    command is `whole`."""
    command: click.Command = COMMANDS
    words = list(words)
    while words and isinstance(command, CliGroup):
        name = words.pop(0)
        if name in ROOT_OPTIONS:
            return None
        if name not in command.names:
            return f"no command {name!r}"
        command = command.member(name)
    if isinstance(command, CliGroup):
        return None
    ignored = ROOT_OPTIONS - {option for parameter in command.params for option in parameter.opts}
    try:
        command.make_context("outrider", [word for word in words if word not in ignored], obj=Terminal())
    except click.UsageError as error:
        left_out = isinstance(error, click.MissingParameter) and not whole
        return None if left_out else f"{' '.join(words)}: {error}"
    return None


def test_commands_exist() -> None:
    found = [(each.where, complaint(each.words, whole=each.whole)) for page in PAGES for each in shown(page)]
    assert [(where, wrong) for where, wrong in found if wrong] == []


def test_commands_in_the_browser_exist() -> None:
    sources = sorted((ROOT / "page" / "src").glob("*.tsx"))
    spans = [span for file in sources for span in re.findall("<code>(outrider [^<]+)</code>", file.read_text("utf-8"))]
    assert spans
    assert [complaint(words) for span in spans for words in command_lines(span) if complaint(words)] == []


def test_the_pages_show_every_command() -> None:
    seen = {each.words[0] for page in PAGES for each in shown(page) if each.words} - ROOT_OPTIONS
    assert seen == set(COMMANDS.names)


@pytest.mark.parametrize(
    "line",
    [
        "outrider serv",
        "outrider run -n 8",
        "outrider run task.toml -m 8",
        "outrider export --format csv",
        "outrider engines delete x",
        "make demo && outrider show a b",
        "X=1 outrider status --urls x",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    (words,) = command_lines(line)
    assert complaint(words)
