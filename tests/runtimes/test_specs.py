"""What each kind of runtime refuses before a task is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.errors import InvalidField
from outrider.plugins import names, resolve
from outrider.sandbox.runtimes.namespace import user_ids
from outrider.spec import RuntimeSpec

REFUSED: tuple[tuple[Any, ...], ...] = (
    ("process", {"rootfs": "/usr"}, "rootfs"),
    ("process", {"image": "debian"}, "image"),
    ("process-landlock", {"mounts": [{"source": "/usr"}]}, "mounts"),
    ("process-landlock", {"users": 2}, "users"),
    ("namespace", {"image": "no-such-image"}, "image"),
    ("namespace", {"image": "/some/image.sif"}, "image"),
    ("namespace", {"users": 2}, "users"),
    ("apptainer", {}, "image"),
    ("apptainer", {"image": "no-such-image"}, "image"),
    ("apptainer", {"image": "/some/image.sif", "users": 2}, "users"),
    ("docker", {}, "image"),
    ("podman", {"rootfs": "/usr"}, "rootfs"),
    ("gvisor", {}, "image"),
    ("kubernetes", {}, "image"),
    ("kubernetes", {"image": "/some/image.sif"}, "image"),
    ("kubernetes", {"image": "debian", "mounts": [{"source": "/usr"}]}, "mounts"),
    ("e2b", {"rootfs": "/usr"}, "rootfs"),
    ("e2b", {"mounts": [{"source": "/usr"}]}, "mounts"),
    ("e2b", {"users": 2}, "users"),
)
TAKEN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("memory", {"image": "debian", "users": 2}),
    ("process", {}),
    ("namespace", {"rootfs": "/usr", "mounts": [{"source": "/usr"}]}),
    ("apptainer", {"image": "/some/image.sif"}),
    ("docker", {"image": "debian", "users": 2}),
    ("kubernetes", {"image": "debian", "users": 2}),
    ("e2b", {"image": "base", "resources": {"cpus": 1, "memory_mb": 512}}),
)


@pytest.fixture(autouse=True)
def nobody_has_more_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(user_ids, "FILES", {"uid": tmp_path / "none", "gid": tmp_path / "none"})
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))


@pytest.mark.parametrize(("kind", "fields", "field"), REFUSED)
def test_what_a_kind_cannot_be_is_refused(kind: str, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        resolve("runtime", kind).check_spec(RuntimeSpec(kind=kind, **fields))
    assert refused.value.field == f"task.runtime.{field}"
    assert refused.value.hint


@pytest.mark.parametrize(("kind", "fields"), TAKEN)
def test_what_a_kind_can_be_is_taken(kind: str, fields: dict[str, Any]) -> None:
    resolve("runtime", kind).check_spec(RuntimeSpec(kind=kind, **fields))


def test_every_kind_is_asked() -> None:
    assert {kind for kind, *_ in (*REFUSED, *TAKEN)} == set(names("runtime"))
