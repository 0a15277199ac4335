"""`outrider artifacts` lists and fetches files, and refuses wrong options."""

from __future__ import annotations

from pathlib import Path

from cli.world import REPLIES, Cli, write_task
from support.service import running_service


async def test_what_a_grader_prints_can_be_fetched(cli: Cli, tmp_path: Path) -> None:
    task = write_task(tmp_path)
    evaluator = '[evaluator]\nrun = "echo because; exit 1"\n'
    task.write_text(task.read_text().partition("[evaluator]")[0] + evaluator)
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        ran = await cli("run", str(task), "--url", url, "--json")
        session = ran.document["sessions"][0]["id"]
        shown = await cli("show", session, "--url", url)
        printed = await cli("artifacts", session, "outrider:grading.log", "--url", url)
    assert printed.out == "because\n"
    assert f"outrider artifacts {session}" in shown.out


async def test_listed_and_fetched(cli: Cli, tmp_path: Path) -> None:
    task = write_task(tmp_path)
    task.write_text('artifacts = ["*.txt", "none"]\n' + task.read_text())
    file = tmp_path / "got"
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url):
        ran = await cli("run", str(task), "--url", url, "--json")
        session = ran.document["sessions"][0]["id"]
        seen = await cli("artifacts", session, "--url", url)
        read = await cli("artifacts", session, "--url", url, "--json")
        printed = await cli("artifacts", session, "/work/out.txt", "--url", url)
        got = await cli("artifacts", session, "work/out.txt", "-o", str(file), "--url", url, "--json")
        missing = await cli("artifacts", session, "/work/nothing", "--url", url)
        refused = [
            await cli("artifacts", session, *words, "--url", url)
            for words in (("/work/out.txt", "--json"), ("-o", str(file)))
        ]
    assert "/work/out.txt" in seen.out
    assert "matches nothing" in seen.out
    assert [each["path"] for each in read.document["artifacts"]] == ["/work/out.txt"]
    assert printed.out == "hi\n"
    assert got.document == {"path": "work/out.txt", "size": 3, "output": str(file)}
    assert file.read_bytes() == b"hi\n"
    assert (missing.code, missing.err.splitlines()[0]) == (2, f"error: session {session} has kept no '/work/nothing'")
    assert [ran.code for ran in refused] == [2, 2]
