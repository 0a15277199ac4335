"""The rows of a certificate, as data: for each row a scripted task, and the check that the task must pass.

No harness and no tool is named here. Invariant: every row writes a file with the first command, so that a harness that
fails at a later step differs from a harness that runs nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MARK = "outrider-check/"
"""Prefix of the row's name in the instruction, by which prompts are matched to rows."""

SUBAGENT_MARK = "outrider-helper/"
"""The same prefix in the task of a sub-agent."""

FIRST_WORD = "zqfirstwordqz"
"""Sent before the pause of the streaming row, and nowhere else."""

ACCENTS = "héllo wörld ✓ 日本語 🙂 e\u0301 \u05e9\u05dc\u05d5\u05dd"
LONG = "".join(f"line {number} of a long result, and on it goes\n" for number in range(4000))


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """An action of the model, with a shell `command`. For a harness without a tool for commands, the action is a tool
    call that writes a file (`write` is its name and text) or reads the file `read`."""

    command: str
    write: tuple[str, str] | None = None
    read: str | None = None


WRITE_HELLO = Action(command="echo hello > out.txt", write=("out.txt", "hello\n"))
READ_HELLO = Action(command="cat out.txt", read="out.txt")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A reply of the model: thinking, text, then a tool call for each of `actions`, with its JSON written in `style`.

    `subagent` is a task for a sub-agent. `wait` calls a tool that waits for the sub-agent, if there is such a tool.
    `raw` is appended unchanged and contains `malformed` malformed calls. `stall` pauses after FIRST_WORD until a client
    was sent that word.
    """

    text: str = ""
    think: str = ""
    actions: tuple[Action, ...] = ()
    style: Literal["plain", "spaced", "escaped"] = "plain"
    subagent: str = ""
    wait: bool = False
    raw: str = ""
    malformed: int = 0
    stall: bool = False


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A task. `steps` are the model's replies; the last is repeated if the harness requests more. `check` is a shell
    command that succeeds if the actions were carried out. `needs` is a feature that a harness may lack; the row is then
    not tried. `files` are in the sandbox at the start, by name."""

    name: str
    what: str
    steps: tuple[Step, ...]
    check: str = '[ "$(cat out.txt)" = hello ]'
    needs: Literal["subagent", "stream"] | None = None
    files: dict[str, str] = {}


WRITE_HELPED = Action(command="echo helped > helped.txt", write=("helped.txt", "helped\n"))
SUBAGENT_STEPS = (Step(actions=(WRITE_HELPED,)), Step(text="The helper is done."))
"""The model's replies to a sub-agent."""

WRITE_TWO = Action(command="echo two > two.txt", write=("two.txt", "two\n"))
READ_TWO = Action(command="cat two.txt", read="two.txt")
DONE = Step(text="All done.")

ROWS = (
    Row(
        name="three-turns",
        what="write a file, read it, say so",
        steps=(Step(text="I will write the file.", actions=(WRITE_HELLO,)), Step(actions=(READ_HELLO,)), DONE),
    ),
    Row(
        name="streaming",
        what="the first word reaches the program before the reply is over",
        steps=(
            Step(text=f"{FIRST_WORD} is what I say first, then I write the file.", actions=(WRITE_HELLO,), stall=True),
            DONE,
        ),
        needs="stream",
    ),
    Row(
        name="reasoning",
        what="thinking before the text and before a call",
        steps=(
            Step(think="First write,\nthen look.", text="Writing.", actions=(WRITE_HELLO,)),
            Step(think="Now look.", actions=(READ_HELLO,)),
            Step(think="Good.", text="All done."),
        ),
    ),
    Row(
        name="json-spacing",
        what="calls whose JSON has odd spaces and line breaks",
        steps=(
            Step(actions=(WRITE_HELLO,), style="spaced"),
            Step(text="And again.", actions=(READ_HELLO,), style="spaced"),
            DONE,
        ),
    ),
    Row(
        name="unicode",
        what="accents, other scripts and emoji in text, calls and results; escaped in JSON and not",
        steps=(
            Step(
                text=f"I write {ACCENTS}.",
                actions=(Action(command=f"printf %s '{ACCENTS}' > out.txt", write=("out.txt", ACCENTS)),),
            ),
            Step(actions=(Action(command=f"cat out.txt; echo '{ACCENTS}'", read="out.txt"),), style="escaped"),
            Step(text=f"{ACCENTS} is done."),
        ),
        check=f"[ \"$(cat out.txt)\" = '{ACCENTS}' ]",
    ),
    Row(
        name="whitespace",
        what="text that begins and ends with blanks and empty lines",
        steps=(
            Step(text="  Two blanks before, three after.   ", actions=(WRITE_HELLO,)),
            Step(text="\n\n\tA tab.\n\n", actions=(Action(command="cat out.txt; printf '  \\n\\n '", read="out.txt"),)),
            Step(text="All done. \n\n"),
        ),
    ),
    Row(
        name="long-output",
        what="a result of 190 kB and a reply of 20 kB",
        steps=(
            Step(actions=(WRITE_HELLO,)),
            Step(actions=(Action(command="cat long.txt", read="long.txt"),)),
            Step(text="A long story. " * 1400, actions=(READ_HELLO,)),
            DONE,
        ),
        files={"long.txt": LONG},
    ),
    Row(
        name="parallel-calls",
        what="two calls in one reply",
        steps=(Step(text="Both at once.", actions=(WRITE_HELLO, WRITE_TWO)), Step(actions=(READ_TWO,)), DONE),
        check='[ "$(cat out.txt two.txt)" = "hello\ntwo" ]',
    ),
    Row(
        name="tool-error",
        what="a command that fails and one that does not exist",
        steps=(
            Step(
                actions=(
                    Action(command="echo hello > out.txt; echo complaint >&2; (exit 3)", write=("out.txt", "hello\n")),
                )
            ),
            Step(actions=(Action(command="no-such-program-anywhere", read="no-such-file-anywhere"),)),
            DONE,
        ),
    ),
    Row(
        name="unknown-tool",
        what="a call of a tool that the harness does not have",
        steps=(
            Step(actions=(WRITE_HELLO,)),
            Step(raw='<tool_call>\n{"name": "no_such_tool", "arguments": {"x": 1}}\n</tool_call>'),
            DONE,
        ),
    ),
    Row(
        name="malformed-call",
        what="a call whose JSON breaks off: the harness is given it as text",
        steps=(
            Step(actions=(WRITE_HELLO,)),
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
            Step(actions=(WRITE_HELLO,)),
            Step(text="A helper shall do it.", subagent="Write helped.txt."),
            Step(text="It has its part.", wait=True),
            DONE,
        ),
        check='[ "$(cat out.txt helped.txt)" = "hello\nhelped" ]',
        needs="subagent",
    ),
)


def row_named(name: str) -> Row | None:
    return next((row for row in ROWS if row.name == name), None)
