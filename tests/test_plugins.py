"""The classes to which the names of built-ins and entry points resolve."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider import plugins
from outrider.errors import InvalidField


@pytest.mark.parametrize("kind", sorted(plugins.BUILTINS))
def test_every_built_in_resolves(kind: str) -> None:
    for name in plugins.BUILTINS[kind]:
        assert plugins.resolve(kind, name) is not None


@pytest.mark.parametrize("name", ["nothing", "no.such.module:thing", "os:no_such", "os.path:", ":x"])
def test_an_unknown_name_is_refused_with_its_field(name: str) -> None:
    with pytest.raises(InvalidField) as refused:
        plugins.resolve("engine", name, field="kind")
    assert refused.value.field == "kind"


def test_a_published_name_is_resolved_and_refused_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[outrider.theirs]\ngood = os.path:join\nbad = theirs_broken:Thing\n")
    (tmp_path / "theirs_broken.py").write_text("raise SystemExit('I thought I was a program')")
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.names("theirs") == ["bad", "good"]
    assert plugins.resolve("theirs", "good") is os.path.join
    with pytest.raises(InvalidField, match="I thought I was a program") as refused:
        plugins.resolve("theirs", "bad", field="kind")
    assert refused.value.field == "kind"
