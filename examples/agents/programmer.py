"""An agent for programming contests that needs no tool calls. It runs each program of the model on the public examples,
and sends the model the first wrong result.

    PYTHONPATH=examples/agents outrider serve --config outrider.toml --allow-plugin programmer
    outrider run examples/agents/contest.toml -n 8
"""

import re
from typing import Annotated

from pydantic import Field

from outrider.harnesses.base import HarnessOutcome
from outrider.messages import Message, Role
from outrider.spec import Spec

PROGRAM = "solution.py"
ASK = "{instruction}\nReply with the whole program in Python, between ```python and ```."
WRONG = (
    "For this input:\n{given}\nthe program printed:\n{said}\nIt must print:\n{wanted}\nReply with the whole program."
)
FENCED = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
SHOWN = 2000
"""Maximum number of characters of an input or output in a message to the model."""


class Example(Spec):
    given: str
    wanted: str


class Options(Spec):
    examples: Annotated[tuple[Example, ...], Field(strict=False)]
    tries: Annotated[int, Field(ge=1, le=20)] = 3
    example_seconds: float = 10


class Programmer:
    def __init__(self, options):
        self._options = Options.model_validate(options)

    async def init(self, context):
        """Nothing to prepare."""

    async def run(self, context):
        messages = [Message(role=Role.USER, content=ASK.format(instruction=context.task.instruction))]
        for _ in range(self._options.tries):
            reply = await context.model.chat(messages)
            programs = FENCED.findall(reply.content)
            if programs:
                await context.runtime.write(PROGRAM, programs[-1].encode("utf-8", "replace"))
                complaint = await self._complaint(context.runtime)
            else:
                complaint = "There is no program between ```python and ``` in your reply."
            if complaint is None:
                break
            messages += [reply, Message(role=Role.USER, content=complaint)]
        return HarnessOutcome(answer=reply.content)

    async def _complaint(self, runtime):
        """Return the message to the model about the first wrong result; None if all results are right."""
        for example in self._options.examples:
            ran = await runtime.exec(
                ["python3", PROGRAM],
                stdin=example.given.encode(),
                merged=True,
                seconds=self._options.example_seconds,
            )
            said = ran.stdout.decode("utf-8", "replace")
            if ran.exit_code != 0 or said.split() != example.wanted.split():
                said += "\n[it took too long]" if ran.timed_out else ""
                return WRONG.format(given=example.given[:SHOWN], said=said[-SHOWN:], wanted=example.wanted[:SHOWN])
        return None
