"""Finds an agent's answer: in its last reply, or in a file of the sandbox.

Invariant: `last_words` returns at most MAX_ANSWER characters. `last_reply` has no such limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

import msgspec

from outrider.errors import RuntimeFailure, storable
from outrider.evaluators.base import Outcome
from outrider.evaluators.checks.math_text import MAX_JOINED, NAME, joins
from outrider.messages import Role

MAX_ANSWER = 32_768
"""Maximum length of an answer: characters at the end of a reply, or bytes of a file."""
PROBE_SECONDS = 30.0
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*\d")
MAX_AFTER = 60


class NoAnswer(Exception):
    """The agent gave no answer, so the reward is 0. The message says why."""


def last_reply(outcome: Outcome) -> str:
    """Return the answer that the harness reported. If the harness reported none, return the model's last reply, or ""
    if the model gave no reply."""
    if outcome.harness.answer is not None:
        return storable(outcome.harness.answer)
    replies = (message.content for message in reversed(outcome.transcript) if message.role is Role.ASSISTANT)
    return storable(next(replies, ""))


async def last_words(outcome: Outcome, file: str | None) -> str:
    """Return the agent's answer without surrounding whitespace. If `file` is given, the answer is its content.
    Otherwise, the answer of a Python agent is what the agent returned. If that is blank, or the agent is not a Python
    agent, the answer is the last reply that is not blank. Without `file`, only the last MAX_ANSWER characters of the
    answer are used. Raises NoAnswer, and RuntimeFailure if the sandbox is broken."""
    if file is None:
        replies = [message.content for message in reversed(outcome.transcript) if message.role is Role.ASSISTANT]
        # Only Python agents return an answer. Other agents are programs, and their `harness.answer` is their whole
        # output.
        if outcome.task.harness.agent is not None:
            replies.insert(0, outcome.harness.answer or "")
        text = next((reply for reply in replies if reply.strip()), "")[-MAX_ANSWER:]
    else:
        try:
            text = (await outcome.runtime.read(file, limit=MAX_ANSWER)).decode("utf-8")
        except FileNotFoundError as error:
            raise NoAnswer(f"there is no {file}") from error
        except (IsADirectoryError, UnicodeDecodeError) as error:
            raise NoAnswer(f"{file} is no text") from error
        except RuntimeFailure as error:
            # The file cannot be read, or the whole sandbox is broken. If the sandbox is broken, this command raises.
            await outcome.runtime.exec(["true"], seconds=PROBE_SECONDS)
            raise NoAnswer(f"{file} cannot be read: {error.message}") from error
    if not text.strip():
        raise NoAnswer("there is no reply" if file is None else f"{file} is empty")
    if "\0" in text:
        raise NoAnswer("the answer contains NUL")
    return storable(text.strip())


def marked_answer(reply: str) -> str | None:
    r"""Return the answer that is marked in a reply, or None. A mark is `<answer>…</answer>` or, in a reply without such
    tags, a LaTeX box (`\boxed{…}` or `\fbox{…}`). The last mark counts. Marks before it also count if only a comma,
    `and`, `or` or the name of a variable is between one mark and the next. The contents of all marks that count are
    joined by commas."""
    tags = _joined(reply, _tags(reply))
    return tags if tags is not None else _joined(reply, _boxes(reply))


def after_box(reply: str) -> str:
    """Return up to MAX_AFTER characters of the text after the reply's last LaTeX box. Returns "" if the reply has no
    box, or has `<answer>` tags."""
    if next(_tags(reply), None) is not None:
        return ""
    last = next(_boxes(reply), None)
    return "" if last is None else reply[last.end : last.end + MAX_AFTER]


class _Mark(msgspec.Struct, frozen=True):
    """A marked answer in a reply: its content, and the positions where the mark begins and ends."""

    begin: int
    end: int
    content: str


def _tags(reply: str) -> Iterator[_Mark]:
    """Yield the `<answer>…</answer>` marks of a reply, the last one first."""
    end = reply.rfind("</answer>")
    while (start := reply.rfind("<answer>", 0, max(0, end))) >= 0:
        yield _Mark(start, end + len("</answer>"), reply[start + len("<answer>") : end].strip())
        end = reply.rfind("</answer>", 0, start)


def _boxes(reply: str) -> Iterator[_Mark]:
    r"""Yield the LaTeX boxes of a reply, the last one first. Of nested boxes, only the inner one is yielded.

    A box command without a brace is skipped. But if a digit follows, as in `\boxed 5`, TeX boxes this digit. Neither
    this box nor any box before it is then yielded."""
    before = stop = len(reply)
    while (before := max(reply.rfind("\\boxed", 0, before), reply.rfind("\\fbox", 0, before))) >= 0:
        brace = BOX.match(reply, before)
        if brace is None:
            if BARE_BOX.match(reply, before):
                return
            continue
        end = _closing(reply, brace.end(), stop)
        if end < 0:
            return  # the box has no closing brace, or contains the box yielded before
        yield _Mark(before, end + 1, reply[brace.end() : end].strip())
        stop = before


def _closing(text: str, start: int, stop: int) -> int:
    depth = 1
    for at in range(start, stop):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return -1


def _joined(reply: str, marks: Iterator[_Mark]) -> str | None:
    last = next(marks, None)
    if last is None:
        return None
    found = [last]
    for mark in islice(marks, MAX_JOINED - 1):
        between = reply[mark.end : found[-1].begin]
        if not joins(between):
            break
        found.append(mark)
    contents = list(dict.fromkeys(mark.content for mark in reversed(found)))
    if len(contents) == 1:
        return contents[0]
    names = [NAME.search(reply[max(0, mark.begin - 20) : mark.begin]) for mark in reversed(found)]
    if all(names):
        return ", ".join(f"{name[1]}={mark.content}" for name, mark in zip(names, reversed(found), strict=True) if name)
    return ", ".join(contents)
