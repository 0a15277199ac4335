"""`outrider export`: writes the training samples of done groups, or their sessions as conversations. Without a file,
the output is JSON lines on standard output. With a file, images are written to a folder beside it."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Annotated

import msgspec

from outrider.cli.command_line import CliOption
from outrider.cli.options import Output, command
from outrider.cli.tables import counted
from outrider.cli.terminal import Terminal
from outrider.client.atif import trajectory
from outrider.client.client import AsyncClient, Client
from outrider.client.rollout import RUN_LABEL
from outrider.client.sample_files import (
    WRITERS,
    ImageFolder,
    JsonLines,
    Row,
    SampleFormat,
    SampleWriter,
    is_stream,
    sample_file,
    stored_images,
)
from outrider.errors import InvalidField
from outrider.lifecycle import GroupState
from outrider.schemas import EVALUATION_LABEL, GroupView, ResultsPage
from outrider.trajectory import ChatRow, Sample

BY_ENDING = {f".{kind}": kind for kind in WRITERS}
"""Binary formats, by the file name extension that chooses them."""
PAGE = 20
"""Number of groups that one request reads."""


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `outrider export --json`.

    left_out: the number of samples that `--min-reward` left out: samples with a lower reward or without a reward.
    evaluations: the number of left-out groups that evaluate a policy.
    cursor: the value of `--after` for the next export.
    sha256: the SHA-256 digest of the written file. None if the output is a device or a pipe.
    images: the number of different images in the samples, without images that the service does not store.
    image_files: the folder with the written images. None if no image was written.
    """

    samples: int
    left_out: int
    groups: int
    evaluations: int
    cursor: int
    output: str | None
    sha256: str | None
    images: int
    image_files: str | None


@command
def export(
    terminal: Terminal,
    service: Client,
    format: Annotated[
        SampleFormat | None,
        CliOption(
            "--format",
            help="Format of the file; chat has messages and tools instead of token ids, atif both.",
            show_default="by the file's ending, else jsonl",
        ),
    ] = None,
    after: Annotated[int, CliOption(min=0, metavar="CURSOR", help="Only groups that finished after this cursor.")] = 0,
    group: Annotated[str | None, CliOption(metavar="GROUP", help="Only this group.")] = None,
    run: Annotated[
        str | None, CliOption(metavar="RUN", help="Only the groups of this run of a data set (`outrider run`).")
    ] = None,
    min_reward: Annotated[
        float | None,
        CliOption(
            metavar="REWARD", help="Only samples with at least this reward.", show_default="all, masked ones too"
        ),
    ] = None,
    output: Output = None,
) -> None:
    """Write the training samples of done groups.

    There is one row for each sample, in the order in which the groups finished.
    Groups that evaluate a policy are left out, unless --group names one. Images
    are written to the folder `images` beside the file.

    Examples:

        outrider export -o samples.parquet

        outrider export -o samples.arrow

        outrider export --min-reward 1 -o accepted.jsonl

        outrider export --run 5f0c7b1d2a94 -o run.jsonl

        outrider export --format chat --min-reward 1 -o accepted-chats.jsonl

        outrider export --format atif -o trajectories.jsonl

        outrider export --after 120 | head -1 | jq '.ids | length'
    """
    if format is None:
        format = BY_ENDING.get(output.suffix, SampleFormat.JSONL) if output else SampleFormat.JSONL
    if output is None and (terminal.json or format in WRITERS):
        asked = "--json" if terminal.json else format.value
        raise InvalidField(f"{asked} needs a file to write to", field="output", hint="add -o FILE")
    samples, left_out, groups, evaluations, cursor = 0, 0, 0, 0, after
    # Images are not written beside a device or a pipe, such as /dev/stdout.
    file = None if output is None or is_stream(output) else output
    images = _Images(file.parent / "images" if file else None)
    lines = closing[SampleWriter](JsonLines(sys.stdout.buffer))
    with lines if output is None else sample_file(output, format) as writer:
        for done in _groups(service, group, after, samples=format is not SampleFormat.CHAT):
            cursor = max(cursor, done.cursor or 0)
            if run is not None and done.labels.get(RUN_LABEL) != run:
                continue
            if group is None and EVALUATION_LABEL in done.labels:
                evaluations += 1
                continue
            all_rows: Sequence[Row] = done.samples or ()
            chats: list[ChatRow] = []
            if format in (SampleFormat.CHAT, SampleFormat.ATIF):
                chats = [row for session in done.sessions for row in service.chat_rows(session.id)]
            if format is SampleFormat.CHAT:
                all_rows = chats
            rows = [
                row for row in all_rows if min_reward is None or (row.reward is not None and row.reward >= min_reward)
            ]
            if format is SampleFormat.ATIF:
                by_row = {(chat.session_id, chat.row): chat for chat in chats}
                samples_kept = [row for row in rows if isinstance(row, Sample)]
                writer.write([trajectory(row, by_row[row.session_id, row.row]) for row in samples_kept])
            else:
                writer.write(rows)
            images.take(rows, service)
            samples += len(rows)
            left_out += len(all_rows) - len(rows)
            groups += 1
    if run is not None and not groups:
        terminal.note(
            f"no done group is of the run {run!r}; `outrider status` lists the newest groups with their labels"
        )
    digest = None
    if file is not None:
        with file.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
    exported = Exported(
        samples=samples,
        left_out=left_out,
        groups=groups,
        evaluations=evaluations,
        cursor=cursor,
        output=str(output) if output else None,
        sha256=digest,
        images=len(images.shown),
        image_files=images.where,
    )
    if terminal.json:
        terminal.write_json(exported)
        return
    where = f" in {output}" if output else ""
    terminal.note(
        f"{counted(samples, 'sample')} of {counted(groups, 'group')}{where}; for later groups: --after {cursor}"
    )
    if left_out:
        terminal.note(f"{left_out} samples with a reward below {min_reward:g}, or none, were left out")
    if evaluations:
        terminal.note(f"{evaluations} groups of evaluations were left out; --group writes one")
    if digest:
        terminal.note(f"sha256 {digest}")
    if images.shown:
        left = "are kept by the service; with -o FILE they are written beside the file"
        terminal.note(f"{len(images.shown)} images {f'in {images.where}' if images.where else left}")


class _Images:
    """Counts the images in the exported samples, and downloads them if it was given a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = ImageFolder(folder) if folder else None
        self.shown: set[str] = set()

    @property
    def where(self) -> str | None:
        """The folder, or None if images are not downloaded or the folder has no image yet."""
        return str(self._folder.path) if self._folder and self.shown else None

    def take(self, samples: Sequence[Row], service: Client) -> None:
        digests = stored_images(samples)
        self.shown.update(digests)
        if self._folder is not None:
            for digest in self._folder.missing(digests):
                self._folder.add(service.image(digest))


def _groups(
    service: Client, only: str | None, after: int, *, samples: bool, limit: int = PAGE
) -> Generator[GroupView, None, None]:
    """Yield the group with the id `only` or, if `only` is None, every done group after the cursor `after`. One request
    reads `limit` groups."""
    if only is not None:
        group = service.group(only, samples=samples)
        if group.state is not GroupState.DONE:
            raise InvalidField(f"group {only} is not done", field="group", hint=f"see: outrider status {only}")
        yield group
        return
    page = service.results(after=after, limit=limit, samples=samples)
    while page.groups:
        with service.open(_reading(service.asynchronous, page.cursor, samples=samples, limit=limit)) as following:
            yield from page.groups
            page = service.run(_page_of(following))


@asynccontextmanager
async def _reading(
    client: AsyncClient, after: int, *, samples: bool, limit: int
) -> AsyncIterator[asyncio.Future[ResultsPage]]:
    """Start to read the page of results after the cursor `after`, and yield a future of it. The block writes the
    previous page in the meantime. Writing a page takes longer than reading one."""
    page: asyncio.Future[ResultsPage] = asyncio.get_running_loop().create_future()

    async def read() -> None:
        try:
            page.set_result(await client.results(after=after, limit=limit, samples=samples))
        except Exception as error:  # raised when the block awaits the page
            page.set_exception(error)

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read(), name="the next page")
        yield page
        reading.cancel()
    if page.done():
        page.exception()  # marks an error as read: if the block did not await the page, asyncio would log the error


async def _page_of(page: asyncio.Future[ResultsPage]) -> ResultsPage:
    return await page
