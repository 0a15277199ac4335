"""The specs that each kind of runtime refuses or accepts before a task is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.errors import InvalidField
from outrider.plugins import names, resolve
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.spec import RuntimeSpec

REFUSED: tuple[tuple[Any, ...], ...] = (
    ("process", {"rootfs": "/usr"}, "rootfs"),
    ("process", {"image": "debian"}, "image"),
    ("process-landlock", {"mounts": [{"source": "/usr"}]}, "mounts"),
    ("process-landlock", {"users": 2}, "users"),
    ("namespace", {"image": "no-such-image"}, "image"),
    ("namespace", {"image": "/some/image.sif"}, "image"),
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
def no_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))


@pytest.mark.parametrize(("kind", "fields", "field"), REFUSED)
def test_what_a_kind_cannot_be_is_refused(kind: str, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        resolve("runtime", kind).check_spec(RuntimeSpec(kind=kind, **fields))
    assert refused.value.field == f"task.runtime.{field}"
    assert refused.value.hint


def test_users_that_the_machine_does_not_have_are_refused(tmp_path: Path) -> None:
    none = {"uid": tmp_path / "none", "gid": tmp_path / "none"}
    with pytest.raises(InvalidField) as refused:
        NamespaceRuntime.check_spec(RuntimeSpec(kind="namespace", users=2), id_files=none)
    assert refused.value.field == "task.runtime.users"
    assert refused.value.hint


@pytest.mark.parametrize(("kind", "fields"), TAKEN)
def test_what_a_kind_can_be_is_taken(kind: str, fields: dict[str, Any]) -> None:
    resolve("runtime", kind).check_spec(RuntimeSpec(kind=kind, **fields))


def test_every_kind_is_asked() -> None:
    assert {kind for kind, *_ in (*REFUSED, *TAKEN)} == set(names("runtime"))
