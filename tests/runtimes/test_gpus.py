"""GPUs in sandboxes: which GPUs the machine has, and that a sandbox has the GPUs that it was given and no others.

No test here needs a GPU. The device files of a fake driver are the host's /dev/null and /dev/zero. Container engines
get descriptions of devices of an invented vendor (Container Device Interface), and attach them for real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.errors import RuntimeUnavailable
from outrider.sandbox.runtimes.apptainer import runtime as apptainer
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.containers.create_request import ContainerRequest, HostMount
from outrider.sandbox.runtimes.containers.daemon import get
from outrider.sandbox.runtimes.containers.libpod_request import libpod_body
from outrider.sandbox.runtimes.namespace import runtime as namespace
from outrider.sandbox.runtimes.nvidia import NvidiaDriver, driver_libraries
from outrider.spec import Resources

from . import engines, sif_images
from .world import CONTAINERS, KindOf, World

INFORMATION = """Model: \t\t NVIDIA Test {minor}
IRQ:   \t\t 253
GPU UUID: \t GPU-{uuid}-a5d5
Bus Location: \t {bus}
Device Minor: \t {minor}
"""
LISTING = """2 libs found in cache `/etc/ld.so.cache'
\tlibnvidia-ml.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1
\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1
\tlibcuda.so.1 (libc6) => /usr/lib/i386-linux-gnu/libcuda.so.1
\tlibcuda.so.1 (libc6,x86-64) => /usr/local/cuda/compat/libcuda.so.1
\tlibcudart.so.12 (libc6,x86-64) => /usr/local/cuda/lib64/libcudart.so.12
\tlibc.so.6 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libc.so.6
\tlibnvidia-ptxjitcompiler.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so.1
"""


def driver_with(folder: Path, *minors: int, uuids: str = "abcdefgh") -> NvidiaDriver:
    """Return a driver with one GPU for each minor number, in the order of the bus. The GPUs' device files are
    /dev/null, the others /dev/zero."""
    proc, dev = folder / "proc", folder / "dev"
    dev.mkdir()
    for at, minor in enumerate(minors):
        told = proc / "gpus" / f"0000:{at + 10:02x}:00.0" / "information"
        told.parent.mkdir(parents=True)
        told.write_text(INFORMATION.format(minor=minor, uuid=uuids[at] * 8, bus=told.parent.name))
        (dev / f"nvidia{minor}").symlink_to("/dev/null")
    for name in ("nvidiactl", "nvidia-uvm"):
        (dev / name).symlink_to("/dev/zero")
    library = folder / "libcuda.so.1.2"
    library.write_text("a library")
    (folder / "libcuda.so.1").symlink_to(library)
    ldconfig = folder / "ldconfig"
    machine = {"x86_64": "x86-64", "aarch64": "AArch64"}[os.uname().machine]
    ldconfig.write_text(f"#!/bin/sh\necho 'libcuda.so.1 (libc6,{machine}) => {folder}/libcuda.so.1'\n")
    ldconfig.chmod(0o755)
    return NvidiaDriver(proc=proc, dev=dev, ldconfig=str(ldconfig))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variable that limits the GPUs of this process, so that it does not change the results."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_counted_in_the_order_of_the_bus_and_not_by_their_files(tmp_path: Path) -> None:
    driver = driver_with(tmp_path, 1, 0, 2)
    assert [(gpu.name, gpu.minor, gpu.model) for gpu in driver.gpus()] == [
        ("0", 1, "NVIDIA Test 1"),
        ("1", 0, "NVIDIA Test 0"),
        ("2", 2, "NVIDIA Test 2"),
    ]
    dev = str(tmp_path / "dev")
    assert driver.shown(["0", "GPU-cccccccc"]).devices == (
        (f"{dev}/nvidia1", "/dev/nvidia1"),
        (f"{dev}/nvidia2", "/dev/nvidia2"),
        (f"{dev}/nvidiactl", "/dev/nvidiactl"),
        (f"{dev}/nvidia-uvm", "/dev/nvidia-uvm"),
    )
    assert driver.shown(["nvidia.com/gpu=1"]).devices[0] == (f"{dev}/nvidia0", "/dev/nvidia0")


@pytest.mark.usefixtures("alone")
def test_a_gpu_that_may_not_be_opened_is_not_there(tmp_path: Path) -> None:
    driver = driver_with(tmp_path, 0, 1, 2)
    (tmp_path / "dev/nvidia1").unlink()
    assert [gpu.name for gpu in driver.visible()] == ["0", "2"]
    with pytest.raises(RuntimeUnavailable, match=r"no NVIDIA GPU '1' .*there are: 0, 2") as refused:
        driver.shown(["1"])
    assert "sandboxes.gpus" in str(refused.value.hint)


@pytest.mark.usefixtures("alone")
def test_in_a_container_there_may_be_the_device_files_alone(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia3", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / "dev" / name).touch()
    driver = NvidiaDriver(proc=tmp_path / "proc", dev=tmp_path / "dev")
    assert [(gpu.name, gpu.minor) for gpu in driver.visible()] == [("0", 3), ("1", 10)]
    assert NvidiaDriver(proc=tmp_path / "proc", dev=tmp_path / "none").visible() == ()


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        ("2,0", ["2", "0"]),
        (" 1 , GPU-aaaa ", ["1", "0"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("0,9,1", ["0"]),
        ("0,0", ["0"]),
        ("NoDevFiles", []),
        ("GPU-", []),
        ("MIG-bbbbbbbb", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, visible: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert [gpu.name for gpu in driver_with(tmp_path, 0, 1, 2).visible()] == visible


def test_in_a_batch_job_cuda_counts_the_gpus_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_with(tmp_path, 0, 1, 2, 3)
    for name in ("nvidia0", "nvidia1"):  # GPUs of another job
        (tmp_path / "dev" / name).unlink()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert [gpu.name for gpu in driver.visible()] == ["2", "3"]


def test_the_drivers_libraries_are_those_of_this_processor_and_no_others() -> None:
    system = "/usr/lib/x86_64-linux-gnu"
    assert driver_libraries(LISTING, "x86-64") == {
        f"{name}.so.1": f"{system}/{name}.so.1" for name in ("libnvidia-ml", "libcuda", "libnvidia-ptxjitcompiler")
    }
    assert driver_libraries(LISTING, "AArch64") == {}


def test_a_machine_without_the_drivers_libraries_is_told_so(tmp_path: Path) -> None:
    driver = driver_with(tmp_path, 0)
    for program in ("#!/bin/sh\necho 'libm.so.6 (libc6,x86-64) => /lib/libm.so.6'\n", "#!/bin/sh\nexit 1\n"):
        (tmp_path / "ldconfig").write_text(program)
        with pytest.raises(RuntimeUnavailable):
            driver.shown(["0"])
    assert driver.shown([]).libraries == ()


async def output(sandbox: Runtime, command: str) -> str:
    result = await sandbox.exec(command, seconds=30)
    return (result.stdout + result.stderr).decode().strip()


async def has_its_gpus_and_no_other(sandbox: Runtime) -> None:
    """Check a sandbox that was given the second and the third of three GPUs, whose files are nvidia0 and nvidia2."""
    assert await output(sandbox, "ls /dev | grep nvidia") == "nvidia-uvm\nnvidia0\nnvidia2\nnvidiactl"
    assert await output(sandbox, "echo x > /dev/nvidia0 && cat /dev/nvidia0 | wc -c") == "0"
    assert await output(sandbox, "head -c 4 /dev/nvidiactl | od -An -tx1") == "00 00 00 00"
    assert await output(sandbox, "echo $CUDA_VISIBLE_DEVICES $NVIDIA_VISIBLE_DEVICES") == "0,1 1,2"
    assert await output(sandbox, "cat ${LD_LIBRARY_PATH%%:*}/libcuda.so.1") == "a library"
    assert await output(sandbox, "echo $LD_LIBRARY_PATH") == "/run/outrider-nvidia:/opt/lib"
    assert "Read-only" in await output(sandbox, "echo x > /run/outrider-nvidia/libcuda.so.1")
    # These are the numbers of /dev/null. The device file of a real GPU could not be made either.
    assert (await sandbox.exec("mknod /dev/nvidia1 c 1 3 || mknod /tmp/nvidia1 c 1 3", seconds=30)).exit_code != 0


def namespace_with(driver: NvidiaDriver) -> KindOf:
    return KindOf(partial(namespace.launch, driver=driver))


async def test_a_namespace_sandbox_is_shown_its_gpus_alone(world: World, tmp_path: Path) -> None:
    made = namespace_with(driver_with(tmp_path, 1, 0, 2))
    env = {"LD_LIBRARY_PATH": "/opt/lib", "CUDA_VISIBLE_DEVICES": "7", "NVIDIA_VISIBLE_DEVICES": "all"}
    sandbox = world.create_with(made, gpus=("1", "2"), env=env)
    await sandbox.start()
    await has_its_gpus_and_no_other(sandbox)


async def test_a_sandbox_without_gpus_sees_none(world: World, tmp_path: Path) -> None:
    sandbox = world.create_with(namespace_with(driver_with(tmp_path, 0)))
    await sandbox.start()
    assert await output(sandbox, "ls /dev /run | grep nvidia; echo [$LD_LIBRARY_PATH$CUDA_VISIBLE_DEVICES]") == "[]"


async def test_a_namespace_sandbox_cannot_be_given_the_gpu_of_another_maker(world: World, tmp_path: Path) -> None:
    sandbox = world.create_with(namespace_with(driver_with(tmp_path, 0)), gpus=("amd.com/gpu=0",))
    with pytest.raises(RuntimeUnavailable, match=r"no NVIDIA GPU 'amd.com/gpu=0'") as refused:
        await sandbox.start()
    assert not refused.value.retryable


FAKE_DEV = "OUTRIDER_TEST_FAKE_DEV"
WITH_FAKE_DEV = """
set -e
mount -t tmpfs none "$1"
mkdir "$1/pts" "$1/shm"
mount --bind /dev/pts "$1/pts"
for name in null zero full random urandom tty fuse; do touch "$1/$name"; mount --bind "/dev/$name" "$1/$name"; done
for name in nvidia0 nvidia1 nvidia2; do touch "$1/$name"; mount --bind /dev/null "$1/$name"; done
for name in nvidiactl nvidia-uvm; do touch "$1/$name"; mount --bind /dev/zero "$1/$name"; done
ln -s pts/ptmx "$1/ptmx"
ln -s /proc/self/fd "$1/fd"
mount --move "$1" /dev
shift
exec "$@"
"""
"""Runs a command with a /dev that has files of GPUs. Apptainer shows files of /dev under their own names only."""


@pytest.mark.real
@pytest.mark.timeout(180)
async def test_an_apptainer_sandbox_is_shown_its_gpus_alone(world: World, tmp_path: Path) -> None:
    if not (can := apptainer.ApptainerRuntime.available()).ok:
        pytest.skip(can.detail)
    if FAKE_DEV not in os.environ:
        if os.geteuid():
            pytest.skip("only root may make a /dev of its own that has files for GPUs")
        again = [sys.executable, "-m", "pytest", *("-q", "-m", "real", "-p", "no:cacheprovider", "-k", "apptainer")]
        command = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", WITH_FAKE_DEV, "sh", str(tmp_path)]
        process = await asyncio.create_subprocess_exec(
            *command, *again, __file__, stdout=asyncio.subprocess.PIPE, env={**os.environ, FAKE_DEV: "1"}
        )
        told, _ = await process.communicate()
        assert process.returncode == 0, told.decode()
        return
    driver = replace(driver_with(tmp_path, 1, 0, 2), dev=Path("/dev"))
    made = KindOf(partial(apptainer.launch, driver=driver))
    fields = {"kind": "apptainer", "rootfs": str(sif_images.python_root())}
    sandbox = world.create_with(made, gpus=("1", "2"), env={"LD_LIBRARY_PATH": "/opt/lib"}, **fields)
    await sandbox.start()
    await has_its_gpus_and_no_other(sandbox)


def request(**fields: Any) -> dict[str, Any]:
    """Return the body of a request to Docker's API."""
    made: dict[str, Any] = {
        "image": "sha256:1",
        "command": ["/p", "-c", "x"],
        "env": {"A": "b=c"},
        "labels": {"l": "m"},
        "shown": [HostMount(Path("/a:b"), "/c")],
        "resources": Resources(memory_mb=64, cpus=0.5, pids=32, disk_mb=16),
        "limits": True,
    }
    return ContainerRequest(**made | fields).body(sized=True)


def test_docker_is_asked_for_gpus_by_their_names() -> None:
    nvidia, cdi = request(gpus=("3", "GPU-8f2a", "amd.com/gpu=0", "nvidia.com/gpu=1"))["HostConfig"]["DeviceRequests"]
    assert nvidia == {"Driver": "nvidia", "DeviceIDs": ["3", "GPU-8f2a"], "Capabilities": [["gpu"]]}
    assert cdi == {"Driver": "cdi", "DeviceIDs": ["amd.com/gpu=0", "nvidia.com/gpu=1"]}


@pytest.mark.parametrize(("gpus", "told"), [((), "void"), (("3", "1"), "3,1"), (("amd.com/gpu=0",), "void")])
def test_no_image_gets_gpus_by_a_variable(gpus: tuple[str, ...], told: str) -> None:
    body = request(gpus=gpus)
    assert f"NVIDIA_VISIBLE_DEVICES={told}" in body["Env"]
    assert ("DeviceRequests" in body["HostConfig"]) == bool(gpus)


def test_podman_is_asked_for_the_same_container_by_its_own_api() -> None:
    asked = libpod_body(request(gpus=("3", "amd.com/gpu=0"), oci_runtime="crun"), ("3", "amd.com/gpu=0"))
    assert asked["devices"] == [{"path": "nvidia.com/gpu=3"}, {"path": "amd.com/gpu=0"}]
    assert (asked["image"], asked["entrypoint"], asked["command"]) == ("sha256:1", ["/p"], ["-c", "x"])
    assert (asked["env"]["A"], asked["labels"], asked["oci_runtime"]) == ("b=c", {"l": "m"}, "crun")
    assert asked["mounts"] == [
        {"type": "bind", "source": "/a:b", "destination": "/c", "options": ["rbind", "rprivate", "ro"]}
    ]
    assert (asked["cap_drop"], asked["no_new_privileges"], asked["netns"]) == (["ALL"], True, {"nsmode": "none"})
    assert asked["resource_limits"] == {
        "pids": {"limit": 32},
        "memory": {"limit": 64 << 20, "swap": 64 << 20},
        "cpu": {"quota": 50_000, "period": 100_000},
    }
    assert asked["storage_opts"] == {"size": "16m"}


@pytest.mark.parametrize(
    "changed",
    [
        {"Tty": True},
        {"HostConfig": {"Privileged": True}},
        {"HostConfig": {"NetworkMode": "bridge"}},
        {"HostConfig": {"SecurityOpt": ["no-new-privileges", "label=disable", "seccomp=x"]}},
        {"HostConfig": {"Mounts": [{"Type": "tmpfs", "Source": "", "Target": "/x", "ReadOnly": False}]}},
    ],
    ids=str,
)
def test_what_has_no_translation_into_podmans_request_is_an_error(changed: dict[str, Any]) -> None:
    body = request(gpus=("0",))
    host = {**body["HostConfig"], **changed.pop("HostConfig", {})}
    with pytest.raises(ValueError, match="translat"):
        libpod_body({**body, **changed, "HostConfig": host}, ("0",))


DESCRIBED = Path("/etc/cdi")
"""The folder in which container engines look for descriptions of devices (Container Device Interface)."""


def device(name: str, kind: str) -> dict[str, Any]:
    """Return the description of a device that brings a file and a device file. With an ordinary user's Podman there is
    no device file, because Podman would require its path to exist on the host."""
    file = {"hostPath": "/etc/passwd", "containerPath": f"/opt/outrider-test-{name}", "options": ["ro", "bind"]}
    node = {"path": f"/dev/outrider-test-{name}", "hostPath": "/dev/null"}
    return {"name": name, "containerEdits": {"mounts": [file], "deviceNodes": [node] * (kind != "podman-rootless")}}


@pytest.fixture
def maker(kind: str) -> Iterator[str]:
    """The prefix of the names of three devices that are described to the engine."""
    if kind == "docker" and not msgspec.json.decode(get(engines.engine(kind), "/info").body).get("CDISpecDirs"):
        pytest.skip("this docker does not know the Container Device Interface: 25 or newer does, with its feature cdi")
    if os.geteuid():
        pytest.skip(f"only root may write to {DESCRIBED}")
    made = not DESCRIBED.exists()
    DESCRIBED.mkdir(exist_ok=True)
    file = DESCRIBED / f"outrider-test-{os.getpid()}.json"
    of = f"outrider.test/gpu{os.getpid()}"
    file.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": of, "devices": [device(name, kind) for name in "abc"]}))
    yield f"{of}="
    file.unlink()
    if made:
        with contextlib.suppress(OSError):  # the folder has a file of another process
            DESCRIBED.rmdir()


@pytest.fixture(params=CONTAINERS)
def kind(request: pytest.FixtureRequest) -> str:
    engines.engine(request.param)
    return str(request.param)


@pytest.mark.real
@pytest.mark.timeout(180)
async def test_a_container_has_the_devices_that_it_was_given_and_no_other(world: World, kind: str, maker: str) -> None:
    first = world.create(kind, gpus=(f"{maker}a", f"{maker}c"))
    second = world.create(kind, gpus=(f"{maker}b",))
    without = world.create(kind)
    for sandbox, has in ((first, "ac"), (second, "b"), (without, "")):
        await sandbox.start()
        files = [f"outrider-test-{name}" for name in has]
        assert (await output(sandbox, "mkdir -p /opt; ls /opt | grep outrider")).split() == files
        if kind != "podman-rootless":
            assert (await output(sandbox, "ls /dev | grep outrider")).split() == files
        for name in files if kind != "podman-rootless" else ():
            assert await output(sandbox, f"echo x > /dev/{name} && echo used") == "used"
        assert (await sandbox.exec("mknod /tmp/x c 1 3", seconds=30)).exit_code != 0


@pytest.mark.real
@pytest.mark.timeout(180)
async def test_an_engine_that_does_not_know_a_gpu_refuses_it_for_good(world: World, kind: str) -> None:
    for name in ("0", "outrider.test/none=0"):
        sandbox = world.create(kind, gpus=(name,))
        with pytest.raises(RuntimeUnavailable, match=name) as refused:
            await sandbox.start()
        assert not refused.value.retryable
        assert ("NVIDIA Container Toolkit" if kind == "docker" else "nvidia-ctk") in str(refused.value.hint)
        await sandbox.stop()


@pytest.mark.real
@pytest.mark.timeout(180)
async def test_a_container_by_podmans_own_api_is_confined_as_one_by_dockers(
    world: World, kind: str, maker: str
) -> None:
    if kind == "docker":
        pytest.skip("docker has one API")
    found = []
    for gpus in ((), (f"{maker}a",)):
        sandbox = world.create(kind, gpus=gpus, resources={"cpus": 0.5, "memory_mb": 512, "pids": 100})
        await sandbox.start()
        name = f"{world.host.name}-s{len(world.made) - 1}"
        told = engines.request(engines.engine(kind), "GET", f"/v4.0.0/libpod/containers/{name}/json", b"")
        found.append(json.loads(told))
    plain, given = map(confinement, found)
    assert given.pop("Devices") != plain.pop("Devices") or kind == "podman-rootless"
    if not plain["Ulimits"]:  # the Podman 4 of an ordinary user ignores them in a request of Docker's API
        plain["Ulimits"] = given["Ulimits"]
    assert given == plain


def confinement(told: dict[str, Any]) -> dict[str, Any]:
    """Return podman's description of a container, without the container's own names."""
    host, config = told["HostConfig"], told["Config"]
    host["Binds"] = sorted(re.sub(r"/s\d/", "/", bind).partition(":r")[0] for bind in host["Binds"])
    host["SecurityOpt"] = sorted(set(host["SecurityOpt"]) - {"label=disable"})  # podman shows it for one API only
    mounts = sorted((one["Destination"], one["Type"], one["RW"], one["Propagation"]) for one in told["Mounts"])
    same = ("User", "Hostname", "WorkingDir", "Entrypoint", "Cmd", "Umask", "StopSignal")
    return {
        **{name: value for name, value in host.items() if name not in ("Annotations", "HostsFile")},
        **{name: config[name] for name in same},
        "Env": sorted(entry for entry in config["Env"] if not entry.startswith("OUTRIDER_CALL=")),
        "Health": config["Healthcheck"]["Test"],
        "Mounts": [one for one in mounts if "outrider-test" not in one[0]],
        "Capabilities": (told["EffectiveCaps"], told["BoundingCaps"]),
        "AppArmor": told["AppArmorProfile"],
        "Labels": (told["MountLabel"], told["ProcessLabel"]),
    }
