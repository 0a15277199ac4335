"""What a harness is put through, as data: one scripted task a row, and what must be left of it.

It knows no harness and no tool by name. Invariant: every row writes its file with its first command, so that a
harness that gives up at what comes later is still told from one that runs nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MARK = "outrider-check/"
"""Followed by the row's name, in the instruction: it tells which script a model call belongs to."""

HELPER_MARK = "outrider-helper/"
"""The same in what a sub-agent is told to do."""

FIRST_WORD = "zqfirstwordqz"
"""Said before the stall of the streaming row, and nowhere else."""

HELLO = "echo hello > out.txt"
LOOK = "cat out.txt"
ACCENTS = "héllo wörld ✓ 日本語 🙂 e\u0301 \u05e9\u05dc\u05d5\u05dd"
LONG_LINES = 4000


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One reply of the model: thinking, text, then a call of the shell for each command of `run`, with their JSON
    written in `style`. `helper` is a task for a sub-agent, `wait` waits for it where a tool does that, `raw` text that
    stands for itself, with so many `malformed` calls in it; `stall` waits after FIRST_WORD until the client has been
    sent it."""

    text: str = ""
    think: str = ""
    run: tuple[str, ...] = ()
    style: Literal["plain", "spaced", "escaped"] = "plain"
    helper: str = ""
    wait: bool = False
    raw: str = ""
    malformed: int = 0
    stall: bool = False


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `steps` are the model's replies, of which the last is said again if it is asked for more; `check` is
    a shell command that succeeds if the commands were run as told, `needs` what the harness must have for the row to
    apply."""

    name: str
    what: str
    steps: tuple[Step, ...]
    check: str = '[ "$(cat out.txt)" = hello ]'
    needs: Literal["subagent", "stream"] | None = None


HELPER = (Step(run=("echo helped > helped.txt",)), Step(text="The helper is done."))
"""What the model of a sub-agent says."""

DONE = Step(text="All done.")

ROWS = (
    Row(
        name="three-turns",
        what="write a file, read it, say so",
        steps=(Step(text="I will write the file.", run=(HELLO,)), Step(run=(LOOK,)), DONE),
    ),
    Row(
        name="streaming",
        what="the first word reaches the program before the reply is over",
        steps=(Step(text=f"{FIRST_WORD} is what I say first, then I write the file.", run=(HELLO,), stall=True), DONE),
        needs="stream",
    ),
    Row(
        name="reasoning",
        what="thinking before the text and before a call",
        steps=(
            Step(think="First write,\nthen look.", text="Writing.", run=(HELLO,)),
            Step(think="Now look.", run=(LOOK,)),
            Step(think="Good.", text="All done."),
        ),
    ),
    Row(
        name="json-spacing",
        what="calls whose JSON has odd spaces and line breaks",
        steps=(Step(run=(HELLO,), style="spaced"), Step(text="And again.", run=(LOOK,), style="spaced"), DONE),
    ),
    Row(
        name="unicode",
        what="accents, other scripts and emoji in text, calls and results; escaped in JSON and not",
        steps=(
            Step(text=f"I write {ACCENTS}.", run=(f"printf %s '{ACCENTS}' > out.txt",)),
            Step(run=(f"cat out.txt; echo '{ACCENTS}'",), style="escaped"),
            Step(text=f"{ACCENTS} is done."),
        ),
        check=f"[ \"$(cat out.txt)\" = '{ACCENTS}' ]",
    ),
    Row(
        name="whitespace",
        what="text that begins and ends with blanks and empty lines",
        steps=(
            Step(text="  Two blanks before, three after.   ", run=(HELLO,)),
            Step(text="\n\n\tA tab.\n\n", run=(f"{LOOK}; printf '  \\n\\n '",)),
            Step(text="All done. \n\n"),
        ),
    ),
    Row(
        name="long-output",
        what="a result of 190 kB and a reply of 20 kB",
        steps=(
            Step(run=(f"{HELLO}; seq -f 'line %g of a long result, and on it goes' {LONG_LINES}",)),
            Step(text="A long story. " * 1400, run=(LOOK,)),
            DONE,
        ),
    ),
    Row(
        name="parallel-calls",
        what="two calls in one reply",
        steps=(Step(text="Both at once.", run=(HELLO, "echo two > two.txt")), Step(run=("cat two.txt",)), DONE),
        check='[ "$(cat out.txt two.txt)" = "hello\ntwo" ]',
    ),
    Row(
        name="tool-error",
        what="a command that fails and one that does not exist",
        steps=(
            Step(run=(f"{HELLO}; echo complaint >&2; (exit 3)",)),
            Step(run=("no-such-program-anywhere",)),
            DONE,
        ),
    ),
    Row(
        name="unknown-tool",
        what="a call of a tool that the harness does not have",
        steps=(
            Step(run=(HELLO,)),
            Step(raw='<tool_call>\n{"name": "no_such_tool", "arguments": {"x": 1}}\n</tool_call>'),
            DONE,
        ),
    ),
    Row(
        name="malformed-call",
        what="a call whose JSON breaks off: the harness is given it as text",
        steps=(
            Step(run=(HELLO,)),
            Step(
                text="Now look.",
                raw='\n<tool_call>\n{"name": "bash", "arguments": {"command": \n</tool_call>',
                malformed=1,
            ),
            DONE,
        ),
    ),
    Row(
        name="sub-agent",
        what="an agent of the harness's own does a part",
        steps=(
            Step(run=(HELLO,)),
            Step(text="A helper shall do it.", helper="Write helped.txt."),
            Step(text="It has its part.", wait=True),
            DONE,
        ),
        check='[ "$(cat out.txt helped.txt)" = "hello\nhelped" ]',
        needs="subagent",
    ),
)


def row_named(name: str) -> Row | None:
    return next((row for row in ROWS if row.name == name), None)
