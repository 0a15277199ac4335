"""Makes a patch of the agent's changes to a git repository, and applies it in a sandbox that no agent has touched.

The patch is made in a new sandbox. There, git compares the new sandbox's own copy of the repository with the files that
the agent left. So none of the hooks, filters or attribute drivers in the agent's `.git` runs, and the patch is the same
whether or not the agent has committed its changes.

Invariant: after `make_patch` and `apply_patch`, the repository is the result of the sandbox's preparation plus the
patch, and contains nothing else from the agent.
"""

from __future__ import annotations

import glob
import posixpath
import secrets
import shlex
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from outrider.errors import EvaluatorError, RuntimeFailure
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import DiffSpec, RuntimeSpec

MAX_PATCH = 16 << 20
"""Maximum size of a patch in bytes."""
SECONDS = 300.0
"""Time limit for one git command in the sandbox, in seconds."""
UNCHANGED_SECONDS = 60.0
"""Time limit for checking whether the agent has changed nothing, in seconds."""
MAX_BASES = 1024
"""Maximum number of repositories that a `PatchBases` remembers."""
# XDG_CONFIG_HOME turns off the user's files `git/ignore` and `git/attributes`. GIT_CONFIG_GLOBAL does not affect them.
BEGIN = """set -e
cd -- {repository}
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1 XDG_CONFIG_HOME=/dev/null LC_ALL=C
"""
"""The beginning of every script: git reads no settings of the agent."""
GIT = (
    BEGIN
    + """export GIT_INDEX_FILE="$PWD/.git/outrider-index"
git() {{
    command git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.autocrlf=false "$@"
}}
"""
)
# The base of the patch is the state of the folder, not HEAD. HEAD lacks changes that the sandbox's preparation made but
# did not commit. With HEAD as the base, these changes would count as the agent's.
BASE = """test -d .git || {{ echo 'it has no folder .git' >&2; exit 3; }}
git read-tree HEAD
git add -A --ignore-errors . || true
"""
# The old files are moved into a folder in `.git`. This folder is on the same file system, so nothing is copied.
MAKE_ROOM = """git write-tree
mkdir .git/outrider-aside
find . -mindepth 1 -maxdepth 1 ! -name .git -exec mv -- {{}} .git/outrider-aside/ \\;
"""
# The `.git` of each nested repository is removed. Otherwise git would add the nested repository as a link to a commit
# that exists nowhere else.
MAKE = """find . -path ./.git -prune -o -name .git -prune -exec rm -rf -- {{}} +
git add -A --ignore-errors . || true
git diff --binary --full-index --no-renames --no-color --no-ext-diff --no-textconv \
    {base} "$(git write-tree)" -- . {excluded} > .git/outrider-patch
find . -mindepth 1 -maxdepth 1 ! -name .git -exec rm -rf -- {{}} +
find .git/outrider-aside -mindepth 1 -maxdepth 1 -exec mv -- {{}} . \\;
rm -r .git/outrider-aside
"""
LIST = """git apply --numstat -z .git/outrider-patch > .git/outrider-paths
"""
# Untracked files at the paths of the patch are removed first, because git would not write over them. For example, the
# preparation may have created a file that git ignores, and the patch may add a file at the same path.
CLEAR = """xargs -0 git -c safe.directory='*' --literal-pathspecs clean -ffdxq --
"""
APPLY = """git apply --whitespace=nowarn .git/outrider-patch
"""
# The script uses a separate git repository for the comparison, because settings and excluded paths in the agent's
# `.git` could hide a change. The two repositories share the objects: `git add` reads every file, but writes only
# objects that do not exist yet.
UNCHANGED = (
    BEGIN
    + """export GIT_DIR={place} GIT_WORK_TREE="$PWD"
trap 'rm -rf -- {place}' EXIT
git() {{
    command git -c safe.directory='*' -c core.fsmonitor=false -c core.autocrlf=false "$@"
}}
git init -q --template=
printf '%s\n' "$PWD/.git/objects" > {place}/objects/info/alternates
git read-tree {base}
git add -A .
git diff --cached --quiet --no-ext-diff --no-renames {base} -- . {excluded}
"""
)
TIDY = """rm -f .git/outrider-patch .git/outrider-paths .git/outrider-index
"""


def place_of(spec: DiffSpec, workdir: str) -> str:
    """Return the absolute path of the repository in the sandbox."""
    return posixpath.normpath(posixpath.join(workdir, spec.diff))


async def carried_paths(runtime: Runtime, repository: str) -> list[str]:
    """Return the paths to copy from the agent's sandbox: those at the top of the repository's folder, except `.git`.
    Raises RuntimeFailure, or EvaluatorError if they cannot be listed, for example because there are too many."""
    folder = glob.escape(repository)
    try:
        found = [path for pattern in ("*", ".*") for path in await runtime.glob(f"{folder}/{pattern}")]
    except RuntimeFailure as error:
        await runtime.exec(["true"], seconds=SECONDS)  # raises if the sandbox as a whole is broken
        raise EvaluatorError(f"the repository cannot be listed: {error.message}", inside=True) from error
    return [path for path in found if posixpath.basename(path) not in (".", "..", ".git")]


class MadePatch(msgspec.Struct, frozen=True):
    """A patch, and the id of the repository's git tree before the patch."""

    patch: bytes
    base: str


async def make_patch(runtime: Runtime, spec: DiffSpec, repository: str, archive: Path, paths: list[str]) -> MadePatch:
    """Return the difference between the repository in a new sandbox and the agent's files in `archive`. Raises
    RuntimeFailure, or EvaluatorError if the patch cannot be made."""
    base = (await _run(runtime, repository, BASE + MAKE_ROOM)).decode().strip()
    await runtime.restore(archive, paths)
    await _run(runtime, repository, MAKE, base=base, excluded=_excluded(spec))
    try:
        patch = await runtime.read(f"{repository}/.git/outrider-patch", limit=MAX_PATCH)
    except RuntimeFailure as error:
        await runtime.exec(["true"], seconds=SECONDS)  # raises if the sandbox as a whole is broken
        message = f"the agent's changes in {repository} are more than {MAX_PATCH >> 20} MiB"
        raise EvaluatorError(message, inside=True) from error
    await _run(runtime, repository, TIDY)
    return MadePatch(patch, base)


async def is_unchanged(runtime: Runtime, spec: DiffSpec, repository: str, base: str) -> bool:
    """Return True if the repository in the agent's sandbox has the files of the git tree `base`, so that the agent's
    patch is empty. Excluded paths may differ. Returns False if the check fails or is uncertain.

    The agent may have replaced programs in the sandbox. Such programs can make this check return True, so that the
    patch is empty, but they cannot cause any other false patch.
    """
    place = shlex.quote(f"{runtime.scratch}/outrider-unchanged-{secrets.token_hex(8)}")
    script = UNCHANGED.format(repository=shlex.quote(repository), place=place, base=base, excluded=_excluded(spec))
    try:
        done = await runtime.exec(script, seconds=UNCHANGED_SECONDS)
    except RuntimeFailure:
        return False
    return done.exit_code == 0 and not done.timed_out


def _excluded(spec: DiffSpec) -> str:
    return " ".join(shlex.quote(f":(exclude){pattern}") for pattern in spec.exclude)


class PatchBases:
    """Stores the git tree that each repository has right after the sandbox's preparation. The key is the sandbox's
    runtime and the repository's path. All gradings of a node share one object (`Host.part`).

    A grading that makes a patch stores the tree. If the preparation is not reproducible, the next sandbox has another
    tree, and the stored tree is useless but harmless."""

    def __init__(self, host: Host) -> None:
        self._trees: OrderedDict[bytes, str] = OrderedDict()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trees.clear()

    def remember(self, runtime: RuntimeSpec, repository: str, tree: str) -> None:
        key = _base_key(runtime, repository)
        self._trees[key] = tree
        self._trees.move_to_end(key)
        if len(self._trees) > MAX_BASES:
            self._trees.popitem(last=False)

    def find(self, runtime: RuntimeSpec, repository: str) -> str | None:
        """Return the tree of the repository, or None if no grading has stored it."""
        return self._trees.get(_base_key(runtime, repository))


def _base_key(runtime: RuntimeSpec, repository: str) -> bytes:
    return blake2b(f"{repository}\0{runtime.model_dump_json()}".encode(), digest_size=16).digest()


async def apply_patch(runtime: Runtime, repository: str, patch: bytes) -> None:
    """Apply a patch of `make_patch` in a new sandbox. Raises RuntimeFailure. Raises EvaluatorError if the patch does
    not apply, because this repository differs from the one for which the patch was made."""
    if not patch:
        return
    await runtime.write(f"{repository}/.git/outrider-patch", patch)
    await _run(runtime, repository, BASE + LIST)
    lines = (await runtime.read(f"{repository}/.git/outrider-paths", limit=MAX_PATCH)).split(b"\0")
    paths = b"\0".join(line.split(b"\t", 2)[2] for line in lines if line)
    await _run(runtime, repository, CLEAR, stdin=paths)
    await _run(runtime, repository, APPLY + TIDY)


async def _run(runtime: Runtime, repository: str, script: str, *, stdin: bytes = b"", **words: str) -> bytes:
    program = (GIT + script).format(repository=shlex.quote(repository), **words)
    done = await runtime.exec(program, stdin=stdin, seconds=SECONDS)
    if done.exit_code != 0:
        took = f"took longer than {SECONDS:g} s" if done.timed_out else f"ended with exit code {done.exit_code}"
        raise EvaluatorError(
            f"git {took} in {repository}",
            hint="evaluator.carry.diff must be a git repository with a commit, made by the image or the prepare steps",
            log_tail=done.log_tail(),
        )
    return done.stdout
