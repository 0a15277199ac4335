"""`open_sandbox`: a sandbox without a service."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox import open_sandbox
from outrider.spec import RuntimeSpec
from support.node_folders import temporary

__all__ = ["temporary"]


async def test_it_works_and_leaves_nothing(temporary: Path) -> None:
    async with open_sandbox(RuntimeSpec(kind="process", env={"WHO": "world"})) as sandbox:
        result = await sandbox.exec("echo hello $WHO", seconds=10)
        assert (result.exit_code, result.stdout) == (0, b"hello world\n")
    assert os.listdir(temporary) == []


async def test_an_error_of_the_block_is_raised_as_it_is(temporary: Path) -> None:
    with pytest.raises(KeyError):
        async with open_sandbox(RuntimeSpec(kind="process")):
            raise KeyError("mine")
    assert os.listdir(temporary) == []


async def test_what_cannot_start_leaves_nothing(temporary: Path) -> None:
    for step, why in (({"run": "exit 3"}, "exited with 3"), ({"upload": "x", "to": "x"}, "no folder of files")):
        spec = RuntimeSpec.model_validate({"kind": "process", "prepare": [step]})
        with pytest.raises(RuntimeFailure, match=why):
            async with open_sandbox(spec):
                raise AssertionError
        assert os.listdir(temporary) == []
