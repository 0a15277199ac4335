"""`outrider token` with a running service, and the first token in the data folder of a stopped service."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from outrider.client.client import AsyncClient
from outrider.service.data_folder import RUNS
from support.postgresql import PostgresqlServer
from support.service import running_service

from .world import Cli


async def test_tokens_are_made_listed_and_revoked(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, token="root") as (_, url):
        root = ("--url", url, "--token", "root")
        made = await cli(
            "token", "create", "--role", "submit", "--name", "alice", "--max-queued", "9", "--expires", "1", *root
        )
        assert (made.code, made.err) == (0, "keep this token: it cannot be shown again\n")
        text = made.out.strip()
        assert (await cli("status", "--url", url, "--token", text)).code == 0
        refused = await cli("token", "list", "--url", url, "--token", text)
        assert (refused.code, refused.err.splitlines()[0]) == (
            2,
            "error: GET /v1/tokens needs a token with the role 'admin'; 'alice' has 'submit'",
        )
        listed = await cli("token", "list", *root)
        assert listed.out.splitlines()[-1].split() == ["alice", "submit", "alice", "9", "1.0", "d", "more"]
        assert (await cli("token", "revoke", "alice", *root)).out == "alice is revoked\n"
        assert "revoked" in (await cli("token", "list", *root)).out
        ended = await cli("status", "--url", url, "--token", text)
        assert ended.err.startswith("error: this token was revoked")
        documents = [
            (await cli("token", *words, *root, "--json")).document for words in (["list"], ["revoke", "alice"])
        ]
        assert documents[0]["tokens"] == [documents[1]]


async def test_tokens_of_a_tenant_and_its_consumers(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, token="root") as (_, url):
        root = ("--url", url, "--token", "root")
        made = await cli(
            "token", "create", "--role", "submit", "--name", "alice", "--tenant", "team-a", *root, "--json"
        )
        assert made.document["token"]["tenant"] == "team-a"
        async with AsyncClient(url, token=made.document["text"]) as alice:
            await alice.results(consumer="trainer")
        assert (await cli("consumers", "list", *root)).out.splitlines()[-1].split()[:2] == ["trainer", "team-a"]
        for words in (["ack", "trainer", "0"], ["rm", "trainer"]):
            assert (await cli("consumers", *words, *root)).err.startswith("error: no consumer 'trainer'")
            assert (await cli("consumers", *words, "--tenant", "team-a", *root)).code == 0
        assert (await cli("consumers", "list", *root, "--json")).document == {"consumers": []}


async def test_the_first_token_is_made_before_the_service_starts(cli: Cli, tmp_path: Path) -> None:
    data = tmp_path / "data"
    nowhere = await cli("token", "create", "--role", "admin", "--name", "me", "--data", data)
    assert (nowhere.code, nowhere.err.splitlines()[0]) == (2, f"error: there is no folder {data}")
    data.mkdir()
    weak = await cli("token", "create", "--role", "read", "--name", "me", "--data", data)
    assert (weak.code, "first token must be an admin's" in weak.err) == (2, True)
    made = await cli("token", "create", "--role", "admin", "--name", "me", "--data", data, "--json")
    text = made.document["text"]
    [line] = (data / "audit.jsonl").read_bytes().splitlines()
    assert msgspec.json.decode(line)["ids"] == {"name": "me"}
    async with running_service(tmp_path=tmp_path) as (_, url):
        assert (await cli("status", "--url", url)).err.startswith("error: this service requires a token")
        assert (await cli("status", "--url", url, "--token", text)).code == 0
        busy = await cli("token", "create", "--role", "read", "--name", "you", "--data", data)
        assert (busy.code, "another service is using" in busy.err) == (1, True)


ADMIN = ("token", "create", "--role", "admin", "--name", "me")
NOWHERE = "postgresql://u@127.0.0.1:1/x"


def test_a_token_is_made_in_the_store_of_the_settings(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, config = tmp_path / "data", tmp_path / "outrider.toml"
    data.mkdir()
    config.write_text(f"data = '{data}'\nstore = '{NOWHERE}'")
    monkeypatch.chdir(tmp_path)
    ran = cli.run(*ADMIN, "--data", data)
    assert (ran.code, ran.out) == (2, "")
    assert "another store than SQLite: outrider.toml names one" in ran.err
    for words in (("--config", config), ("--store", NOWHERE, "--data", data)):
        ran = cli.run(*ADMIN, *words)
        assert (ran.code, "127.0.0.1:1" in ran.err) == (1, True), "it is PostgreSQL that is asked"
    config.unlink()
    (data / RUNS).touch()  # every service makes this database
    ran = cli.run(*ADMIN, "--data", data)
    assert (ran.code, ran.out) == (2, "")
    assert f"it has used {data}, but there is no outrider.sqlite3" in ran.err
    assert {path.name for path in data.iterdir()} == {"lock", RUNS}


@pytest.mark.parametrize("text", ["store = 'postgresql://127.0.0.1:1/x'", "broken ="])
def test_settings_of_another_folder_do_not_matter(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "lock").touch()  # left by a service that could not start
    monkeypatch.chdir(tmp_path)
    Path("outrider.toml").write_text(text)  # settings of the data folder `.outrider`, or a broken file
    assert cli.run(*ADMIN, "--data", "data").code == 0


def test_a_token_in_the_data_folder_says_so(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    Path("outrider.toml").write_text("port = 1")
    Path("other.toml").write_text("data = 'data'")
    for number, words in enumerate((["--data", "data"], ["--config", "other.toml"])):
        if number:  # the settings of another service, now that this service has a database
            Path("outrider.toml").write_text(f"store = '{NOWHERE}'")
        ran = cli.run("token", "create", "--role", "admin", "--name", f"a{number}", *words)
        assert (ran.code, "only a service whose store is SQLite in data knows this token" in ran.err) == (0, True)


@pytest.mark.deep
async def test_the_first_token_of_a_service_with_postgresql(
    cli: Cli, tmp_path: Path, postgresql: PostgresqlServer
) -> None:
    url = await postgresql.new_database()
    (tmp_path / "data").mkdir()
    made = await cli(*ADMIN, "--data", tmp_path / "data", "--store", url)
    assert (made.code, made.err) == (0, "keep this token: it cannot be shown again\n")
    async with running_service(tmp_path=tmp_path, store=url) as (_, served):
        assert (await cli("status", "--url", served, "--token", made.out.strip())).code == 0


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--role", "read", "--name", "a b"), "name"),
        (("--role", "read", "--name", "x" * 65), "name"),
        (("--role", "read", "--name", "x", "--max-queued", "0"), "max_queued"),
        (("--role", "read", "--name", "x", "--expires", "-1"), "expires_days"),
    ],
)
def test_a_token_that_cannot_be_is_refused(cli: Cli, tmp_path: Path, words: tuple[str, ...], field: str) -> None:
    ran = cli.run("token", "create", *words, "--data", tmp_path)
    assert (ran.code, ran.err.split(":")[1].strip()) == (2, field)
