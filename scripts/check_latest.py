"""Tries the bridges with the newest version of each trainer that the package registry has.

    python scripts/check_latest.py [TRAINER ...] [--json]

Prints a table with a row for each trainer: the version that docs/trainers.md names as tested, the newest version, and
the result of the bridge's tests with the newest version. Only a version that is newer than the tested one is installed,
into an environment of its own under .cache/latest, which also has the log. The exit status is 1 if a bridge failed.

The environment is first built by `make` as for the bridge's tests; then the newest version replaces the pinned one.
Packages that the Makefile installs without dependencies are also replaced without dependencies, so a newer version may
fail because it imports a package that is missing; the log then has the error. Prereleases are not tried.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.cli.tables import table
from outrider.cli.terminal import Terminal

ROOT = Path(__file__).parent.parent
LATEST = ROOT / ".cache" / "latest"
PIP = ("-m", "pip", "--disable-pip-version-check")

NEWEST, PASSED, FAILED, UNINSTALLABLE, UNKNOWN = (
    "is the tested one",
    "passes",
    "fails",
    "cannot be installed",
    "is not in the registry",
)
RUN = Callable[[Sequence[str], Path], bool]
"""Runs a command whose output goes to the end of a file. Returns True if the command succeeded."""


@dataclass(frozen=True)
class Trainer:
    """`name` is the trainer's name in docs/trainers.md. The first of `packages` has the trainer's version, and the
    others have the same version. `variable` names the environment in the Makefile, and `target` runs its tests.
    `dependencies` is False if the Makefile installs the packages without their dependencies."""

    name: str
    packages: tuple[str, ...]
    variable: str
    target: str
    dependencies: bool = False


TRAINERS = (
    Trainer("TRL", ("trl",), "TRL_VENV", "test-trl", dependencies=True),
    Trainer("verl", ("verl",), "VERL_VENV", "test-verl", dependencies=True),
    Trainer("SkyRL", ("skyrl", "skyrl-gym"), "SKYRL_VENV", "test-skyrl"),
    Trainer("OpenRLHF", ("openrlhf",), "SKYRL_VENV", "test-skyrl"),
    Trainer("NeMo Gym", ("nemo-gym",), "GYM_VENV", "test-gym"),
    Trainer("tinker-cookbook", ("tinker-cookbook",), "TINKER_VENV", "test-tinker"),
    Trainer("verifiers", ("verifiers",), "VERIFIERS_VENV", "test-verifiers", dependencies=True),
)


@dataclass(frozen=True)
class Tried:
    """A row of the table. `newest` is None if the registry has no version."""

    trainer: str
    tested: str
    newest: str | None
    result: str
    log: str | None = None


def tested_version(trainer: Trainer, page: str) -> str:
    """Return the version in the second column of the trainer's row of docs/trainers.md."""
    found = re.search(rf"^\|[^|]*\| {re.escape(trainer.name)} (\d[\w.]*)", page, re.MULTILINE)
    assert found is not None, f"docs/trainers.md names no tested version of {trainer.name}"
    return found[1]


def newest_version(package: str) -> str | None:
    """Return the newest version in the registry. The version may be for another Python than this one."""
    command = (sys.executable, *PIP, "index", "versions", "--ignore-requires-python", package)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.match(rf"{re.escape(package)} \((.+)\)", done.stdout)
    return found[1] if found else None


def is_newer(version: str, other: str) -> bool:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", text)]

    return numbers(version) > numbers(other)


def logged(command: Sequence[str], log: Path) -> bool:
    with log.open("a", encoding="utf-8") as file:
        print("+", *command, file=file, flush=True)
        return subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False).returncode == 0


def tried(trainer: Trainer, tested: str, newest: str | None, run: RUN = logged) -> Tried:
    """Run the trainer's tests with its newest version, if this version is newer than the tested version."""
    if newest is None or not is_newer(newest, tested):
        return Tried(trainer.name, tested, newest, UNKNOWN if newest is None else NEWEST)
    place = LATEST / trainer.packages[0]
    place.mkdir(parents=True, exist_ok=True)
    log = place / "log"
    log.unlink(missing_ok=True)
    venv = place / "venv"
    here = f"{trainer.variable}={venv}"
    wanted = [f"{package}=={newest}" for package in trainer.packages]
    alone = () if trainer.dependencies else ("--no-deps",)
    install = (str(venv / "bin" / "python"), *PIP, "install", "--quiet", "--ignore-requires-python", *alone, *wanted)
    made = run(("make", here, f"{venv}/.stamps/dev"), log) and run(install, log)
    result = UNINSTALLABLE if not made else PASSED if run(("make", here, trainer.target), log) else FAILED
    return Tried(trainer.name, tested, newest, result, str(log.relative_to(ROOT)))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Try the bridges with the newest version of each trainer.")
    names = [trainer.packages[0] for trainer in TRAINERS]
    parser.add_argument("trainer", nargs="*", help=f"which: {', '.join(names)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(arguments)
    if unknown := set(options.trainer) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(names)}")
    page = (ROOT / "docs" / "trainers.md").read_text("utf-8")
    rows = []
    for trainer in TRAINERS:
        if options.trainer and trainer.packages[0] not in options.trainer:
            continue
        tested, newest = tested_version(trainer, page), newest_version(trainer.packages[0])
        if newest is not None and is_newer(newest, tested):
            print(f"trying {trainer.name} {newest} (minutes)", file=sys.stderr, flush=True)
        rows.append(tried(trainer, tested, newest))
    terminal = Terminal()
    terminal.json = options.json
    cells = [(row.trainer, row.tested, row.newest or "-", row.result, row.log or "") for row in rows]
    terminal.show(rows, table(("trainer", "tested with", "newest", "the newest", "log"), cells))
    return any(row.result in (FAILED, UNINSTALLABLE) for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
