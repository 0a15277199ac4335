"""Drafts a task that runs a recorded program again, in a sandbox.

Only `place_of` does I/O: it looks at files. Invariants: the draft is a valid task; its evaluator ends every session
with an error until somebody writes a check, so that no session gets an unearned reward.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from outrider.harnesses.missing_program import SYSTEM

INSTRUCTION = "{instruction}"
FED = ("sh", "-c", 'printf %s "$OUTRIDER_INSTRUCTION" | "$0" "$@"')
"""The beginning of a command that passes the instruction to a program as standard input. The program's own command
follows."""
LONGEST_PATH = 4096
MAX_LINKS = 40
"""Maximum length of a chain of symbolic links, the same as in Linux."""
WRITTEN_BYTES = 1 << 16
"""Maximum size in bytes of a file that the draft writes in a prepare step."""
MODULES = "node_modules"
UNCHECKED = "echo 'the task has no check yet' >&2; exit 2"


_INTERPRETER = re.compile(r"(?:python|pypy|node|bun|deno|ruby|perl|bash|dash|sh|zsh)[\d.]*")
"""Matches the names of interpreters. In the command of an interpreter, the first argument that names a file is the
script."""
_ENV_SHEBANG = re.compile(rb"#! ?/usr/bin/env (?:-S +)?([\w.-]+)")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A command, and the files that a sandbox needs to run it.

    - `words`: the command and its arguments, in a form that is valid in a sandbox.
    - `venv`: the program's virtual environment on the host.
    - `mounts`: folders and files of the host to mount.
    - `written`: the texts of files that a prepare step writes, by path relative to the working directory.
    - `missing`: True if the program was not found.
    """

    words: tuple[str, ...]
    venv: Path | None = None
    mounts: tuple[Path, ...] = ()
    written: Mapping[str, str] = {}
    missing: bool = False


class TaskDraft(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a recorded run that a drafted task needs. `place` is the run's command. The command, `env` and
    `files` may contain placeholders. `stdin` is True if the program read the instruction from standard input. `calls`,
    `dialects` and `streamed` describe the run's model calls."""

    place: Place
    instruction: str
    env: Mapping[str, str] = {}
    files: Mapping[str, str] = {}
    stdin: bool = False
    calls: int = 0
    dialects: tuple[str, ...] = ()
    streamed: bool = False

    @property
    def has_instruction(self) -> bool:
        """True if the drafted task passes its instruction to the program."""
        texts = (*self.place.words, *self.env.values(), *self.files.values())
        return self.stdin or any(INSTRUCTION in text for text in texts)


def place_of(words: Sequence[str], search: str | None) -> Place:
    """Return the command in `words` with the files that it needs. `search` is the PATH. Reads links and files.

    In an argument FILE or `--name=FILE`, the path becomes absolute, and the file is mounted. There is one exception: a
    small text file with a relative path below the working directory counts as the program's input. Its path does not
    change, and a prepare step writes the file. An interpreter's script is always mounted.
    """
    found = shutil.which(words[0], path=search)
    if found is None:
        return Place(words=tuple(words), missing=True)
    program = Path(os.path.abspath(found))
    venv, program = _environment_of(program)
    inside = _of_system(program) or venv is not None
    mounts = [] if inside else [*_shown(program)]
    placed = [program.name if inside else str(program)]
    interpreter = None if inside else _named_by_env(program, search)
    if interpreter is not None:
        placed.insert(0, str(interpreter))
        mounts += _shown(interpreter)
    written: dict[str, str] = {}
    script_follows = _INTERPRETER.fullmatch(program.name) is not None
    for word in words[1:]:
        named, equals, value = word.partition("=")
        option = f"{named}=" if equals and named.startswith("-") else ""
        text = value if option else word
        file = Path(os.path.abspath(text))
        if not text or len(text) > LONGEST_PATH or "\0" in text or not file.is_file():
            placed.append(word)
            continue
        is_script, script_follows = script_follows, False
        content = None if is_script else _work(text)
        if content is not None:
            written[text] = content
            placed.append(word)
            continue
        placed.append(f"{option}{file}")
        if not _of_system(file) and not (venv is not None and file.is_relative_to(venv)):
            mounts += _shown(file)
    outermost = [
        path for path in dict.fromkeys(mounts) if not any(path != each and path.is_relative_to(each) for each in mounts)
    ]
    return Place(words=tuple(placed), venv=venv, mounts=tuple(outermost), written=written)


def _environment_of(program: Path) -> tuple[Path | None, Path]:
    """Return the virtual environment that has the program in its `bin`, and the program's path there. Links are
    followed, because pipx and uv put links to such programs into ~/.local/bin. If the program is in no environment,
    returns None and the unchanged path."""
    for place in _links(program):
        above = place.parent.parent
        if place.parent.name == "bin" and (above / "pyvenv.cfg").is_file():
            return above, place
    return None, program


def _links(file: Path) -> Iterator[Path]:
    """Yield the file. If it is a symbolic link, also yield each target along the chain of links."""
    for _ in range(MAX_LINKS):
        yield file
        if not file.is_symlink():
            return
        file = Path(os.path.normpath(file.parent / file.readlink()))


def _named_by_env(script: Path, search: str | None) -> Path | None:
    """Return the interpreter that a script names in a first line `#!/usr/bin/env INTERPRETER`. Returns None if there is
    no such line, the interpreter is not found, or every sandbox has it."""
    with script.open("rb") as file:
        named = _ENV_SHEBANG.match(file.read(LONGEST_PATH))
    found = shutil.which(named[1].decode(), path=search) if named else None
    return None if found is None or _of_system(Path(found)) else Path(found).absolute()


def _work(text: str) -> str | None:
    """Return the text of a small file with a relative path below the working directory; None for any other file."""
    path = Path(text)
    if path.is_absolute() or ".." in path.parts or path.stat().st_size > WRITTEN_BYTES:
        return None
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _shown(file: Path) -> Iterator[Path]:
    """Yield the path to mount for a file. If the file is a symbolic link, also yield the path to mount for each target
    along the chain of links. Usually the path to mount is the folder around the file: /opt/tool for /opt/tool/bin/tool.
    For a file in an npm package, it is the whole folder node_modules. For a file in a folder with many unrelated files,
    such as /tmp, it is the file alone."""
    for place in _links(file):
        if _of_system(place):
            return
        if MODULES in place.parts:
            yield Path(*place.parts[: place.parts.index(MODULES) + 1])
            continue
        folder = place.parent.parent if place.parent.name == "bin" else place.parent
        yield place if folder in (Path("/"), Path.home(), Path.home() / ".local", Path("/tmp")) else folder


def _of_system(path: Path) -> bool:
    return str(path).startswith(tuple(f"{folder}/" for folder in SYSTEM))


def with_instruction(words: Sequence[str], user_texts: Iterable[str]) -> tuple[tuple[str, ...], str | None]:
    """Replace the instruction in the command's words with {instruction}. The instruction is a text that the program
    sent to its model as a user message. Returns the new words and the instruction. If no word contains such a text,
    returns the unchanged words and None. In `--name=TEXT`, only TEXT is replaced."""
    sent = [text.strip() for text in user_texts]
    best: tuple[tuple[bool, bool, int], int, str] | None = None
    for index, word in enumerate(words[1:], 1):
        named, equals, value = word.partition("=")
        for text in (word, value if equals and named.startswith("-") else ""):
            inner = text.strip()
            if not inner or inner.startswith("-") or not any(inner in each for each in sent):
                continue
            rank = (inner in sent, " " in inner, len(inner))
            if best is None or rank > best[0]:
                best = rank, index, inner
    if best is None:
        return tuple(words), None
    _, index, text = best
    changed = words[index].replace(text, INSTRUCTION)
    return (*words[:index], changed, *words[index + 1 :]), text


def task_toml(draft: TaskDraft) -> str:
    """Return the draft as a task file."""
    seen = f"{draft.calls} model calls, {'streamed' if draft.streamed else 'not streamed'}"
    lines = [
        "# Recorded with `outrider harness record`. Try the program with `outrider harness check --task THIS_FILE`.",
        f"# Seen: {seen}; dialect: {', '.join(draft.dialects) or 'none, because no call succeeded'}.",
    ]
    if not draft.has_instruction:
        lines.append("# The place of the instruction was not found: write {instruction} into the command.")
    if draft.place.missing:
        lines.append("# The program was not found on this machine's PATH.")
    lines += [f"instruction = {_text(draft.instruction)}", "", "[harness]"]
    lines.append(f"command = {_list((*FED, *draft.place.words) if draft.stdin else draft.place.words)}")
    if draft.place.venv is not None:
        lines.append(f"venv = {_text(str(draft.place.venv))}")
    for name, table in (("env", draft.env), ("files", draft.files)):
        if table:
            lines += ["", f"[harness.{name}]", *(f"{_text(key)} = {_text(value)}" for key, value in table.items())]
    steps = [f"{{ write = {_text(text)}, to = {_text(path)} }}" for path, text in draft.place.written.items()]
    sources = [f"{{ source = {_text(str(path))} }}" for path in draft.place.mounts]
    if steps or sources:
        lines += ["", "[runtime]"]
    lines += [f"prepare = [{', '.join(steps)}]"] if steps else []
    lines += [f"mounts = [{', '.join(sources)}]"] if sources else []
    lines += ["", "# Write the check of the task here: exit code 0 is the reward 1, exit code 1 the reward 0."]
    lines += ["[evaluator]", f"run = {_text(UNCHECKED)}"]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    # A JSON string is also a TOML string, except that TOML requires an escape for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _list(words: Iterable[str]) -> str:
    return f"[{', '.join(map(_text, words))}]"
