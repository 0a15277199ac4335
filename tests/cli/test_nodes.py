"""`outrider nodes` against a live service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.world import Cli
from outrider.config import SandboxesConfig
from outrider.sandbox.rootfs.store import ImageStore
from support.service import running_service
from support.skopeo import fake_skopeo


async def test_a_node_is_listed_drained_and_resumed(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        listed = await cli("nodes", "list", "--url", url)
        assert (listed.code, "node local: 0 sessions" in listed.out) == (0, True)
        assert all(lane in listed.out for lane in ("init", "ready", "run", "eval", "grading"))
        drained = await cli("nodes", "drain", "local", "--url", url)
        assert "drained: it takes no new sessions" in drained.out
        assert "drained" in (await cli("status", "--url", url)).out
        resumed = await cli("nodes", "resume", "local", "--url", url, "--json")
        assert [node["drained"] for node in json.loads(resumed.out)["nodes"]] == [False]
        unknown = await cli("nodes", "drain", "elsewhere", "--url", url)
        assert (unknown.code, "no node 'elsewhere'" in unknown.err, "'local'" in unknown.err) == (2, True, True)


async def test_gpus_are_listed_where_there_are_some(cli: Cli, tmp_path: Path) -> None:
    settings = SandboxesConfig(cpus=2.0, memory_mb=1024, gpus=("0", "amd.com/gpu=1"))
    async with running_service(tmp_path=tmp_path, sandboxes=settings) as (_, url):
        assert "0/2 cpus, 0/1,024 MiB, 0/2 GPUs" in (await cli("nodes", "list", "--url", url)).out
        [node] = (await cli("nodes", "list", "--url", url, "--json")).document["nodes"]
        assert (node["resources"]["gpus"], node["resources"]["gpus_set_aside"]) == (2, 0)


async def test_an_image_is_pulled_on_every_machine(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_skopeo(tmp_path, monkeypatch)
    async with running_service(tmp_path=tmp_path) as (_, url):
        pulled = await cli("nodes", "pull", "registry/x", "tools", "--url", url)
        assert (pulled.code, pulled.err) == (0, "pulling registry/x on every machine\n")
        assert pulled.out.splitlines()[-1].split()[::-1][:2] == ["it", "has"]
        missing = await cli("nodes", "pull", "registry/y", "tools", "--url", url, "--json")
        [machine] = missing.document["machines"]
        assert (missing.code, machine["node"], machine["digest"]) == (1, "local", None)
        assert "no such image" in machine["error"]["message"]
        assert ImageStore().image("tools").workdir == "/srv"


async def test_several_images_are_pulled_on_every_machine(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_skopeo(tmp_path, monkeypatch)
    async with running_service(tmp_path=tmp_path) as (_, url):
        pulled = await cli(
            "nodes", "pull", "a=registry/x", "b=registry/none", "../c=registry/x", "--url", url, "--json"
        )
        assert pulled.code == 1
        told = pulled.document
        assert told["images"]["a"]["machines"][0]["error"] is None
        assert "no such image" in told["images"]["b"]["machines"][0]["error"]["message"]
        assert told["failed"]["../c"]["field"] == "name"
        assert "(3 of 3)" in pulled.err
        shown = await cli("nodes", "pull", "a=registry/x", "d=registry/x", "--url", url)
        assert (shown.code, shown.out.count("has it")) == (0, 2)
