"""The tasks of a run, drawn from its seed: agents that make a few model calls and retry calls that fail.

All agents are honest: only an injected fault can cost a reward of 1. Some agents give up a call after some seconds,
and exit after three such calls in a row, with code 0 or with an error.

An agent notes each reply that it has read to its end. Its verdict returns the notes (`told`), so that the campaign
can require a stored turn for each of them.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

from outrider.errors import EngineError
from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.messages import Message, Role

SESSIONS = 4
"""Number of sessions in each group."""
MAX_ATTEMPTS = 8
NOTES = "notes.json"
PATIENCE = 60
"""Number of retries of an agent, 0.2 seconds apart."""
IMPATIENCE = 3
"""Number of retries of an agent that gives up calls after some seconds."""
GIVES_UP = (0.0, 0.0, 2.0, 5.0, 12.0)
"""Seconds after which an agent gives up a call; 0 means that the agent waits without limit."""

PROGRAM = """
address=${OPENAI_BASE_URL#http://}; path=/${address#*/}; address=${address%%/*}
exec 9<> <(:)
history='{"role": "user", "content": "'$OUTRIDER_INSTRUCTION'"}'
ask() {
    { exec 3<>"/dev/tcp/${address%:*}/${address#*:}"; } 2>/dev/null || return 1
    body='{"model": "m", "stream": '$2', "messages": ['$history']}'
    printf '%s\\r\\n' "POST $path/chat/completions HTTP/1.1" "Host: x" "Connection: close" \\
        "Content-Type: application/json" "Content-Length: ${#body}" "" >&3
    printf %s "$body" >&3
    answer=$(timeout $4 cat <&3); exec 3>&-
    [[ $answer == "HTTP/1.1 200"* && $answer == *'"finish_reason":"stop"'* ]] || return 1
    [[ $2 == false || $answer == *"[DONE]"* ]] || return 1
    content=
    while [[ $answer =~ \\"content\\":\\"([a-z]+)\\"(.*) ]]; do
        content+=${BASH_REMATCH[1]}; answer=${BASH_REMATCH[2]}
    done
}
for ((turn = 1; turn <= $1; turn++)); do
    tries=0
    until ask "$@"; do ((++tries < $3)) || exit $5; read -rt 0.2 -u 9; done
    history+=', {"role": "assistant", "content": "'$content'"}, {"role": "user", "content": "go on"}'
    told+="$content "
    printf '{"told": "%s"}' "$told" > notes.json
done
"""


class Talker:
    """The same agent as a harness in the service's own process."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._turns: int = options["turns"]
        self._gives_up: float | None = options["gives_up"] or None
        self._tries: int = options["tries"]
        self._code: int = options["code"]

    async def init(self, context: HarnessContext) -> None:
        pass

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        messages = [Message(role=Role.USER, content=context.task.instruction)]
        told = []
        for _ in range(self._turns):
            for _ in range(self._tries):
                try:
                    async with asyncio.timeout(self._gives_up):
                        reply = await context.model.chat(messages)
                    break
                except (EngineError, TimeoutError):
                    await asyncio.sleep(0.2)
            else:
                if self._code:
                    raise TimeoutError("the model did not answer")
                return HarnessOutcome()
            messages += [reply, Message(role=Role.USER, content="go on")]
            told.append(reply.content)
            await context.runtime.write(NOTES, json.dumps({"told": " ".join(told)}).encode())
        return HarnessOutcome()


async def grade(outcome: Outcome) -> dict[str, Any]:
    """Grade with 1 if the agent has noted a reply for each of its turns, which only a fault can prevent. The verdict's
    reason has the replies."""
    told = json.loads(await outcome.runtime.read(NOTES))["told"]
    done = len(told.split()) == outcome.task.evaluator.options["turns"]
    return {"reward": float(done), "reason": told}


def draw_groups(rng: random.Random, count: int, *, runtime: str, callback: str) -> list[dict[str, Any]]:
    """Draw `count` groups. `runtime` is the runtime of agents in bash; half of the groups have the `callback`."""
    return [_group(rng, number, runtime, callback) for number in range(count)]


def _group(rng: random.Random, number: int, runtime: str, callback: str) -> dict[str, Any]:
    turns = rng.randint(1, 4)
    stream = rng.choice(("true", "false"))
    gives_up, code = rng.choice(GIVES_UP), rng.choice((0, 7))
    tries = IMPATIENCE if gives_up else PATIENCE
    harness: dict[str, Any] = {
        "command": ["bash", "-c", PROGRAM, "agent", str(turns), stream, str(tries), str(gives_up), str(code)],
        "nonzero_exit": rng.choice(("error", "grade")),
    }
    kind = runtime
    if runtime == "memory" or rng.random() < 0.25:
        options = {"turns": turns, "gives_up": gives_up, "tries": tries, "code": code}
        harness, kind = {"agent": "campaign.tasks:Talker", "options": options}, "memory"
    group = {
        "idempotency_key": f"campaign-{number}",
        "n": SESSIONS,
        "priority": rng.randint(-2, 2),
        "task": {
            "instruction": f"Say something, number {number}.",
            "harness": harness,
            "runtime": {"kind": kind, "prepare": [{"write": '{"told": ""}', "to": NOTES}]},
            "evaluator": {
                "kind": "callable",
                "path": "campaign.tasks:grade",
                "options": {"turns": turns},
                "seconds": 30.0,
            },
            "limits": {"agent_seconds": 30.0, "session_seconds": 120.0},
            "max_attempts": MAX_ATTEMPTS,
        },
    }
    return group | ({"callback_url": callback} if number % 2 else {})
