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

ACCENTS = "héllo wörld ✓ 日本語 🙂 e\u0301 \u05e9\u05dc\u05d5\u05dd"
LONG = "".join(f"line {number} of a long result, and on it goes\n" for number in range(4000))


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the model has done, by a shell `command`; or, where a harness has no tool for that, by a tool that
    writes a file (`write` is its name and its text) or one that reads the file `read`."""

    command: str
    write: tuple[str, str] | None = None
    read: str | None = None


HELLO = Act(command="echo hello > out.txt", write=("out.txt", "hello\n"))
LOOK = Act(command="cat out.txt", read="out.txt")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One reply of the model: thinking, text, then a call of a tool for each act of `run`, with their JSON
    written in `style`. `helper` is a task for a sub-agent, `wait` waits for it where a tool does that, `raw` text that
    stands for itself, with so many `malformed` calls in it; `stall` waits after FIRST_WORD until the client has been
    sent it."""

    text: str = ""
    think: str = ""
    run: tuple[Act, ...] = ()
    style: Literal["plain", "spaced", "escaped"] = "plain"
    helper: str = ""
    wait: bool = False
    raw: str = ""
    malformed: int = 0
    stall: bool = False


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `steps` are the model's replies, of which the last is said again if it is asked for more; `check` is
    a shell command that succeeds if the acts were done as told, `needs` what a harness may lack and still hold: the
    row is not tried then. `files` are there when it begins."""

    name: str
    what: str
    steps: tuple[Step, ...]
    check: str = '[ "$(cat out.txt)" = hello ]'
    needs: Literal["subagent", "stream"] | None = None
    files: dict[str, str] = {}


HELPED = Act(command="echo helped > helped.txt", write=("helped.txt", "helped\n"))
HELPER = (Step(run=(HELPED,)), Step(text="The helper is done."))
"""What the model of a sub-agent says."""

TWO = Act(command="echo two > two.txt", write=("two.txt", "two\n"))
LOOK_AT_TWO = Act(command="cat two.txt", read="two.txt")
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
            Step(
                text=f"I write {ACCENTS}.",
                run=(Act(command=f"printf %s '{ACCENTS}' > out.txt", write=("out.txt", ACCENTS)),),
            ),
            Step(run=(Act(command=f"cat out.txt; echo '{ACCENTS}'", read="out.txt"),), style="escaped"),
            Step(text=f"{ACCENTS} is done."),
        ),
        check=f"[ \"$(cat out.txt)\" = '{ACCENTS}' ]",
    ),
    Row(
        name="whitespace",
        what="text that begins and ends with blanks and empty lines",
        steps=(
            Step(text="  Two blanks before, three after.   ", run=(HELLO,)),
            Step(text="\n\n\tA tab.\n\n", run=(Act(command="cat out.txt; printf '  \\n\\n '", read="out.txt"),)),
            Step(text="All done. \n\n"),
        ),
    ),
    Row(
        name="long-output",
        what="a result of 190 kB and a reply of 20 kB",
        steps=(
            Step(run=(HELLO,)),
            Step(run=(Act(command="cat long.txt", read="long.txt"),)),
            Step(text="A long story. " * 1400, run=(LOOK,)),
            DONE,
        ),
        files={"long.txt": LONG},
    ),
    Row(
        name="parallel-calls",
        what="two calls in one reply",
        steps=(Step(text="Both at once.", run=(HELLO, TWO)), Step(run=(LOOK_AT_TWO,)), DONE),
        check='[ "$(cat out.txt two.txt)" = "hello\ntwo" ]',
    ),
    Row(
        name="tool-error",
        what="a command that fails and one that does not exist",
        steps=(
            Step(
                run=(Act(command="echo hello > out.txt; echo complaint >&2; (exit 3)", write=("out.txt", "hello\n")),)
            ),
            Step(run=(Act(command="no-such-program-anywhere", read="no-such-file-anywhere"),)),
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
