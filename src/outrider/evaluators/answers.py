"""Where an agent's answer is: in its last reply, or in a file of the sandbox.

It knows no grader. Invariant: no more than MAX_ANSWER characters are looked at, whatever the agent has written.
"""

from __future__ import annotations

from outrider.errors import RuntimeFailure, storable
from outrider.evaluators.base import Outcome
from outrider.messages import Role

MAX_ANSWER = 32_768
"""Characters of the end of a reply; bytes of a file."""
PROBE_SECONDS = 30.0


class NoAnswer(Exception):
    """There is none; the message says why. It is the agent's doing: reward 0."""


def last_reply(outcome: Outcome) -> str:
    """The agent's final words: those that its harness names, else the model's last reply. "" where there are none."""
    if outcome.harness.answer is not None:
        return storable(outcome.harness.answer)
    said = (message.content for message in reversed(outcome.transcript) if message.role is Role.ASSISTANT)
    return storable(next(said, ""))


async def last_words(outcome: Outcome, file: str | None) -> str:
    """The end of the answer that an agent in Python gives, else of the last reply that has a text; or the content of
    the file. Without blanks around it. Raises NoAnswer, and RuntimeFailure where the sandbox is broken."""
    if file is None:
        replies = [message.content for message in reversed(outcome.transcript) if message.role is Role.ASSISTANT]
        if outcome.task.harness.agent is not None:  # the answer of a program is all that it has printed
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
            # Of a file that is too large, or no regular one, the sandbox says the same as of its own failure.
            await outcome.runtime.exec(["true"], seconds=PROBE_SECONDS)  # raises where the whole sandbox is broken
            raise NoAnswer(f"{file} cannot be read: {error.message}") from error
    if not text.strip():
        raise NoAnswer("there is no reply" if file is None else f"{file} is empty")
    if "\0" in text:
        raise NoAnswer("the answer contains NUL")
    return storable(text.strip())


def marked_answer(reply: str) -> str | None:
    """What the reply marks as its answer: what is in the last `<answer>…</answer>`, else in the last LaTeX box,
    `\\boxed{…}`; None without either."""
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
