"""vLLM and SGLang behind a fake router. `tests/real/test_routers.py` runs the same checks with the real ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engines.routers import CHECKS, KINDS, Kind, Worlds, fake_router, refuses_what_it_would_drop, worlds_of


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_router_as_an_engine(
    kind: Kind, check: Callable[[Worlds], Awaitable[None]], tokenizer_folder: Path
) -> None:
    await check(worlds_of(kind, fake_router, tokenizer_folder))


async def test_what_a_router_would_drop_is_refused(tokenizer_folder: Path) -> None:
    await refuses_what_it_would_drop(worlds_of("sglang", fake_router, tokenizer_folder))
