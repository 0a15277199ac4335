"""Runs demo sessions without a service, to train the shipped policy. It uses the embedded engine's batch and an
imitated sandbox.

Invariant: the ids of a session are exactly the model's input ids and sampled ids, in order.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from outrider.engines.base import GenerateRequest, SamplingParams
from outrider.engines.embedded.batch import Row, RowBatch
from outrider.engines.embedded.model import Llama
from outrider.engines.embedded.sequence import RequestChecker
from outrider.lab.demo.dialogue import END, Script, tool_output
from outrider.lab.demo.task import MAX_TOKENS, TURNS, Episode, score
from outrider.messages import Message, Role, ToolCall
from outrider.tokens.rendering.tokenizer import Tokenizer


class SimulatedSession(msgspec.Struct):
    """A simulated session. `spoken` has a flag for each of `ids`: True if the id was sampled. `logprobs` has one value
    for each sampled id."""

    episode: Episode
    ids: list[int]
    spoken: list[bool]
    logprobs: list[float]
    transcript: list[Message]

    @property
    def reward(self) -> float:
        return score(self.transcript, item=self.episode.item, zone=self.episode.zone).reward


ROWS = 128


class Simulator:
    """Runs episodes (instances of the demo task) at temperature 1, at most ROWS at once. `model` may be trained between
    two calls of `run`."""

    def __init__(self, model: Llama, tokenizer: Tokenizer, script: Script, *, seed: int) -> None:
        self._batch: RowBatch[Row] = RowBatch(model.extend, kept=ROWS)
        self._checker = RequestChecker(vocab=model.shape.vocab, context=256, tokenizer=None)
        self._tokenizer = tokenizer
        self._script = script
        self._stop_ids = tuple(tokenizer.encode(END))
        self._seeds = random.Random(seed)

    def run(self, episodes: Sequence[Episode]) -> list[SimulatedSession]:
        """Run one session for each episode. Returns the sessions in the order of the episodes."""
        rollouts = []
        for episode in episodes:
            prompt = self._tokenizer.encode(self._script.prompt(episode.question))
            rollouts.append(SimulatedSession(episode, prompt, [False] * len(prompt), [], []))
        waiting = deque(self._ask(rollout) for rollout in rollouts)
        going = dict(zip(waiting, rollouts, strict=True))
        stale = True  # True drops cached values: the trainer may have changed the weights in place
        while going:
            new = [waiting.popleft() for _ in range(min(len(waiting), ROWS - len(self._batch.rows)))]
            for row, chunk in self._batch.step(new, 0, stale=stale):
                rollout = going[row]
                rollout.ids += chunk.ids
                rollout.spoken += [True] * len(chunk.ids)
                rollout.logprobs += chunk.logprobs
                if chunk.finish is not None:
                    del going[row]
                    if self._answer(rollout, len(row.sequence.prompt)):
                        waiting.append(self._ask(rollout))
                        going[waiting[-1]] = rollout
            stale = False
        return rollouts

    def _ask(self, rollout: SimulatedSession) -> Row:
        seed = self._seeds.getrandbits(48)
        request = GenerateRequest(
            request_id="simulated",
            session_key="simulated",
            input_ids=np.asarray(rollout.ids, dtype=np.int32),
            sampling=SamplingParams(max_tokens=MAX_TOKENS, seed=seed, stop_token_ids=self._stop_ids),
        )
        return Row(self._checker.check(request))

    def _answer(self, rollout: SimulatedSession, start: int) -> bool:
        """Add the reply whose ids begin at `start` to the transcript. If the reply calls a command that the imitated
        sandbox can run, also add the output. Returns False if the session is over."""
        text = self._tokenizer.decode(rollout.ids[start:]).removesuffix(END)
        command = called_command(text)
        if command is None:
            rollout.transcript.append(Message(role=Role.ASSISTANT, content=text))
            return False
        call = ToolCall("call", "bash", json.dumps({"command": command}))
        rollout.transcript.append(Message(role=Role.ASSISTANT, tool_calls=(call,)))
        output = tool_output(rollout.episode, command)
        turns = sum(message.role is Role.ASSISTANT for message in rollout.transcript)
        if output is None or turns == TURNS:
            return False
        rollout.transcript.append(Message(role=Role.TOOL, content=output, tool_call_id="call"))
        result = self._tokenizer.encode(self._script.result(output))
        rollout.ids += result
        rollout.spoken += [False] * len(result)
        return True


def called_command(text: str) -> str | None:
    """Return the command in a well-formed call of the bash tool; None for any other text."""
    inner = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    if f"<tool_call>\n{inner}\n</tool_call>" != text:
        return None
    try:
        call = json.loads(inner)
        command = call["arguments"]["command"] if call["name"] == "bash" else None
    except (ValueError, KeyError, TypeError):
        return None
    return command if isinstance(command, str) else None
