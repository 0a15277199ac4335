"""Finds the newest version of a preset's program in its registry, and changes the pinned version in a preset's file.

The registries are queried by their ordinary clients: npm, uv, pip. All functions here block.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from outrider.errors import HarnessUnavailable, InvalidField
from outrider.harnesses.install import Progress, install_node, npm_command, run, uv_command
from outrider.harnesses.presets import Install, Preset, is_version

ASK_SECONDS = 60
REGISTRIES = {"npm": "the npm registry", "pip": "the Python package index"}


def newest_version(preset: Preset, say: Progress) -> str:
    """Return the newest version of the preset's program in its registry.

    Raises InvalidField if the preset installs no program, and HarnessUnavailable if the query fails.
    """
    recipe = preset.install
    if recipe is None:
        raise InvalidField(f"preset {preset.name!r} has no program with versions", field="preset")
    package = re.split(r"@(?=[^@]*$)|==", recipe.packages[0])[0]
    say(f"asking {REGISTRIES[recipe.kind]} for the newest version of {package}")
    try:
        with tempfile.TemporaryDirectory(prefix="outrider-newest-") as folder:
            version = (_of_npm if recipe.kind == "npm" else _of_python)(package, recipe, Path(folder), say)
    except HarnessUnavailable as error:
        raise HarnessUnavailable(
            f"{REGISTRIES[recipe.kind]} cannot be asked for {package}",
            hint="the command needs the registry; installed versions are in: outrider harness list --json",
            log_tail=error.log_tail,
        ) from error
    if not is_version(version):
        raise HarnessUnavailable(f"{REGISTRIES[recipe.kind]} names no version of {package}, but {version[:100]!r}")
    return version


def pin_file(preset: Preset) -> Path:
    """Return the path of a preset's file. Raises InvalidField if Outrider does not run from a checkout of its
    source."""
    path = Path(str(files("outrider.harnesses").joinpath("presets", f"{preset.name}.toml")))
    checkout = path.parents[4]
    if not (checkout / "pyproject.toml").is_file() or path.parents[3].name != "src":
        raise InvalidField(
            "the pin of an installed package is never changed",
            field="preset",
            hint="use --check, and name the version in the task: task.harness.version",
        )
    return path


def write_pin(preset: Preset, version: str) -> None:
    """Change the pinned version in the file of a preset. Raises InvalidField (see `pin_file`)."""
    path = pin_file(preset)
    pinned = preset.install
    assert pinned is not None
    old = re.escape(pinned.version)
    text = re.sub(rf'(?<=^version = "){old}(?="$)', version, path.read_text("utf-8"), flags=re.MULTILINE)
    for before, after in zip(pinned.packages, pinned.at_version(version).packages, strict=True):
        text = text.replace(f'"{before}"', f'"{after}"')
    path.write_text(text, "utf-8")


def _of_npm(package: str, recipe: Install, folder: Path, say: Progress) -> str:
    assert recipe.node is not None
    npm = npm_command(install_node(recipe.node, say))
    # By default, npm would repeat a failed request for minutes.
    output = run([*npm, "view", "--json", "--fetch-retries=0", package, "version"], cwd=folder, seconds=ASK_SECONDS)
    try:
        return str(json.loads(output))
    except ValueError:
        return output.strip()


def _of_python(package: str, recipe: Install, folder: Path, _: Progress) -> str:
    minor = recipe.python or f"{sys.version_info[0]}.{sys.version_info[1]}"
    if uv := uv_command():
        (folder / "wanted.in").write_text(f"{package}\n")
        compiled = ["pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate", "wanted.in"]
        output = run([*uv, *compiled, "--python-version", minor], cwd=folder, seconds=ASK_SECONDS)
    else:
        asked = ["pip", "index", "versions", "--quiet", "--only-binary=:all:", "--python-version", minor, package]
        output = run([sys.executable, "-m", *asked], cwd=folder, seconds=ASK_SECONDS)
    found = re.search(rf"^{re.escape(package)}(?:==| \()([^\s);]+)", output, re.MULTILINE)
    return found[1] if found else output.strip()
