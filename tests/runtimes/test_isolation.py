"""A namespace sandbox is isolated from the host and from other sandboxes. Only the model gateway can be reached."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from aiohttp import web

from outrider.errors import RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.rootfs.store import ImageStore
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime

from .world import World

FETCH = """
import http.client, sys, threading
def once(n, body):
    c = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]))
    c.request('POST', '/echo/%d' % n, body=body)
    out[n] = c.getresponse().read()
    c.close()
out = {}
bodies = {n: bytes([n]) * (1 << n) for n in range(20)}
threads = [threading.Thread(target=once, args=item) for item in bodies.items()]
[t.start() for t in threads]; [t.join() for t in threads]
print(out == bodies)
"""


async def echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


@pytest.fixture
async def sandbox(world: World) -> Runtime:
    return await world.start("namespace")


async def output(sandbox: Runtime, command: str) -> str:
    result = await sandbox.exec(command, seconds=10)
    return (result.stdout + result.stderr).decode()


async def test_root_inside_is_nobody_special(sandbox: Runtime) -> None:
    assert await output(sandbox, "id -u; hostname") == "0\nsandbox\n"
    assert "CapEff:\t0000000000000000" in await output(sandbox, "cat /proc/self/status")
    assert (await sandbox.exec("mount -t tmpfs none /mnt || unshare -Ur true", seconds=10)).exit_code != 0


async def test_kill_all_hurts_neither_host_nor_tool_server(sandbox: Runtime) -> None:
    await sandbox.exec(["python3", "-c", "import os; os.kill(0, 9)"], seconds=10)
    await sandbox.exec(["python3", "-c", "import os; os.kill(-1, 9)"], seconds=10)
    await sandbox.exec("kill -9 1; kill -STOP 1", seconds=10)
    assert await output(sandbox, "echo alive") == "alive\n"


async def test_nothing_but_loopback(sandbox: Runtime) -> None:
    assert (await output(sandbox, "cut -d: -f1 /proc/net/dev | tail -n +3")).split() == ["lo"]
    connect = "import socket; socket.create_connection(('192.0.2.1', 80), 2)"
    assert (await sandbox.exec(["python3", "-c", connect], seconds=10)).exit_code == 1


async def test_host_files_are_not_there(sandbox: Runtime, folder: Path) -> None:
    (folder / "secret").write_text("s3cret")
    for path in (
        str(folder / "secret"),
        "/etc/shadow",
        "/etc/ssl/private",
        "/home",
        "/var/lib",
        f"/proc/{os.getpid()}",
    ):
        assert (await sandbox.exec(["test", "-e", path], seconds=10)).exit_code == 1, path
    assert (await output(sandbox, "ls -A /root; ls -A /tmp")) == ""
    assert str(folder) not in await output(sandbox, "cat /proc/*/environ /proc/*/cmdline")


async def test_sandboxes_do_not_see_each_other(world: World) -> None:
    one, two = await world.start("namespace"), await world.start("namespace")
    await one.write("/tmp/mine", b"x")
    await one.exec("sleep 5001 &", seconds=10)
    assert await output(two, "ls /tmp") == ""
    assert "5001" not in await output(two, "cat /proc/[0-9]*/cmdline")


async def test_writes_go_nowhere(sandbox: Runtime) -> None:
    target = f"/usr/outrider-test-{os.getpid()}"
    result = await sandbox.exec(f"touch {target} /etc/x /opt-x /root/x /var/tmp/x /work/x /tmp/x", seconds=10)
    assert (result.exit_code == 0) is (os.stat("/usr").st_uid == os.getuid())
    for path in (target, "/etc/x"):
        with pytest.raises(FileNotFoundError):
            os.stat(path)


async def test_the_hosts_devices_are_used_and_not_changed(sandbox: Runtime) -> None:
    """If the node runs as the host's root, the sandbox's root is the owner of the host's /dev/null."""
    shared = "/dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /proc/keys /proc/timer_list"
    for way in ("chmod 666", "touch -c", "chown 0:0"):
        result = await sandbox.exec(f"for f in {shared}; do test ! -e $f || ! {way} $f || echo $f; done", seconds=10)
        assert result.stdout == b"", way
    assert await output(sandbox, "echo x > /dev/null && head -c 2 /dev/zero | wc -c") == "2\n"
    spawned = "import pty; pty.spawn(['sh', '-c', 'echo y > /dev/tty'])"
    assert await output(sandbox, f'python3 -c "{spawned}"') == "y\r\n"


async def test_mounts_are_read_only_at_their_own_path(world: World, folder: Path) -> None:
    programs = folder / "deep" / "programs"
    programs.mkdir(parents=True)
    (programs / "run").write_text("tool")
    (folder / "deep" / "other").write_text("hidden")
    sandbox = await world.start("namespace", mounts=(programs,))
    assert await sandbox.read(str(programs / "run")) == b"tool"
    assert (await sandbox.exec(["touch", str(programs / "new")], seconds=10)).exit_code == 1
    assert await output(sandbox, f"ls {folder}/deep") == "programs\n"


async def test_no_descriptor_of_the_host_leaks_in(world: World, folder: Path) -> None:
    fd = os.open(folder / "open", os.O_CREAT | os.O_WRONLY)
    os.set_inheritable(fd, True)
    sandbox = await world.start("namespace")
    os.close(fd)
    assert await output(sandbox, "ls -l /proc/self/fd | grep -c open") == "0\n"
    assert (await sandbox.exec("readlink /proc/1/fd/* /proc/1/exe /proc/1/cwd", seconds=10)).stdout == b""


async def test_gateway_through_the_bridge(world: World) -> None:
    async with world.gateway(echo):
        sandbox = await world.start("namespace")
        port = sandbox.endpoint.rpartition(":")[2]
        result = await sandbox.exec(["python3", "-c", FETCH, port], seconds=30)
        assert (result.stdout, result.stderr) == (b"True\n", b"")


async def test_bridge_streams_and_passes_a_disconnect_on(world: World) -> None:
    left = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"tick\n")
                await asyncio.sleep(0.01)
        finally:
            left.set()

    async with world.gateway(stream):
        sandbox = await world.start("namespace")
        program = (
            "import http.client, sys\n"
            "c = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1])); c.request('GET', '/')\n"
            "print(c.getresponse().readline())"
        )
        result = await sandbox.exec(["python3", "-c", program, sandbox.endpoint.rpartition(":")[2]], seconds=10)
        assert result.stdout == b"b'tick\\n'\n"
        async with asyncio.timeout(30):
            await left.wait()


async def test_bridge_without_a_gateway_refuses_quickly(sandbox: Runtime) -> None:
    program = "import urllib.request, sys; urllib.request.urlopen(sys.argv[1], timeout=5)"
    result = await sandbox.exec(["python3", "-c", program, sandbox.endpoint], seconds=10)
    assert result.exit_code == 1
    assert not result.timed_out


async def test_process_runtime_reaches_the_gateway_by_its_port(world: World) -> None:
    async with world.gateway(echo):
        sandbox = await world.start("process")
        result = await sandbox.exec(["python3", "-c", FETCH, sandbox.endpoint.rpartition(":")[2]], seconds=30)
        assert (result.stdout, result.stderr) == (b"True\n", b"")


async def test_start_fails_cleanly_without_the_socket(world: World) -> None:
    sandbox = world.create("namespace")
    world.socket.unlink()
    with pytest.raises(RuntimeFailure) as raised:
        await sandbox.start()
    assert "gateway.sock" in (raised.value.log_tail or "")
    with pytest.raises(RuntimeFailure):
        await sandbox.exec("true", seconds=1)


async def test_rootfs_is_used_and_kept_clean(world: World, folder: Path) -> None:
    root = tiny_root(folder)
    sandbox = await world.start("namespace", rootfs=str(root))
    assert await output(sandbox, "cat /etc/release; touch /etc/new /work/new") == "tiny"
    assert not (root / "etc/new").exists()
    assert not (root / "work").exists()


@pytest.mark.deep
async def test_an_image_is_used_with_what_it_sets(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(folder / "home"))
    with tarfile.open(folder / "layer.tar", "w") as archive:
        archive.add(tiny_root(folder), ".")
    config = {"config": {"Env": ["COLOUR=red", "SHAPE=round"]}}
    manifest = [{"Config": "config.json", "Layers": ["layer.tar"]}]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with tarfile.open(folder / "image.tar", "w") as archive:
        for name in ("manifest.json", "config.json", "layer.tar"):
            archive.add(folder / name, name)
    image = ImageStore().import_(folder / "image.tar", "tiny")
    for _ in range(2):
        sandbox = await world.start("namespace", image="tiny", env={"SHAPE": "square"})
        assert await output(sandbox, "cat /etc/release; echo $COLOUR $SHAPE; touch /etc/new") == "tinyred square\n"
    assert not (ImageStore().root(image) / "etc/new").exists()
    with pytest.raises(RuntimeUnavailable, match="no image 'other'"):
        await world.start("namespace", image="other")


def tiny_root(folder: Path) -> Path:
    root = folder / "root"
    for name in ("bin", "lib", "lib64", "usr/bin", "etc"):
        (root / name).mkdir(parents=True)
    (root / "etc/release").write_text("tiny")
    busybox_like(root, ("bash", "touch", "cat"))
    return root


def busybox_like(root: Path, names: tuple[str, ...]) -> None:
    """Copy a few of the host's programs, and the libraries that they need, into a root without Python."""
    for name in names:
        program = Path(shutil.which(name) or "").resolve()
        shutil.copy(program, root / "bin" / program.name)
        for word in subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.split():
            if word.startswith("/"):
                target = root / word.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(word).resolve(), target)


async def test_wrong_rootfs_is_told_early(world: World, folder: Path) -> None:
    with pytest.raises(RuntimeUnavailable, match="not a folder"):
        await world.start("namespace", rootfs=str(folder / "nothing"))


def test_available_says_how_limits_are_kept() -> None:
    assert "limits by" in NamespaceRuntime.available().detail


@pytest.mark.deep
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can cover a part of /proc")
def test_a_masked_proc_is_seen_before_any_sandbox_fails() -> None:
    probe = "from outrider.sandbox.runtimes.namespace.runtime import probe_user_namespaces; probe_user_namespaces()"
    mask = f"mount -t tmpfs none /proc/sys && exec {sys.executable} -c '{probe}'"
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "slave", "sh", "-c", mask], capture_output=True, text=True, check=False
    )
    assert "no /proc can be mounted" in done.stderr
