"""The engine contract over the scripted engine: by itself, and behind every protocol an adapter speaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import get_args

import pytest

from engines.contract import CHECKS, Factory, tokenizes
from engines.worlds import World, factory_of


@pytest.mark.parametrize("check", [*CHECKS, tokenizes], ids=lambda check: check.__name__)
@pytest.mark.parametrize("world", get_args(World))
async def test_contract(world: World, check: Callable[[Factory], Awaitable[None]], tokenizer_folder: Path) -> None:
    await check(factory_of(world, tokenizer_folder))
