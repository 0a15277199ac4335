"""The service over TLS with a self-signed certificate: its clients, its workers and its sandboxes."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from outrider.client.client import AsyncClient
from outrider.config import TlsConfig
from outrider.errors import InvalidField, ServiceError, ServiceUnusable
from outrider.lifecycle import StopReason
from outrider.relay import Worker
from outrider.wire.tls import presenting
from support.service import running_service, say, scripted_engine

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificates")


class Pair(NamedTuple):
    certificate: Path
    key: Path


def made(folder: Path, name: str, *more: str) -> Pair:
    """Make a self-signed certificate for 127.0.0.1."""
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    subprocess.run(
        [
            *(str(OPENSSL), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"),
            *("-keyout", str(pair.key), "-out", str(pair.certificate), *(more or ("-nodes",))),
        ],
        check=True,
        capture_output=True,
    )
    return pair


async def test_an_agent_outside_of_a_sandbox_needs_no_certificate(tmp_path: Path) -> None:
    pair = made(tmp_path, "service")
    async with (
        running_service(tmp_path=tmp_path, token="root", tls=TlsConfig(**pair._asdict())) as (_, url),
        AsyncClient(url, token="root", ca=str(pair.certificate)) as client,
    ):
        assert url.startswith("https://127.0.0.1:")
        task = {
            "instruction": "say hello",
            "harness": {"command": ["/bin/sh", "-c", POST]},
            "runtime": {"kind": "process"},
            "evaluator": {"kind": "command", "run": "true"},
        }
        submitted = await client.submit({"task": task})
        [done] = await client.wait([submitted.id])
        result = done.sessions[0].result
        assert (result.stop_reason, result.error, result.turns) == (StopReason.COMPLETED, None, 1)
        async for event in client.events():
            if event.kind == "group.done":
                break
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as http,
            http.post(f"{url}/s/no-such-key/v1/chat/completions", json={}) as reply,
        ):
            assert reply.status == 401  # the gateway is served here, too


POST = """\
python3 - <<'END'
import json, os, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
print(urllib.request.urlopen(request).read())
END
"""


async def test_a_client_refuses_a_service_that_it_cannot_verify(tmp_path: Path) -> None:
    pair, other = made(tmp_path, "service"), made(tmp_path, "other")
    async with running_service(tmp_path=tmp_path, tls=TlsConfig(**pair._asdict())) as (_, url):
        for ca in (None, str(other.certificate)):
            async with AsyncClient(url, ca=ca) as client:
                with pytest.raises(ServiceUnusable, match="cannot be trusted"):
                    await client.status()
        elsewhere = url.replace("127.0.0.1", "localhost")  # the certificate does not name localhost
        async with AsyncClient(elsewhere, ca=str(pair.certificate)) as client:
            with pytest.raises(ServiceUnusable, match="cannot be trusted"):
                await client.status()
        async with AsyncClient(url.replace("https", "http")) as client:
            with pytest.raises(ServiceError):
                await client.status()
    with pytest.raises(InvalidField, match="cannot read"):
        AsyncClient("https://127.0.0.1", ca=str(pair.key))


async def test_a_worker_attaches_over_tls(tmp_path: Path) -> None:
    pair = made(tmp_path, "service")
    engine = scripted_engine(tmp_path, [say("hello")])
    async with (
        running_service(tmp_path=tmp_path, token="root", tls=TlsConfig(**pair._asdict())) as (service, url),
        Worker(url, engine, token="root", ca=str(pair.certificate)) as worker,
    ):
        await worker.attached()
        assert [each.name for each in service.pool.status()] == ["scripted", "trainer"]


def test_old_versions_of_tls_are_refused(tmp_path: Path) -> None:
    assert presenting(*made(tmp_path, "service")).minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("wrong", ["none", "other key", "not PEM", "encrypted", "key alone"])
async def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path, wrong: str) -> None:
    pair, other = made(tmp_path, "service"), made(tmp_path, "other")
    noise = tmp_path / "noise.pem"
    noise.write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    settings = {
        "none": TlsConfig(certificate=tmp_path / "none.pem", key=pair.key),
        "other key": TlsConfig(certificate=pair.certificate, key=other.key),
        "not PEM": TlsConfig(certificate=noise, key=pair.key),
        "key alone": TlsConfig(key=pair.key),
    }
    if wrong == "encrypted":
        settings[wrong] = TlsConfig(**made(tmp_path, "locked", "-passout", "pass:secret")._asdict())
    with pytest.raises(InvalidField) as caught:
        async with running_service(tmp_path=tmp_path, tls=settings[wrong]):
            pass
    assert caught.value.field in ("tls.certificate", "tls.key")
