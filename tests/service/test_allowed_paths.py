"""Which paths of the host a task may name: only those that the operator allows, after links are resolved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.config import SandboxesConfig
from outrider.errors import InvalidField
from outrider.sandbox.host_paths import HostPaths
from outrider.service.admission import check_group
from outrider.spec import GroupSpec

from .conftest import MakeWorld
from .world import group

ASKS: list[tuple[str, Any]] = [
    ("task.runtime.rootfs", lambda path: {"rootfs": path}),
    ("task.runtime.image", lambda path: {"image": path}),
    ("task.runtime.mounts.1.source", lambda path: {"mounts": [{"source": "@/in/a"}, {"source": path, "target": "/b"}]}),
]
REFUSED = ["@/out", "@", "@/inner", "@/in/link", "@/in/link/x", "@/nothing", "/", "/proc/self/root/etc"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which `in` is allowed, and `out/b` through the link `aside`. The link `in/link` leads out of `in`."""
    for path in ("in/a", "inner", "out/b"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "in/file").touch()
    (tmp_path / "in/link").symlink_to(tmp_path / "out")
    (tmp_path / "aside").symlink_to(tmp_path / "out/b")
    return tmp_path


def filled(value: Any, folder: Path) -> Any:
    """Return `value` with the folder's path in place of each @."""
    if isinstance(value, Mapping):
        return {name: filled(inner, folder) for name, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, folder) for inner in value]
    return value.replace("@", str(folder))


def checked(folder: Path, runtime: dict[str, Any]) -> GroupSpec:
    spec = group("ask", runtime=filled(runtime, folder))
    check_group(spec, paths=HostPaths.of(folder, [folder / "in", folder / "aside"]))
    return spec


@pytest.mark.parametrize("path", REFUSED)
@pytest.mark.parametrize(("field", "ask"), ASKS, ids=[field for field, _ in ASKS])
def test_what_is_not_allowed_is_refused_by_its_field(folder: Path, field: str, ask: Any, path: str) -> None:
    with pytest.raises(InvalidField, match="not among the host's paths") as refused:
        checked(folder, ask(path))
    assert refused.value.field == field
    assert "--allow-path" in str(refused.value.hint)


def test_the_way_back_up_leads_nowhere(folder: Path) -> None:
    with pytest.raises(InvalidField, match="not among the host's paths"):
        checked(folder, {"image": "@/in/../out"})


@pytest.mark.parametrize("path", ["@/in", "@/in/a", "@/out/b", "@/aside"])
@pytest.mark.parametrize("ask", [ask for _, ask in ASKS], ids=[field for field, _ in ASKS])
def test_what_is_allowed_may_be_named(folder: Path, ask: Any, path: str) -> None:
    assert checked(folder, ask(path))


def test_a_file_may_be_allowed_and_mounted(folder: Path) -> None:
    assert checked(folder, {"mounts": [{"source": "@/in/file"}]})


@pytest.mark.parametrize(("field", "ask"), ASKS, ids=[field for field, _ in ASKS])
def test_what_is_allowed_must_be_there(folder: Path, field: str, ask: Any) -> None:
    with pytest.raises(InvalidField, match="on this node") as refused:
        checked(folder, ask("@/in/nothing"))
    assert refused.value.field == field


async def test_a_service_allows_what_its_settings_say(folder: Path, world: MakeWorld) -> None:
    mounted = {"mounts": [{"source": str(folder / "in/a")}]}
    async with world() as w:
        with pytest.raises(InvalidField):
            await w.submit("ask", runtime=mounted)
    async with world(sandboxes=SandboxesConfig(allow=(folder / "in",))) as w:
        view = await w.submit("ask", runtime=mounted)
        assert (await w.done(view.id)).sessions[0].result


def environment(folder: Path, base: Path) -> Path:
    """A virtual environment in `in` whose interpreter is below `base`."""
    made = folder / "in/env"
    for place in (base / "bin/python3", base / "lib/python3.11/os.py"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch(mode=0o755)
    (made / "lib/python3.11/site-packages").mkdir(parents=True)
    (made / "bin").mkdir()
    (made / "bin/python").symlink_to(base / "bin/python3")
    (made / "pyvenv.cfg").write_text(f"home = {base}/bin\n")
    return made


def check_venv(folder: Path, venv: Path, **runtime: Any) -> None:
    harness = {"command": ["agent"], "venv": str(venv)}
    spec = group("ask", harness=harness, runtime={"kind": "process", **filled(runtime, folder)})
    check_group(spec, paths=HostPaths.of(folder, [folder / "in", folder / "aside"]))


def test_an_environment_whose_parts_are_allowed_may_be_named(folder: Path) -> None:
    check_venv(folder, environment(folder, folder / "in/python"))


def test_an_environment_must_be_allowed_itself(folder: Path) -> None:
    made = environment(folder, folder / "in/python").rename(folder / "inner/env")
    for place in (made, folder / "nothing"):
        with pytest.raises(InvalidField, match="not among the host's paths") as refused:
            check_venv(folder, place)
        assert refused.value.field == "task.harness.venv"
        assert f"`outrider serve --allow-path {place}`" in str(refused.value.hint)


def test_an_environment_shows_no_more_than_is_allowed(folder: Path) -> None:
    """An environment cannot show other folders to the sandbox by naming them as its interpreter's folder or in a .pth
    file."""
    made = environment(folder, folder / "inner")
    with pytest.raises(
        InvalidField, match=f"does not work without {folder}/inner, which tasks may not name"
    ) as refused:
        check_venv(folder, made)
    assert refused.value.hint == f"the operator allows it with `outrider serve --allow-path {folder}/inner`"
    packages = made / "lib/python3.11/site-packages"
    (packages / "all.pth").write_text("/\n/etc\n")
    with pytest.raises(InvalidField, match="does not work without"):
        check_venv(folder, made)


def test_an_environment_does_not_lie_over_the_working_directory(folder: Path) -> None:
    made = environment(folder, folder / "in/python")
    with pytest.raises(InvalidField, match="would lie read-only over the sandbox's own"):
        check_venv(folder, made, workdir="@/in/env/x")


def test_a_link_of_an_environment_to_what_is_not_shown_is_refused(folder: Path) -> None:
    made = environment(folder, folder / "in/python")
    (made / "bin/agent").symlink_to(folder / "in/file")
    with pytest.raises(InvalidField, match=f"{made}/bin/agent is a link to {folder}/in/file") as refused:
        check_venv(folder, made)
    assert "task.runtime.mounts" in str(refused.value.hint)


def test_an_environment_of_the_hosts_own_interpreter_needs_the_hosts_root(folder: Path) -> None:
    made = environment(folder, folder / "in/python")
    (made / "bin/python").unlink()
    (made / "bin/python").symlink_to("/usr/bin/env")  # any program in /usr serves here
    check_venv(folder, made)
    with pytest.raises(InvalidField, match="is in the host's /usr") as refused:
        check_venv(folder, made, kind="namespace", rootfs="@/in/a")
    assert refused.value.field == "task.harness.venv"


def test_no_environment_where_no_program_of_the_host_runs(folder: Path) -> None:
    made = environment(folder, folder / "in/python")
    with pytest.raises(InvalidField, match="'memory' sandboxes run no programs of the host"):
        check_venv(folder, made, kind="memory")
