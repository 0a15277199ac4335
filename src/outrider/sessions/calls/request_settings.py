"""What a client asks for besides its messages, held against what the session's engine can do.

Pure. It knows no dialect and no engine but by what they say of themselves. Invariant: nothing that is asked for is left
out without a name for it, which the turn keeps.
"""

from __future__ import annotations

import msgspec

from outrider.dialects.base import AskedSampling, ModelRequest
from outrider.engines.base import SamplingParams
from outrider.engines.pool.member import ServingEngine
from outrider.errors import RequestError
from outrider.trajectory import TokenMode


def rests_on_the_client(asked: AskedSampling) -> bool:
    """Whether an engine may have refused something that no task can choose, such as a schema that does not compile: an
    agent must not be able to make its session fail as if its engine had."""
    return asked.constraint is not None or bool(asked.logit_bias) or bool(asked.stop_token_ids)


def check_form(request: ModelRequest, assigned: ServingEngine) -> None:
    """Raises RequestError for a form that a reply cannot be held to."""
    constraint = request.sampling.constraint
    if constraint is None:
        return
    if constraint.kind not in assigned.constraints:
        raise RequestError(
            f"engine {assigned.engine!r} cannot hold a reply to a {constraint.kind.value}",
            hint="ask without structured output, or attach an engine that can: docs/engines.md",
        )
    if request.tools and assigned.mode is TokenMode.TOKENS:
        raise RequestError(
            "a reply that is held to a form cannot call a tool: structured output and tools cannot be had at once",
            hint="ask for the form in a request without tools, or with the tool choice `none`",
        )


def in_openais_words(
    sampling: SamplingParams, thinking: bool | None, client: AskedSampling
) -> tuple[SamplingParams, tuple[str, ...]]:
    """What a server of OpenAI's own API can be told, and what of the rest was asked for."""
    neutral = SamplingParams(max_tokens=sampling.max_tokens)
    unknown = ("top_k", "min_p", "repetition_penalty", "min_tokens")
    asked = [name for name in unknown if getattr(sampling, name) != getattr(neutral, name)]
    told = msgspec.structs.replace(sampling, **{name: getattr(neutral, name) for name in unknown})
    asked += ["stop_token_ids"] * bool(client.stop_token_ids) + ["thinking"] * (thinking is not None)
    return told, tuple(asked)
