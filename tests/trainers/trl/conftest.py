"""A real service for the tests of training loops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.client.client import Client
from outrider.config import Config, LanesConfig, ModelConfig
from outrider.lab.demo.dialogue import POLICY, RENDERER
from outrider.lab.demo.service_process import service_process
from outrider.spec import EngineSpec


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """A client of a service in another process, whose embedded engine runs the demo's policy."""
    config = Config(
        port=0,
        data=tmp_path / "data",
        model=ModelConfig(tokenizer=str(POLICY), renderer=RENDERER, name="demo-policy"),
        lanes=LanesConfig(init=8, run=16, eval=8),
        engines=(EngineSpec(kind="embedded", name="engine", model=str(POLICY)),),
    )
    with service_process(config, tmp_path) as url, Client(url) as opened:
        yield opened
