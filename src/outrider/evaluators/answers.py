"""Finds an agent's answer: in its last reply, or in a file of the sandbox.

Invariant: `last_words` returns at most MAX_ANSWER characters of what the agent has written. `last_reply` has no limit.
"""

from __future__ import annotations

from outrider.errors import RuntimeFailure, storable
from outrider.evaluators.base import Outcome
from outrider.messages import Role

MAX_ANSWER = 32_768
"""Maximum length of an answer: in characters from the end of a reply, or in bytes of a file."""
PROBE_SECONDS = 30.0


class NoAnswer(Exception):
    """The agent gave no answer, so the reward is 0. The message has the reason."""


def last_reply(outcome: Outcome) -> str:
    """Return the agent's final answer: the harness's answer if there is one, otherwise the model's last reply, or "" if
    there is no reply."""
    if outcome.harness.answer is not None:
        return storable(outcome.harness.answer)
    said = (message.content for message in reversed(outcome.transcript) if message.role is Role.ASSISTANT)
    return storable(next(said, ""))


async def last_words(outcome: Outcome, file: str | None) -> str:
    """Return the answer, without surrounding blanks. The answer is the content of `file`. If `file` is None, the answer
    is the end of a Python agent's answer or, if that answer is empty, of the last reply with text. Raises NoAnswer, and
    RuntimeFailure if the sandbox is broken."""
    if file is None:
        replies = [message.content for message in reversed(outcome.transcript) if message.role is Role.ASSISTANT]
        if outcome.task.harness.agent is not None:  # a program's answer is its whole output, which is not used
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
            # The file is too large or not a regular file, or the sandbox is broken: the probe finds out which.
            await outcome.runtime.exec(["true"], seconds=PROBE_SECONDS)  # raises if the whole sandbox is broken
            raise NoAnswer(f"{file} cannot be read: {error.message}") from error
    if not text.strip():
        raise NoAnswer("there is no reply" if file is None else f"{file} is empty")
    if "\0" in text:
        raise NoAnswer("the answer contains NUL")
    return storable(text.strip())


def marked_answer(reply: str) -> str | None:
    """Return the marked answer in a reply: the content of the last `<answer>…</answer>` or, if the reply has none, of
    the last LaTeX box, `\\boxed{…}`. Returns None if the reply has neither."""
    end = reply.rfind("</answer>")
    start = reply.rfind("<answer>", 0, max(0, end))
    return reply[start + len("<answer>") : end].strip() if start >= 0 else _boxed(reply)


def _boxed(text: str) -> str | None:
    mark = "\\boxed{"
    begun = text.rfind(mark)
    if begun < 0:
        return None
    start, depth = begun + len(mark), 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at].strip()
    return None
