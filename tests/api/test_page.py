"""The page's files: routes, access and policy, and whether the bundle matches its sources. The texts of tokens."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import aiohttp
import pytest

from outrider.api.page import FILES, FOLDER, HEADERS
from outrider.client.client import AsyncClient
from outrider.tokens.rendering.tokenizer import Tokenizer
from support.service import running_service, say
from support.tokenizer import write_tokenizer

ROOT = Path(__file__).parent.parent.parent
SOURCES = ROOT / "page"
TASK = {
    "instruction": "say hello",
    "harness": {"agent": "tools"},
    "runtime": {"kind": "memory"},
    "evaluator": {"kind": "command", "run": "true"},
}


async def test_the_page_is_served_to_everybody_and_its_data_is_not(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path=tmp_path, token="secret-of-the-operator") as (_, url),
        aiohttp.ClientSession() as http,
    ):
        for path, (name, media_type) in FILES.items():
            async with http.get(f"{url}{path}") as reply:
                assert (reply.status, reply.headers["content-type"]) == (200, media_type)
                assert await reply.read() == (FOLDER / name).read_bytes()
                assert {key: reply.headers[key] for key in HEADERS} == HEADERS
                tag = reply.headers["ETag"]
            async with http.get(f"{url}{path}", headers={"If-None-Match": tag}) as again:
                assert (again.status, await again.read()) == (304, b"")
        for path in ("/v1/groups", "/page", "/page/../v1/groups", "/page/SOURCES.sha256"):
            async with http.get(f"{url}{path}") as reply:
                assert reply.status == 401, path
        async with http.post(f"{url}/") as reply:
            assert reply.status == 405 or reply.status == 404


async def test_the_policy_allows_the_page_its_own_files_only() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in HEADERS["Content-Security-Policy"].split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    html = (FOLDER / "index.html").read_text()
    assert re.findall(r'(?:src|href)="([^"]+)"', html) == ["/page/icon.svg", "/page/page.css", "/page/page.js"]
    assert set(re.findall(r'"(/page/[^"]+)"', html)) <= set(FILES)
    assert "style=" not in html
    assert "<script>" not in html


def test_the_bundle_belongs_to_its_sources() -> None:
    """`make page` writes the digest of the sources, by the rule of page/build.mjs."""
    names = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"]
    names += [f"src/{file.name}" for file in (SOURCES / "src").iterdir()]
    digest = hashlib.sha256()
    for name in sorted(names):
        data = (SOURCES / name).read_bytes()
        digest.update(f"{name} {len(data)}\n".encode() + data)
    assert (FOLDER / "SOURCES.sha256").read_text().strip() == digest.hexdigest(), "run: make page"


def test_the_licences_of_all_packages_are_in_the_bundle() -> None:
    text = (FOLDER / "LICENCES.txt").read_text()
    for name, version in json.loads((SOURCES / "package.json").read_text())["dependencies"].items():
        assert f"{name} {version} (MIT)" in text
        assert "Permission is hereby granted" in text


def test_the_bundle_is_small() -> None:
    import gzip

    assert sum(len(gzip.compress((FOLDER / name).read_bytes())) for name, _ in FILES.values()) < 150_000


@pytest.mark.real
def test_the_sources_build_this_bundle(tmp_path: Path) -> None:
    """Builds from nothing, with npm and a registry; skipped without them."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    shutil.copytree(SOURCES, tmp_path / "page", ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(FOLDER, tmp_path / "src" / "outrider" / "page")
    place = tmp_path / "page"
    fetched = subprocess.run(
        ["npm", "ci", "--no-audit", "--no-fund"], cwd=place, capture_output=True, text=True, check=False
    )
    if fetched.returncode:
        pytest.skip(f"npm ci failed: {fetched.stderr[-300:]}")
    checked = subprocess.run(["npx", "tsc", "--noEmit"], cwd=place, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    built = subprocess.run(["node", "build.mjs", "--check"], cwd=place, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


async def test_a_service_that_replies_to_others_at_its_root_has_the_page_below(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, compat=("polar",)) as (_, url), aiohttp.ClientSession() as http:
        async with http.get(f"{url}/") as reply:
            assert "text/html" not in reply.headers["content-type"]
        async with http.get(f"{url}/page/") as reply:
            assert reply.headers["content-type"].startswith("text/html")


async def test_turns_have_the_texts_of_their_tokens_on_request(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path=tmp_path, replies=[say("naïve 日本 🙂")]) as (_, url),
        AsyncClient(url) as client,
    ):
        group = await client.submit({"task": TASK})
        [done] = await client.wait([group.id])
        [plain] = await client.turns(done.sessions[0].id, tokens=True)
        assert plain.tokens is not None
        assert plain.tokens.output_pieces is None
        body = json.loads(
            await client.reply_body(f"/v1/sessions/{done.sessions[0].id}/turns", {"tokens": True, "pieces": True})
        )
        tokens = body["turns"][0]["tokens"]
        assert len(tokens["output_pieces"]) == len(tokens["output_ids"])
        assert len(tokens["prompt_pieces"]) == len(tokens["prompt_delta"])
        assert "".join(tokens["output_pieces"]) == plain.sampled == "naïve 日本 🙂<|im_end|>"
        assert "".join(tokens["prompt_pieces"]) == plain.context


def test_pieces_are_whole_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer"))
    ids = tokenizer.encode("é🙂x")
    pieces = tokenizer.pieces(ids)
    assert "".join(pieces) == "é🙂x"
    assert set(pieces) == {"", "é", "🙂", "x"}
    assert "".join(tokenizer.pieces(tokenizer.encode("🙂")[:-1])) == "\ufffd"
    assert tokenizer.pieces([]) == []


async def test_events_can_begin_with_the_next_one(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path=tmp_path) as (_, url),
        AsyncClient(url) as client,
        aiohttp.ClientSession() as http,
    ):
        old = await client.submit({"task": TASK})
        await client.wait([old.id])
        async with http.get(f"{url}/v1/events?new=true") as stream:
            new = await client.submit({"task": TASK})
            async with asyncio.timeout(20):
                async for line in stream.content:
                    if line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        break
            assert (event["group_id"], event["kind"]) == (new.id, "group.created")
