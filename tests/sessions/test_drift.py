"""Drift in `tokens` mode: the prompt that an engine reports is compared with the prompt that it received."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from outrider.engines.base import Chunk, EngineOptions, GenerateRequest
from outrider.lab.fakes.scripted_engine import ScriptedEngine

from .world import a_world

USER = {"role": "user", "content": "hello there"}


class Echoing(ScriptedEngine):
    """An engine whose first chunk returns the prompt's ids, the first `changed` of them altered, and whose last chunk
    reports a prompt length that is `more` tokens too large."""

    def __init__(self, options: EngineOptions, *, changed: int | None, more: int | None) -> None:
        super().__init__(options)
        self._ids_changed = changed
        self._more = more

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        ids: list[int] | None = None
        if self._ids_changed is not None:
            ids = [token + (at < self._ids_changed) for at, token in enumerate(request.input_ids.tolist())]
        async for chunk in super().generate(request):
            told = None if chunk.finish is None or self._more is None else len(request.input_ids) + self._more
            yield msgspec.structs.replace(chunk, prompt_ids=ids, prompt_tokens=told)
            ids = None


@pytest.mark.parametrize(
    ("changed", "more", "drift"),
    [
        (None, None, 0),
        (None, 0, 0),
        (None, 2, 2),
        (None, -1, 1),
        (0, 0, 0),
        (3, 0, 3),
        (3, None, 3),
        (3, 1, 3),
        (1, 4, 4),
    ],
)
async def test_the_greatest_difference_counts(tmp_path: Path, changed: int, more: int, drift: int) -> None:
    async with a_world(tmp_path, ["one two<|im_end|>"], kind=partial(Echoing, changed=changed, more=more)) as world:
        await world.ask(USER)
        assert [turn.drift_tokens for turn in world.turns] == [drift]
