"""What model calls on both kinds of engines have in common: the steps they give, and what they share on a node.

It knows neither limits nor the store.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from outrider.concurrency.offload import OffloadThread
from outrider.dialects.base import Completion, Opening
from outrider.engines.base import ChatChunk, Chunk, SamplingParams
from outrider.engines.pool.pool import EnginePool, PoolReply
from outrider.messages import Delta
from outrider.sessions.calls.body_limits import Intake
from outrider.sessions.calls.token_allowance import Share
from outrider.spec import Limits
from outrider.tokens.rendering.renderer import Renderer
from outrider.trajectory import Ids, Turn

Step = Opening | Delta | Completion

T_contra = TypeVar("T_contra", bound=Chunk | ChatChunk, contravariant=True)


class ModelBackend(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's conversations with one model share: how it is rendered and served, and, over all models, the memory
    for requests that arrive and the thread for long work on them."""

    renderer: Renderer
    pool: EnginePool
    model: str
    context_tokens: int | None = None
    intake: Intake = msgspec.field(default_factory=Intake)
    offload: OffloadThread = msgspec.field(default_factory=OffloadThread)


class FrozenModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model beside the policy that is never trained. `limits` holds its turns and tokens for one attempt."""

    backend: ModelBackend
    limits: Limits


class Call(Protocol):
    """One model call. `start` begins the generation and is called once, with the call's share of at least
    `promised_tokens`; `take` gives the steps of each chunk, until `ended` or the last one, and `finish` those that
    remain. Then either `commit` (it ran to its end) or `abort` gives its turn.
    """

    promised_tokens: int
    ended: bool
    """Whether the reply ends before its generation does."""

    def start(self, share: Share) -> PoolReply[Any]: ...
    def take(self, chunk: Any) -> list[Step]: ...
    def finish(self) -> list[Step]:
        """Raises EngineUnavailable where the last chunk had no finish."""
        ...

    def commit(self) -> Turn: ...
    def abort(self) -> Turn | None:
        """The turn of a call that was cut off; None when nothing was sampled that can be recorded."""
        ...

    def completion(self) -> Completion: ...


def clamped(sampling: SamplingParams, share: Share) -> SamplingParams:
    """The sampling of a call that begins now: while it waited for its share, others may have used the tokens up."""
    if sampling.max_tokens <= share.unsampled:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=share.unsampled)


def recorded(sampling: SamplingParams, thinking: bool | None) -> dict[str, Any]:
    """What a turn keeps of how it was sampled."""
    told: dict[str, Any] = msgspec.to_builtins(sampling, str_keys=True)
    return told | {"thinking": thinking}


def count_differences(sent: Ids, reported: list[int]) -> int:
    """Positions at which two id sequences differ, the difference of their lengths included."""
    other = np.asarray(reported, dtype=np.int32)
    shared = min(len(sent), len(other))
    return int(np.count_nonzero(sent[:shared] != other[:shared])) + abs(len(sent) - len(other))
