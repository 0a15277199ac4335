"""A node's proxy for an engine that only the service can reach: images are refused, and known ids are passed on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import cast

import msgspec
import numpy as np
import pytest

from outrider.constraint import ConstraintKind
from outrider.engines.base import (
    Capability,
    ChatChunk,
    ChatRequest,
    Chunk,
    EngineHealth,
    GenerateRequest,
    RequestImage,
    SamplingParams,
)
from outrider.engines.pool.leader import pool_state
from outrider.engines.pool.placement import EngineState, serving
from outrider.engines.pool.pool import EnginePool
from outrider.engines.pool.waits import Overdue
from outrider.errors import EngineError, EngineRejected
from outrider.messages import Message, Role
from outrider.nodes.messages import GenerateChat
from outrider.nodes.service_proxy import ForwardedEngine
from outrider.tokens.rendering.image_grids import ImageForm
from outrider.trajectory import FinishReason, ImageSpan, LogprobKind, TokenMode

from .test_calls import both


class Keeps:
    """A chat engine that returns the known ids of a request as its prompt ids."""

    name = "keeps"
    mode = TokenMode.CAPTURE
    logprob_kind = LogprobKind.RAW
    constraints = frozenset[ConstraintKind]()
    capabilities = frozenset({Capability.KEEPS_IDS})

    async def start(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=True)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        yield ChatChunk(finish=FinishReason.STOP, prompt_ids=request.known_ids)


class Sees(Keeps):
    """An engine that takes token ids and images."""

    name = "sees"
    mode = TokenMode.TOKENS
    capabilities = frozenset({Capability.READS_PATCHES})

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        assert not request.images
        yield Chunk(ids=[1], logprobs=[0.0], finish=FinishReason.STOP)


async def test_images_are_not_forwarded_and_the_error_is_the_engines_and_not_the_agents() -> None:
    image = RequestImage(span=ImageSpan("d" * 64, 1, 1, (1, 2, 2)), item=b"AAAA")
    request = GenerateRequest(
        request_id="r",
        session_key="k",
        input_ids=np.asarray([1, 2, 3], dtype=np.int32),
        sampling=SamplingParams(max_tokens=8),
        images=(image,),
    )
    async with EnginePool() as leader, EnginePool() as node, both() as ends:
        await leader.add_engine(Sees())
        [state] = pool_state(leader).engines
        await node.adopt(state, ForwardedEngine(ends.caller, None, state))
        assert serving(node.members["sees"]).image_form is ImageForm.PATCHES
        with pytest.raises(EngineError, match="forwards no images") as raised:
            [_ async for _ in node.calls.generate(request, Overdue())]
        assert not isinstance(raised.value, EngineRejected)  # a rejection may be the client's fault


async def test_a_node_gives_an_engine_of_the_service_the_ids_to_keep() -> None:
    request = ChatRequest(
        request_id="r",
        session_key="k",
        messages=(Message(role=Role.USER, content="go on"),),
        tools=(),
        sampling=SamplingParams(max_tokens=8),
        known_ids=[1, 2, (1 << 31) - 1],
    )

    async def generate_chat(call: GenerateChat) -> AsyncGenerator[object, None]:
        async for chunk in Keeps().chat(call.request):
            yield chunk

    async with EnginePool() as leader, EnginePool() as node, both(GenerateChat=generate_chat) as ends:
        await leader.add_engine(Keeps())
        [state] = pool_state(leader).engines
        # Encoded and decoded, as over a link.
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=EngineState)
        await node.adopt(received, ForwardedEngine(ends.caller, None, received))
        assert serving(node.members["keeps"]).keeps_ids
        engine = cast(ForwardedEngine, node.engine("keeps"))
        assert [chunk.prompt_ids async for chunk in engine.chat(request)] == [[1, 2, (1 << 31) - 1]]
        # An engine of the same name and kind that does not keep ids has replaced the engine.
        engine.apply_state(msgspec.structs.replace(received, capabilities=frozenset()))
        assert not serving(node.members["keeps"]).keeps_ids
