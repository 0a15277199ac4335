"""The work of `outrider harness record`: runs an agent program, and writes a transcript of its model calls and the
draft of a task.

Only this command imports the module, because the module loads the libraries of the service. Invariant: no existing file
is overwritten.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
from pydantic import ValidationError

from outrider.cli.engine_option import parse_engine
from outrider.cli.event_loop import run_service
from outrider.cli.exit_codes import FAILURE
from outrider.cli.terminal import Terminal
from outrider.config import Config
from outrider.environment import environment
from outrider.errors import InvalidField
from outrider.faults import first_fault
from outrider.lab.record.draft import INSTRUCTION, TaskDraft, place_of, task_toml, with_instruction
from outrider.lab.record.run import Program, files_below, record

UNTOLD = "Run the command `echo hello`, and report what it prints."
"""The instruction if --instruction is not given."""
OURS = 0o600
"""Permissions of the written files. Only their owner can read them, because a transcript contains whole
conversations."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments and options of `outrider harness record`."""

    name: str
    words: tuple[str, ...]
    instruction: str | None
    stdin: bool
    env: tuple[str, ...]
    home: Path | None
    output: Path
    engine: str | None
    tokenizer: str | None
    renderer: str | None


class RecordedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `outrider harness record --json`.

    has_instruction: false if the drafted task does not pass its instruction to the program.
    refused: the number of model calls that got an error as reply, by method, path, status and reason."""

    task: str
    transcript: str
    exit_code: int
    calls: int
    refused: dict[str, int]
    dialects: tuple[str, ...]
    streamed: bool
    has_instruction: bool


def record_and_draft(terminal: Terminal, answers: Answers) -> int:
    """Run the program, write the transcript and the draft, and return the program's exit code. Returns FAILURE if a
    signal ended the program. Raises InvalidField."""
    if not _NAME.fullmatch(answers.name):
        raise InvalidField(f"{answers.name!r} is no name of a file", field="--name", hint="letters, digits, . _ and -")
    env = dict(_pair(text) for text in answers.env)
    files = files_below(answers.home) if answers.home is not None else {}
    if answers.home is not None and not files:
        raise InvalidField(f"{answers.home} has no files", field="--home")
    settings = _settings(answers)
    transcript, task = (answers.output / f"{answers.name}{end}" for end in (".wire.jsonl", ".toml"))
    for path in (transcript, task):
        if path.exists():
            raise InvalidField(f"{path} exists already", field="--name", hint="give another name, or remove the file")
    program = Program(
        command=answers.words,
        instruction=answers.instruction or UNTOLD,
        env=env,
        files=files,
        stdin=answers.stdin,
    )
    # `place_of` reads the program's files. Call it before the program runs, because the program may change the files.
    place = place_of(answers.words, environment("PATH"))
    answers.output.mkdir(parents=True, exist_ok=True)
    terminal.note(f"running {answers.words[0]}")
    with _created(transcript) as file, _removed_after_failure(transcript):
        done = run_service(record(program, file, settings=settings, stdout=sys.__stderr__ if terminal.json else None))
    found = None
    if not answers.stdin and not any(INSTRUCTION in text for text in (*place.words, *env.values(), *files.values())):
        words, found = with_instruction(place.words, done.user_texts)
        place = msgspec.structs.replace(place, words=words)
    draft = TaskDraft(
        place=place,
        instruction=found or program.instruction,
        env=env,
        files=files,
        stdin=answers.stdin,
        calls=done.calls,
        dialects=done.dialects,
        streamed=done.streamed,
    )
    with _created(task) as file:
        file.write(task_toml(draft))
    shown = RecordedFiles(
        task=str(task),
        transcript=str(transcript),
        exit_code=done.exit_code,
        calls=done.calls,
        refused=dict(done.refused),
        dialects=done.dialects,
        streamed=done.streamed,
        has_instruction=draft.has_instruction,
    )
    spoken = ", ".join(done.dialects) or "no dialect"
    terminal.show(
        shown,
        f"{done.calls} model calls ({spoken}), in {transcript}; the task is drafted in {task}\n"
        f"try it in a sandbox: outrider harness check --task {task}",
    )
    for call, times in done.refused.items():
        terminal.note(f"refused{f' {times} times' if times > 1 else ''}: {call}")
    if done.exit_code:
        terminal.note(f"the program ended with exit code {done.exit_code}; its own output says why")
    if not done.dialects and not done.calls:
        terminal.note(
            "the program called no model: does it read its base URL from a variable, flag or file? "
            "write {base_url} into its arguments, or into a settings file, and name the file's folder with --home"
        )
    elif not done.dialects:
        terminal.note(f"no model call succeeded; {transcript} has the replies")
    if not draft.has_instruction:
        terminal.note(f"the place of the instruction was not found: write {INSTRUCTION} into the command of {task}")
    code = done.exit_code
    return code if 0 <= code < 256 else FAILURE


def _settings(answers: Answers) -> Config | None:
    """Return a service's settings with the engine that --engine names. Returns None without --engine. Raises
    InvalidField."""
    if answers.engine is None:
        if answers.tokenizer is not None or answers.renderer is not None:
            raise InvalidField("is for a real engine", field="--tokenizer or --renderer", hint="give --engine as well")
        return None
    model = {"tokenizer": answers.tokenizer, "renderer": answers.renderer}
    given = {name: value for name, value in model.items() if value is not None}
    try:
        return Config.model_validate({"engines": [parse_engine(answers.engine, field="--engine")], "model": given})
    except ValidationError as error:
        raise first_fault(error) from error


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidField(f"{text!r} is not NAME=VALUE", field="--env")
    return name, value


@contextmanager
def _removed_after_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _created(path: Path) -> IO[str]:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OURS), "w", encoding="utf-8")
