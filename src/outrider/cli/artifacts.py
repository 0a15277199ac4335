"""`outrider artifacts`: lists the files that the service stored from a session's sandbox, or downloads one of them."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.options import Output, command
from outrider.cli.tables import table
from outrider.cli.terminal import Terminal
from outrider.client.client import Client
from outrider.client.sample_files import whole_file
from outrider.errors import InvalidField, ServiceError


class Fetched(msgspec.Struct, frozen=True):
    """The output of `outrider artifacts SESSION PATH --json`."""

    path: str
    size: int
    output: str


@command
def artifacts(
    terminal: Terminal,
    service: Client,
    session: Annotated[str, CliArgument(metavar="SESSION", help="The session's id.")],
    path: Annotated[
        str | None,
        CliArgument(metavar="[PATH]", help="One file, by its path in the sandbox.", show_default="list all"),
    ] = None,
    output: Output = None,
    attempt: Annotated[
        int | None, CliOption(min=1, metavar="N", help="Attempt of the session.", show_default="the newest")
    ] = None,
) -> None:
    """List the files kept from a session's sandbox, or get one of them.

    The field `artifacts` of a task names the files to keep. The service also
    keeps the output of the task's graders, under the name
    `outrider:grading.log`.

    Examples:

        outrider artifacts s-0019a4e2b6c1f3d2-0

        outrider artifacts s-0019a4e2b6c1f3d2-0 /work/out.log -o out.log
    """
    if path is None and output is not None:
        raise InvalidField("-o is for one file", field="output", hint="give the PATH of the file too")
    if path is not None and output is None and terminal.json:
        raise InvalidField("--json needs a file to write to", field="output", hint="add -o FILE")
    if path is None:
        listed = service.artifacts(session, attempt=attempt)
        rows = [(f"{file.size:,}", file.sha256[:12], file.path) for file in listed.artifacts]
        tables = [table(("bytes>", "sha256", "path"), rows)]
        if listed.left_out:
            tables.append(table(("left out", "reason"), [(each.path, each.reason) for each in listed.left_out]))
        terminal.show(listed, *tables)
        if not rows:
            terminal.note("no files were kept; a task names the files to keep in its field `artifacts`")
        return
    data = service.artifact(session, path, attempt=attempt)
    if output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        with whole_file(output, field="output") as file:
            file.write(data)
    except OSError as error:
        raise ServiceError(f"cannot write {output}: {error.strerror}") from error
    if terminal.json:
        terminal.write_json(Fetched(path, len(data), str(output)))
    else:
        terminal.note(f"{path}: {len(data):,} bytes in {output}")
