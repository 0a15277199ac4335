"""The draft of a task that runs a recorded program again, in a sandbox.

The module is pure, except for `place_of`, which looks at files. Invariants: the draft is a valid task; its
evaluator ends every session as an error until somebody writes a check, so that no session gets an unearned reward.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from outrider.harnesses.missing_program import SYSTEM

INSTRUCTION = "{instruction}"
FED = ("sh", "-c", 'printf %s "$OUTRIDER_INSTRUCTION" | "$0" "$@"')
"""Beginning of a command that gives the instruction to the rest of the command as standard input."""
LONGEST_PATH = 4096
UNCHECKED = "echo 'the task has no check yet' >&2; exit 2"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a command's files on the host: the command with `words` that are valid in a sandbox, the virtual
    environment of the program, and the folders and files to mount. `missing` is true for a program that is not
    found."""

    words: tuple[str, ...]
    venv: Path | None = None
    mounts: tuple[Path, ...] = ()
    missing: bool = False


class TaskDraft(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a recorded run: the `place` of its command with placeholders, `env` and `files` with placeholders,
    whether the program read the instruction from standard input, and the recorded model calls."""

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
        """True if the program of the draft gets the task's instruction."""
        texts = (*self.place.words, *self.env.values(), *self.files.values())
        return self.stdin or any(INSTRUCTION in text for text in texts)


def place_of(words: Sequence[str], search: str | None) -> Place:
    """Return the place of a command's files. `search` is the PATH. Arguments that name a file, also as `--name=FILE`,
    become absolute paths. Reads links and files."""
    found = shutil.which(words[0], path=search)
    if found is None:
        return Place(words=tuple(words), missing=True)
    program = Path(found).absolute()
    venv = next((above for above in program.parents if (above / "pyvenv.cfg").is_file()), None)
    inside = _of_system(program) or (venv is not None and program.parent == venv / "bin")
    mounts = [] if _of_system(program) or venv is not None else [_shown(program)]
    placed = [program.name if inside else str(program)]
    for word in words[1:]:
        named, equals, value = word.partition("=")
        option = f"{named}=" if equals and named.startswith("-") else ""
        text = value if option else word
        file = Path(text).absolute()
        if not text or len(text) > LONGEST_PATH or "\0" in text or not file.is_file():
            placed.append(word)
            continue
        placed.append(f"{option}{file}")
        if not _of_system(file) and not (venv is not None and file.is_relative_to(venv)):
            mounts.append(_shown(file))
    outermost = [
        path for path in dict.fromkeys(mounts) if not any(path != each and path.is_relative_to(each) for each in mounts)
    ]
    return Place(words=tuple(placed), venv=venv, mounts=tuple(outermost))


def _shown(file: Path) -> Path:
    """Return the path to mount for a program or script: its folder, or only the file if the folder contains many other
    files."""
    folder = file.parent.parent if file.parent.name == "bin" else file.parent
    return file if folder in (Path("/"), Path.home(), Path.home() / ".local", Path("/tmp")) else folder


def _of_system(path: Path) -> bool:
    return str(path).startswith(tuple(f"{folder}/" for folder in SYSTEM))


def with_instruction(words: Sequence[str], user_texts: Iterable[str]) -> tuple[tuple[str, ...], str | None]:
    """Return the words with {instruction} in place of the text that the program sent to its model in the user's name,
    and this text. The text is None if no word has it. `--name=TEXT` is found as well as TEXT."""
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
    if draft.place.mounts:
        sources = (f"{{ source = {_text(str(path))} }}" for path in draft.place.mounts)
        lines += ["", "[runtime]", f"mounts = [{', '.join(sources)}]"]
    lines += ["", "# Write the check of the task here: exit code 0 is the reward 1, exit code 1 the reward 0."]
    lines += ["[evaluator]", f"run = {_text(UNCHECKED)}"]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    # A JSON string is a basic string of TOML, except for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _list(words: Iterable[str]) -> str:
    return f"[{', '.join(map(_text, words))}]"
