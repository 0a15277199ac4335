from __future__ import annotations

import pytest

from cli.world import Cli


@pytest.fixture
def cli(capsysbinary: pytest.CaptureFixture[bytes]) -> Cli:
    return Cli(capsysbinary)
