"""The init container that fills a pod's volume with programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.sandbox.runtimes.kubernetes import copy_tools


def test_an_init_container_may_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the cluster runs it again after its machine was started anew. The volume keeps its files."""
    python, program, volume = tmp_path / "python", tmp_path / "program", tmp_path / "volume"
    for folder in (python, program, volume):
        folder.mkdir()
    (python / "python3.99").write_text("an interpreter")
    (python / "python3").symlink_to("python3.99")
    (program / "run").write_text("a program")
    monkeypatch.setattr(copy_tools, "portable_python", lambda: python)
    for _ in range(2):
        copy_tools.main(volume, [program])
        assert (volume / "0/python3").read_text() == "an interpreter"
        assert (volume / "1/run").read_text() == "a program"
        assert (volume / copy_tools.PROGRAM).is_symlink()
        (volume / "1/run").write_text("half of it")
