"""A small language for sessions of agent programs. A conversation is a function that plays one session: agents with
their histories, separate questions of the program, and the model's answers. Each call states the true use of its
answer.

The calls drive the real token tree (`Rollout`); only the model is scripted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from itertools import takewhile

import msgspec

from outrider.messages import Message, Role, ToolCall, ToolSpec
from outrider.tokens.tree.tree import Joined
from outrider.trajectory import BranchKind, BranchPolicy, FinishReason, Turn

from ..harnesses import IM_END, assistant, system, tool, user
from ..renderers import family_renderer, small_tokenizer
from ..rollout import Rollout
from ..strategies import hermes_call


class Use(StrEnum):
    """The program's use of an answer."""

    MAIN = "main"  # the conversation that does the task's work
    HELPER = "helper"  # another request, or the session's outcome, contains the answer: a sub-agent's, a voter's
    SUMMARY = "summary"  # a later history begins with the answer
    SIDE = "side"  # nothing uses the answer: a title, a quota
    UNUSED = "unused"  # the program went on with another answer to the same request
    CUT = "cut"  # the program hung up before the answer's end


class Session:
    """One session. `uses` has the true use of each turn. `hints` is True if the client names its agents."""

    def __init__(self, hints: bool) -> None:
        self.rollout = Rollout(family_renderer("qwen3"))
        self.uses: list[Use] = []
        self.hints = hints
        self.continues: dict[int, list[int]] = {}
        """The summaries that a turn's request continues from, by index of the turn."""

    def agent(self, use: Use | str, says: str = "", tools: str = "", *, name: str = "", of: str = "") -> Agent:
        """A new agent with an empty history; `says` is its system prompt, `tools` are names. With hints, the client
        names the agent and its parent `of`."""
        return Agent(self, Use(use), says, tools, Hints(name or None, of or None))

    def ask(self, use: Use | str, question: str, answer: str, *, says: str = "", tools: str = "") -> str:
        """Send one question in a history of its own. Returns the answer."""
        return self.agent(use, says, tools).hears(question).says(answer)

    def at_once(self, *calls: tuple[Agent, str]) -> None:
        """Send the requests of all agents before the first answer arrives. The answers arrive in the order of
        `calls`."""
        joined = [agent.send() for agent, _ in calls]
        for (agent, said), request in zip(calls, joined, strict=True):
            agent.receive(request, said)

    @property
    def turns(self) -> list[Turn]:
        return self.rollout.turns

    @property
    def transcript_turn(self) -> int:
        """The turn whose path an evaluator must receive."""
        return max(turn.index for turn in self.turns if self.uses[turn.index] is Use.MAIN)


class Hints(msgspec.Struct, frozen=True):
    """Hints that a client sends about a call."""

    agent_id: str | None = None
    parent_agent_id: str | None = None
    purpose: str | None = None


class Agent:
    """One history, and the head of its requests. `history` has no system messages, and may be edited."""

    def __init__(self, session: Session, use: Use, says: str, tools: str, hints: Hints) -> None:
        self.session = session
        self.use = use
        self.head = says
        self.tools = tools
        self.hints = hints
        self.history: list[Message] = []

    def hears(self, text: str) -> Agent:
        """Add a user message."""
        self.history.append(user(text))
        return self

    def said(self, text: str) -> Agent:
        """Add an assistant message that the model did not sample in this history."""
        self.history.append(assistant(text))
        return self

    def said_call(self, tool: str, result: str) -> Agent:
        """Add a tool call that the program made up, with its result."""
        call = ToolCall(f"made-up-{len(self.history)}", tool, "{}")
        self.history.append(Message(role=Role.ASSISTANT, content="", tool_calls=(call,)))
        self.history.append(Message(role=Role.TOOL, content=result, tool_call_id=call.id))
        return self

    def says(self, text: str) -> str:
        """Send the history, and receive `text` as the model's answer. Returns the answer's content."""
        self.receive(self.send(), text)
        return self.history[-1].content

    def calls(self, tool: str, /, thought: str = "", **arguments: object) -> Agent:
        """The model calls a tool. `gets` adds the result."""
        return self.calls_all((tool, arguments), thought=thought)

    def calls_all(self, *calls: tuple[str, Mapping[str, object]], thought: str = "") -> Agent:
        """The model calls several tools in one answer."""
        self.says("\n".join([*([thought] if thought else []), *(hermes_call(*call) for call in calls)]))
        return self

    def gets(self, *results: str) -> Agent:
        """Add the results of the tools that the last answer called."""
        last = next(message for message in reversed(self.history) if message.role is Role.ASSISTANT)
        self.history += [
            Message(role=Role.TOOL, content=text, tool_call_id=call.id)
            for call, text in zip(last.tool_calls, results, strict=True)
        ]
        return self

    def does(self, tool: str, result: str, /, thought: str = "", **arguments: object) -> Agent:
        """The model calls a tool and gets the result."""
        return self.calls(tool, thought, **arguments).gets(result)

    def aside(
        self,
        use: Use | str,
        question: str,
        answer: str,
        *,
        says: str | None = None,
        tools: str | None = None,
        purpose: str = "",
    ) -> str:
        """Send a question at the end of the history, which keeps neither the question nor the answer. By default the
        head is the agent's. With hints, the client names the purpose. Returns the answer."""
        other = self.hands_over(self.head if says is None else says, self.tools if tools is None else tools, use=use)
        other.hints = msgspec.structs.replace(self.hints, purpose=purpose or None)
        return other.hears(question).says(answer)

    def hands_over(self, says: str, tools: str = "", *, use: Use | str | None = None) -> Agent:
        """Return another agent with a copy of the history."""
        other = Agent(self.session, Use(use or self.use), says, tools, self.hints)
        other.history = list(self.history)
        return other

    def begins_anew(self, *messages: Message) -> Agent:
        """Replace the history. If the last answers were summaries, the next request continues from them."""
        self.history = list(messages)
        uses = self.session.uses
        last = takewhile(lambda index: uses[index] is Use.SUMMARY, reversed(range(len(uses))))
        self.session.continues[len(uses)] = list(last)
        return self

    def unused(self, text: str) -> None:
        """The model gives an answer that the program does not use."""
        self.hands_over(self.head, self.tools, use=Use.UNUSED).says(text)

    def cut(self, text: str) -> None:
        """The program hangs up after `text`, which is the beginning of the answer."""
        self.receive(self.send(), text, cut=True)

    def written_out(self, *, skip: int = 0) -> str:
        """The history as text, without its first `skip` messages."""
        return "\n".join(
            f"[{message.role.value}]: {message.content} {' '.join(call.arguments for call in message.tool_calls)}"
            for message in self.history[skip:]
        )

    def send(self) -> Joined:
        return self.session.rollout.join([*map(system, filter(None, [self.head])), *self.history], self._specs)

    def receive(self, request: Joined, said: str, *, cut: bool = False) -> None:
        rollout = self.session.rollout
        ids = [*small_tokenizer().encode(said), *([] if cut else [IM_END])]
        finish = FinishReason.ABORT if cut else FinishReason.STOP
        reply = rollout.answer(request, ids, tools=self._specs, finish=finish)
        if self.session.hints:
            told = msgspec.structs.asdict(self.hints)
            rollout.turns[-1] = msgspec.structs.replace(rollout.turns[-1], **told)
        self.session.uses.append(Use.CUT if cut else self.use)
        if not cut:
            self.history.append(reply)

    @property
    def _specs(self) -> tuple[ToolSpec, ...]:
        return tool(*self.tools.split())


class Conversation(msgspec.Struct, frozen=True):
    """A conversation of the corpus.

    policy: the task's policy where it differs from the default.
    has_transcript: an evaluator must receive the path to the last `main` turn.
    one_history: the `main` turns share one history, as the answers sent back show, so all must be of kind main.
    replaces: the program begins a history anew without a summary, or cuts it to its end, so that turns may be of kind
        compaction.
    """

    name: str
    hints: bool
    play: Callable[[Session], None]
    policy: dict[BranchKind, BranchPolicy]
    has_transcript: bool
    one_history: bool
    replaces: bool


CORPUS: dict[str, Conversation] = {}
"""All conversations by name."""


def conversation(
    *,
    hints: Sequence[bool] = (False,),
    policy: dict[BranchKind, BranchPolicy] | None = None,
    has_transcript: bool = True,
    one_history: bool = False,
    replaces: bool = False,
) -> Callable[[Callable[[Session], None]], Callable[[Session], None]]:
    """Add a conversation to the corpus: once for each value of `hints`."""

    def add(play: Callable[[Session], None]) -> Callable[[Session], None]:
        for named in hints:
            name = play.__name__ + ("_with_hints" if named else "")
            assert name not in CORPUS
            CORPUS[name] = Conversation(name, named, play, policy or {}, has_transcript, one_history, replaces)
        return play

    return add


@cache
def played(name: str) -> Session:
    """The session of a conversation."""
    found = CORPUS[name]
    session = Session(found.hints)
    found.play(session)
    assert len(session.uses) == len(session.turns)
    return session
