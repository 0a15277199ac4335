"""The interface of a model call (`EngineCall`), and the objects that the calls on a node share.

There is one implementation for engines that take token ids and one for engines that take messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np

from outrider.concurrency.cancellation import OffloadThread
from outrider.dialects.base import Completion, Opening
from outrider.engines.base import ChatChunk, Chunk
from outrider.messages import Delta
from outrider.sessions.calls.limits import Intake, TokenShare
from outrider.sessions.priority_semaphore import PrioritySemaphore
from outrider.spec import Limits
from outrider.tokens.rendering.renderer import Renderer
from outrider.trajectory import Ids, Turn
from outrider.vision.preparer import DocumentReader, ImagePreparer

if TYPE_CHECKING:
    from outrider.engines.pool.call import PoolReply
    from outrider.engines.pool.pool import EnginePool

Step = Opening | Delta | Completion

T_contra = TypeVar("T_contra", bound=Chunk | ChatChunk, contravariant=True)


IMAGE_ROOM = 4 << 30
"""Maximum bytes of the images of all running calls on a node. The size of an image is that of its pixel values as sent
to the engine."""


def image_room() -> PrioritySemaphore:
    """Create the queue in which calls wait for memory for pixel values. One session gets at most half of IMAGE_ROOM."""
    return PrioritySemaphore(IMAGE_ROOM, share=0.5)


class ModelBackend(msgspec.Struct, frozen=True, kw_only=True):
    """One model on a node: the objects that all conversations with it share. All models of the node share `intake`,
    `image_room` and `offload`.

    images: None if the model reads no images.
    documents: None if documents cannot be read.
    intake: limits the memory for request bodies.
    image_room: the queue for memory for pixel values.
    offload: the thread for long work on requests.
    """

    renderer: Renderer
    pool: EnginePool
    model: str
    context_tokens: int | None = None
    intake: Intake = msgspec.field(default_factory=Intake)
    images: ImagePreparer | None = None
    documents: DocumentReader | None = None
    image_room: PrioritySemaphore = msgspec.field(default_factory=image_room)
    offload: OffloadThread = msgspec.field(default_factory=OffloadThread)


class FrozenModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that agents can call in addition to the policy. It is never trained. `limits` are the maximum turns and
    tokens of one attempt."""

    backend: ModelBackend
    limits: Limits


class EngineCall(Protocol):
    """One model call. The caller uses the methods in this order:

    1. `start` begins the generation. `share` comes from `Allowance.share(promised_tokens)`.
    2. `take` converts a chunk of the engine's reply into steps. `take` is called until `ended` is True or the
       generation ends.
    3. `finish` returns the remaining steps.
    4. `commit` returns the turn of a completed call. If the call is cut off, `abort` is called instead.
    """

    promised_tokens: int
    ended: bool
    """True once the reply is complete. The engine may still be generating then."""

    def start(self, share: TokenShare) -> PoolReply[Any]: ...
    def take(self, chunk: Any) -> list[Step]: ...
    def finish(self) -> list[Step]:
        """Return the steps that `take` has not returned yet. Raises EngineUnavailable if the last chunk had no finish
        reason."""
        ...

    def commit(self) -> Turn: ...
    def abort(self) -> Turn | None:
        """Return the turn of a call that was cut off, or None if no token that can be recorded was sampled."""
        ...

    def completion(self) -> Completion: ...


def count_differences(sent: Ids, reported: list[int]) -> int:
    """Return the number of positions at which two sequences of token ids differ, plus the difference of their
    lengths."""
    other = np.asarray(reported, dtype=np.int32)
    shared = min(len(sent), len(other))
    return int(np.count_nonzero(sent[:shared] != other[:shared])) + abs(len(sent) - len(other))
