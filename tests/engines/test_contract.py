"""The engine contract over the scripted engine: by itself, and behind every protocol that has an adapter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from engines.contract import CHECKS, Factory, collect, tokenizes
from engines.worlds import World, factory_of, reached, scripted
from outrider.constraint import Constraint, ConstraintKind
from outrider.engines.base import GenerateRequest, SamplingParams, TakesConstraints


@pytest.mark.parametrize("check", [*CHECKS, tokenizes], ids=lambda check: check.__name__)
@pytest.mark.parametrize("world", get_args(World))
async def test_contract(world: World, check: Callable[[Factory], Awaitable[None]], tokenizer_folder: Path) -> None:
    await check(factory_of(world, tokenizer_folder))


ALTERED: dict[str, Any] = {
    "temperature": 0.5,
    "stop_token_ids": (2,),
    "min_tokens": 3,
    "repetition_penalty": 1.25,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {4: -100.0, 9: 2.5},
}
FORMS = [
    Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"object","properties":{"z":{"type":"string"},"a":{}}}'),
    Constraint(ConstraintKind.REGEX, "yes|no"),
    Constraint(ConstraintKind.GRAMMAR, 'root ::= "x"'),
    Constraint(ConstraintKind.TOOL_CALLS, '"required"'),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
@pytest.mark.parametrize("world", [world for world in get_args(World) if world != "direct"])
async def test_all_that_alters_sampling_crosses_the_wire(
    world: World, form: Constraint, tokenizer_folder: Path
) -> None:
    fake = scripted(tokenizer_folder)
    async with reached(world, fake, tokenizer_folder) as engine:
        asked = GenerateRequest(
            request_id="r" * 8,
            session_key="s",
            input_ids=np.array([5, 6], dtype=np.int32),
            sampling=SamplingParams(max_tokens=9, constraint=form, **ALTERED),
        )
        await collect(engine.generate(asked))
        assert isinstance(engine, TakesConstraints)
        assert form.kind in engine.constraints
    assert fake.requests[-1].sampling == asked.sampling
