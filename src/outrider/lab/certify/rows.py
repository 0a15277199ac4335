"""The rows (tests) of a certificate, as data. Each row has a task for the scripted model, and a check of the result.

A row names actions, not tools, so all harnesses have the same rows. Invariant: the first action of every row writes a
file. This distinguishes a harness that fails at a later step from one that runs nothing.
"""

from __future__ import annotations

from base64 import b64decode
from typing import Literal

import msgspec

MARK = "outrider-check/"
"""The text before the name of the row (the test) in a task's instruction. The scripted model searches prompts for this
text to find the row."""

SUBAGENT_MARK = "outrider-helper/"
"""The text before the name of the row in the task that a sub-agent gets."""

FIRST_WORD = "zqfirstwordqz"
"""The word that the model sends before it pauses, in the row `streaming` only."""

ACCENTS = "héllo wörld ✓ 日本語 🙂 e\u0301 \u05e9\u05dc\u05d5\u05dd"
LONG = "".join(f"line {number} of a long result, and on it goes\n" for number in range(4000))


IMAGE = "image.png"
PNG = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAAAwCAIAAAAuKetIAAAAQklEQVR42u3PQQkAAAgEsItyUY1uBb/CYA"
    "WWaV+LgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgMDVAi+qAIh8Hym6AAAAAElFTkSuQmCC"
)
"""The image of the row `image`: a PNG of 64x48 pixels."""


SERVER = "outrider_check"
"""Name of the MCP server of the row `mcp`."""
NOTE = "zqnoteqz"
"""The text that the model passes to the MCP server's tool."""
NOTE_FILE = "note.txt"
SKILLS = "/tmp/outrider-check-skills"
"""The sandbox's folder with the skill of the row `skill`. The harness gives the skill to the agent program."""
SKILL = "outrider-check"
OFFERED = "zqofferedqz"
"""A word that occurs only in the skill's description."""
READ = "zqreadqz"
"""A word that occurs only in the skill's instructions."""
SKILL_TEXT = f"""---
name: {SKILL}
description: How to write files for {OFFERED}. Use this skill before you write the file two.txt.
---

Write the word two into the file two.txt, as {READ} wants it.
"""


class ModelAction(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the model does, described without naming a tool. The harness's tools determine which field is
    used:

    - `command`: a shell command to run.
    - `write`, `read`: what to do instead of the command if the harness cannot run commands. `write` is the name and the
      text of a file to write, and `read` is the name of a file to read.
    - `look`: an image file to look at. Such an action has no command.
    - `note`: a text for the MCP server's tool. Such an action has no command.
    - `skill`: a skill to load with the program's own tool. Without such a tool, the other fields are used.
    """

    command: str = ""
    look: str | None = None
    note: str | None = None
    skill: str | None = None
    write: tuple[str, str] | None = None
    read: str | None = None


WRITE_HELLO = ModelAction(command="echo hello > out.txt", write=("out.txt", "hello\n"))
READ_HELLO = ModelAction(command="cat out.txt", read="out.txt")


class ScriptedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One reply of the scripted model: thinking, then text, then a tool call for each of `actions`.

    - `style`: how the JSON of the calls is written.
    - `subagent`: a task for a sub-agent. One more call starts the sub-agent.
    - `wait`: also call the tool that waits for the sub-agent, if there is one.
    - `raw`: text that is appended unchanged. It contains `malformed` malformed calls.
    - `stall`: pause after FIRST_WORD until the word has been sent to a client, or until a timeout.
    """

    text: str = ""
    think: str = ""
    actions: tuple[ModelAction, ...] = ()
    style: Literal["plain", "spaced", "escaped"] = "plain"
    subagent: str = ""
    wait: bool = False
    raw: str = ""
    malformed: int = 0
    stall: bool = False


class CertificationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One test of a certificate: a task and its check.

    - `steps`: the model's replies. The last reply is repeated if the harness makes more calls.
    - `check`: a shell command that succeeds if the actions were carried out.
    - `needs`: an optional feature of a harness. If the harness does not have it, the row is not tried.
    - `files`: the contents of files that are in the sandbox from the start, by name.
    """

    name: str
    what: str
    steps: tuple[ScriptedStep, ...]
    check: str = '[ "$(cat out.txt)" = hello ]'
    needs: Literal["subagent", "stream", "image", "mcp", "skill"] | None = None
    files: dict[str, str | bytes] = {}


WRITE_HELPED = ModelAction(command="echo helped > helped.txt", write=("helped.txt", "helped\n"))
SUBAGENT_STEPS = (ScriptedStep(actions=(WRITE_HELPED,)), ScriptedStep(text="The helper is done."))
"""The scripted model's replies to a sub-agent."""

WRITE_TWO = ModelAction(command="echo two > two.txt", write=("two.txt", "two\n"))
READ_TWO = ModelAction(command="cat two.txt", read="two.txt")
DONE = ScriptedStep(text="All done.")

ROWS = (
    CertificationRow(
        name="three-turns",
        what="write a file, read it, and report it",
        steps=(
            ScriptedStep(text="I will write the file.", actions=(WRITE_HELLO,)),
            ScriptedStep(actions=(READ_HELLO,)),
            DONE,
        ),
    ),
    CertificationRow(
        name="streaming",
        what="receive the first word before the reply is over",
        steps=(
            ScriptedStep(
                text=f"{FIRST_WORD} is what I say first, then I write the file.", actions=(WRITE_HELLO,), stall=True
            ),
            DONE,
        ),
        needs="stream",
    ),
    CertificationRow(
        name="reasoning",
        what="accept thinking before the text and before a call",
        steps=(
            ScriptedStep(think="First write,\nthen look.", text="Writing.", actions=(WRITE_HELLO,)),
            ScriptedStep(think="Now look.", actions=(READ_HELLO,)),
            ScriptedStep(think="Good.", text="All done."),
        ),
    ),
    CertificationRow(
        name="json-spacing",
        what="accept calls whose JSON has odd spaces and line breaks",
        steps=(
            ScriptedStep(actions=(WRITE_HELLO,), style="spaced"),
            ScriptedStep(text="And again.", actions=(READ_HELLO,), style="spaced"),
            DONE,
        ),
    ),
    CertificationRow(
        name="unicode",
        what="accept accents, other scripts and emoji in text, calls and results, escaped in JSON and not",
        steps=(
            ScriptedStep(
                text=f"I write {ACCENTS}.",
                actions=(ModelAction(command=f"printf %s '{ACCENTS}' > out.txt", write=("out.txt", ACCENTS)),),
            ),
            ScriptedStep(
                actions=(ModelAction(command=f"cat out.txt; echo '{ACCENTS}'", read="out.txt"),), style="escaped"
            ),
            ScriptedStep(text=f"{ACCENTS} is done."),
        ),
        check=f"[ \"$(cat out.txt)\" = '{ACCENTS}' ]",
    ),
    CertificationRow(
        name="whitespace",
        what="accept text that begins and ends with blanks and empty lines",
        steps=(
            ScriptedStep(text="  Two blanks before, three after.   ", actions=(WRITE_HELLO,)),
            ScriptedStep(
                text="\n\n\tA tab.\n\n",
                actions=(ModelAction(command="cat out.txt; printf '  \\n\\n '", read="out.txt"),),
            ),
            ScriptedStep(text="All done. \n\n"),
        ),
    ),
    CertificationRow(
        name="long-output",
        what="accept a result of 171 kB and a reply of 20 kB",
        steps=(
            ScriptedStep(actions=(WRITE_HELLO,)),
            ScriptedStep(actions=(ModelAction(command="cat long.txt", read="long.txt"),)),
            ScriptedStep(text="A long story. " * 1400, actions=(READ_HELLO,)),
            DONE,
        ),
        files={"long.txt": LONG},
    ),
    CertificationRow(
        name="parallel-calls",
        what="run two calls of one reply",
        steps=(
            ScriptedStep(text="Both at once.", actions=(WRITE_HELLO, WRITE_TWO)),
            ScriptedStep(actions=(READ_TWO,)),
            DONE,
        ),
        check='[ "$(cat out.txt two.txt)" = "hello\ntwo" ]',
    ),
    CertificationRow(
        name="tool-error",
        what="run a command that fails and one that does not exist",
        steps=(
            ScriptedStep(
                actions=(
                    ModelAction(
                        command="echo hello > out.txt; echo complaint >&2; (exit 3)", write=("out.txt", "hello\n")
                    ),
                )
            ),
            ScriptedStep(actions=(ModelAction(command="no-such-program-anywhere", read="no-such-file-anywhere"),)),
            DONE,
        ),
    ),
    CertificationRow(
        name="unknown-tool",
        what="handle a call of a tool that the harness does not have",
        steps=(
            ScriptedStep(actions=(WRITE_HELLO,)),
            ScriptedStep(raw='<tool_call>\n{"name": "no_such_tool", "arguments": {"x": 1}}\n</tool_call>'),
            DONE,
        ),
    ),
    CertificationRow(
        name="malformed-call",
        what="handle a call whose JSON breaks off, which the harness gets as text",
        steps=(
            ScriptedStep(actions=(WRITE_HELLO,)),
            ScriptedStep(
                text="Now look.",
                raw='\n<tool_call>\n{"name": "bash", "arguments": {"command": \n</tool_call>',
                malformed=1,
            ),
            DONE,
        ),
    ),
    CertificationRow(
        name="image",
        what="look at an image with a tool that reads files, and go on",
        steps=(
            ScriptedStep(actions=(WRITE_HELLO,)),
            ScriptedStep(actions=(ModelAction(look=IMAGE),)),
            ScriptedStep(actions=(WRITE_TWO,)),
            DONE,
        ),
        check='[ "$(cat out.txt two.txt)" = "hello\ntwo" ]',
        needs="image",
        files={IMAGE: PNG},
    ),
    CertificationRow(
        name="mcp",
        what="call a tool of an MCP server in the sandbox",
        steps=(
            ScriptedStep(actions=(WRITE_HELLO,)),
            ScriptedStep(text="I leave a note.", actions=(ModelAction(note=NOTE),)),
            DONE,
        ),
        check=f'[ "$(cat out.txt {NOTE_FILE})" = "hello\n{NOTE}" ]',
        needs="mcp",
    ),
    CertificationRow(
        name="skill",
        what="offer a skill of the task, and read its SKILL.md",
        steps=(
            ScriptedStep(actions=(WRITE_HELLO,)),
            ScriptedStep(
                text="The skill is for this.",
                actions=(
                    ModelAction(
                        skill=SKILL,
                        command=f'find "$HOME" {SKILLS} -name SKILL.md -exec cat {{}} +',
                        read=f"{SKILLS}/{SKILL}/SKILL.md",
                    ),
                ),
            ),
            ScriptedStep(actions=(WRITE_TWO,)),
            DONE,
        ),
        check='[ "$(cat out.txt two.txt)" = "hello\ntwo" ]',
        needs="skill",
        files={f"{SKILLS}/{SKILL}/SKILL.md": SKILL_TEXT},
    ),
    CertificationRow(
        name="sub-agent",
        what="let a sub-agent of its own do a part",
        steps=(
            ScriptedStep(actions=(WRITE_HELLO,)),
            ScriptedStep(text="A helper shall do it.", subagent="Write helped.txt."),
            ScriptedStep(text="It has its part.", wait=True),
            DONE,
        ),
        check='[ "$(cat out.txt helped.txt)" = "hello\nhelped" ]',
        needs="subagent",
    ),
)

TRIAL = CertificationRow(
    name="trial",
    what="call the tools that may start a sub-agent",
    steps=(ScriptedStep(text="One tool after the other."),),
    check="true",
)
"""The task of the trial sessions (see `SubagentTrial`), which run before the row `sub-agent`. The trial has no verdict
in the certificate."""


def row_named(name: str) -> CertificationRow | None:
    return next((row for row in (*ROWS, TRIAL) if row.name == name), None)
