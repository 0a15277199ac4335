"""`outrider session` and `outrider capture`: record sessions of agents that Outrider does not start in a sandbox."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Annotated, Any

from click.exceptions import Exit

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.exit_codes import FAILURE
from outrider.cli.options import command
from outrider.cli.show import Record, print_session
from outrider.cli.terminal import Terminal
from outrider.client.client import Client
from outrider.environment import variables
from outrider.errors import InvalidField
from outrider.harnesses.base import SessionFolders
from outrider.harnesses.endpoint_variables import folder_environment
from outrider.schemas import SessionEndpoint
from outrider.text_files import read_toml_file

DONE_SECONDS = 60.0
"""How long `outrider capture` waits for its session to be graded, in seconds."""

Id = Annotated[str, CliArgument(metavar="SESSION", help="The session's id.")]
Labels = Annotated[list[str] | None, CliOption("--label", metavar="NAME=VALUE", help="A label. May be repeated.")]


@command
def open_(
    terminal: Terminal,
    service: Client,
    file: Annotated[
        Path | None,
        CliOption(
            "--file",
            "-f",
            metavar="FILE.toml",
            help="Fields of the session, such as [limits] or [evaluator].",
            show_default="a session whose reward is reported",
        ),
    ] = None,
    group: Annotated[str | None, CliOption("--group", metavar="GROUP", help="Take a session of this group.")] = None,
    sample: Annotated[int, CliOption("--sample", metavar="INDEX", help="Which session of the group, from 0.")] = 0,
    label: Labels = None,
    key: Annotated[
        str | None, CliOption("--idempotency-key", metavar="KEY", help="Opening it again gives the same session.")
    ] = None,
) -> None:
    """Open a session for an agent that runs elsewhere, and print its variables.

    The output is shell code that sets environment variables for the agent.
    These variables contain the session's credential, which allows nothing but
    model calls of this session.

    Examples:

        eval "$(outrider session open --label run=try)"

        outrider session open --group g-0019a4e2b6c1f3d2 --sample 3

        outrider session open -f session.toml --json
    """
    fields: dict[str, Any] = {} if file is None else read_toml_file(file, field="file")
    if group is not None:
        fields |= {"group_id": group, "sample_index": sample}
    if label:
        fields["labels"] = _pairs(label)
    if key is not None:
        fields["idempotency_key"] = key
    opened = service.open_session(fields)
    terminal.note(_state(opened))
    lines = [f"export {name}={shlex.quote(value)}" for name, value in opened.variables.items()]
    terminal.show(opened, "\n".join(lines))


@command
def complete(
    terminal: Terminal,
    service: Client,
    session: Id,
    reward: Annotated[float | None, CliOption("--reward", metavar="NUMBER", help="The session's reward.")] = None,
    metric: Annotated[
        list[str] | None, CliOption("--metric", metavar="NAME=NUMBER", help="A metric. May be repeated.")
    ] = None,
    reason: Annotated[str | None, CliOption("--reason", metavar="TEXT", help="Why it has this reward.")] = None,
    answer: Annotated[str | None, CliOption("--answer", metavar="TEXT", help="The agent's answer.")] = None,
    error: Annotated[
        str | None, CliOption("--error", metavar="TEXT", help="The agent failed: the session gets no reward.")
    ] = None,
) -> None:
    """Complete a session whose agent runs elsewhere: end its run, and grade it.

    Examples:

        outrider session complete s-0019a4e2b6c1f3d2-0 --reward 1 --metric tests=12

        outrider session complete s-0019a4e2b6c1f3d2-0 --error "its machine was lost"
    """
    report: dict[str, Any] = {"reward": reward, "reason": reason, "answer": answer, "error": error}
    report["metrics"] = {name: _number(name, value) for name, value in _pairs(metric or []).items()}
    done = service.complete_session(session, {name: value for name, value in report.items() if value is not None})
    terminal.show(done, f"session {done.id} is completed; see its result: outrider show {done.id}")


@command
def reset(terminal: Terminal, service: Client, session: Id) -> None:
    """Drop the turns of a session, so that its agent can start over with the same key.

    Example:

        outrider session reset s-0019a4e2b6c1f3d2-0
    """
    done = service.reset_session(session)
    terminal.show(done, f"session {done.id} starts over")


@command
def capture(
    terminal: Terminal,
    service: Client,
    words: Annotated[list[str], CliArgument(metavar="COMMAND...", help="The program and its arguments, after --.")],
    reward: Annotated[
        float | None,
        CliOption("--reward", metavar="NUMBER", help="The session's reward.", show_default="1 if COMMAND exits with 0"),
    ] = None,
    label: Labels = None,
    folder: Annotated[
        Path | None,
        CliOption(
            "--folder",
            metavar="DIR",
            help="Folder for the program's files: OUTRIDER_ARTIFACTS and OUTRIDER_LOGS are folders below it, which the"
            " service does not collect.",
            show_default="neither variable is set",
        ),
    ] = None,
) -> None:
    """Run a program here as the agent of a session, and show what it did.

    The program runs on this machine, without a sandbox. It gets the URL and key
    for its model calls in the variables of each vendor (OPENAI_BASE_URL,
    ANTHROPIC_BASE_URL, ...). If the program fails and --reward is not given, the
    session ends with an error and without a reward. The exit code is the
    program's exit code.

    Examples:

        outrider capture -- python my_agent.py

        outrider capture --reward 0.5 -- claude -p "Fix the test."

        outrider capture --folder runs/1 -- python my_agent.py
    """
    folders = {} if folder is None else _folders(folder)
    with service.external_session({"labels": _pairs(label or [])}) as session:
        terminal.note(f"session {session.id}: running {words[0]}")
        try:
            code = subprocess.run(words, env={**variables(), **session.variables, **folders}, check=False).returncode
        except OSError as error:
            raise InvalidField(
                f"{words[0]!r} cannot be run: {error.strerror}", field="COMMAND", hint="give a program after --"
            ) from error
        if reward is None and code != 0:
            session.complete(error=f"{words[0]} ended with exit code {code}")
        else:
            session.complete(reward=1.0 if reward is None else reward)
    service.group(session.group_id, wait=DONE_SECONDS)
    record = Record(service.session(session.id), service.turns(session.id))
    if terminal.json:
        terminal.write_json(record)
    else:
        print_session(terminal.out, record.session, record.turns)
    if code != 0:
        raise Exit(code if 0 < code < 256 else FAILURE)


def _folders(folder: Path) -> dict[str, str]:
    """Make the folders of a session below `folder`, and return the environment variables that pass their paths to the
    program. Raises InvalidField."""
    named = folder_environment(SessionFolders(parent=str(folder.resolve())))
    try:
        for path in named.values():
            Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidField(
            f"{path} cannot be made: {error.strerror}", field="--folder", hint="name a folder that you may write to"
        ) from error
    return named


def _state(opened: SessionEndpoint) -> str:
    takes = "takes model calls" if opened.running else f"is {opened.session.state.value}, and takes no model calls now"
    return f"session {opened.session.id} {takes}; complete it: outrider session complete {opened.session.id} --reward 1"


def _pairs(given: list[str]) -> dict[str, str]:
    found = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidField(f"{pair!r} is not NAME=VALUE", field="--label or --metric")
        found[name] = value
    return found


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InvalidField(f"the metric {name}={text} is no number", field="--metric") from error
