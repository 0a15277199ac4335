"""Checks what works on this machine: runtimes, harnesses, engines, file formats, stores, the port, open files, GPUs and
networks.

For each available runtime (kind of sandbox) in TRIED, the check starts a sandbox and runs commands in it, as a session
would. The check leaves nothing running. A failed check has a hint if there is a remedy.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

import msgspec

from outrider.config import Config
from outrider.environment import environment, install_command, installed_version
from outrider.errors import HarnessUnavailable, OutriderError, RuntimeFailure
from outrider.harnesses.install import installation, unavailable
from outrider.harnesses.presets import load_preset, preset_names
from outrider.plugins import names, resolve
from outrider.sandbox.runtimes.base import Availability, RuntimeKind, SandboxContext
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.runtimes.nvidia import NVIDIA
from outrider.spec import RuntimeSpec
from outrider.wire import file_descriptors

PACKAGES = ("outrider", "aiohttp", "renderers", "tokenizers", "torch", "uvicorn", "uvloop", "pyarrow")
LIBRARIES = {"embedded": ("torch", "safetensors"), "parquet": ("pyarrow",), "postgresql": ("asyncpg",)}
"""The packages that an engine, a file format or a store needs in addition to Outrider's own dependencies. Each key is
also the name of the pip extra that installs them."""

TRIED = frozenset({"namespace", "process", "process-landlock"})
"""Runtimes that run real programs and need no image. The check starts a sandbox of each."""
TRIAL_SECONDS = 30.0
HINTS = {
    "namespace": "set TMPDIR to a folder of an ordinary file system, such as /dev/shm; or use runtime kind "
    "'process-landlock', which isolates less",
    "process": "set TMPDIR to a folder of an ordinary file system, in which programs may run",
    "process-landlock": "set TMPDIR to a folder of an ordinary file system, in which programs may run",
}
READ_ONLY_HINT = "agents that install into /usr need CAP_SYS_ADMIN for the service, or an image (task.runtime.image)"
WRITE_IN_USR = "touch /usr/outrider-doctor"

NOTHING_MORE = "needs nothing more"

SERVERS = {
    "openai": "",
    "prorl": "",
    "sglang": ", started with --incremental-streaming-output",
    "sglang-router": "",
    "vllm": ", started with --enable-scale-out --enable-prompt-tokens-details",
    "vllm-router": "",
}
"""Kinds of engines that have a URL, and the recommended flags for their servers."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check. `hint` is a remedy for a failure, or advice; None if there is neither."""

    name: str
    ok: bool
    detail: str
    hint: str | None = None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The results of all checks. `ok` is True if any runtime except `memory` works, so that sessions can run here.
    `versions` maps packages to their versions; None for a package that is not installed."""

    ok: bool
    versions: dict[str, str | None]
    runtimes: tuple[Finding, ...]
    harnesses: tuple[Finding, ...]
    engines: tuple[Finding, ...]
    formats: tuple[Finding, ...]
    stores: tuple[Finding, ...]
    ports: tuple[Finding, ...]
    limits: tuple[Finding, ...]
    gpus: tuple[Finding, ...]
    network: tuple[Finding, ...]


def diagnose() -> Diagnosis:
    """Run all checks. The call blocks for a few seconds."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            versions[package] = installed_version(package)
        except PackageNotFoundError:
            versions[package] = None
    runtimes = tuple(map(_runtime, names("runtime")))
    return Diagnosis(
        ok=any(found.ok for found in runtimes if found.name != "memory"),
        versions=versions,
        runtimes=runtimes,
        harnesses=(
            *map(_preset, preset_names()),
            *(_plugin("agent", name, "runs inside the service") for name in names("agent")),
        ),
        engines=tuple(
            _libraries(name) if name in LIBRARIES else _plugin("engine", name, _needs(name)) for name in names("engine")
        ),
        formats=(Finding(name="jsonl", ok=True, detail=NOTHING_MORE), _libraries("parquet")),
        stores=(Finding(name="sqlite", ok=True, detail=NOTHING_MORE), _libraries("postgresql")),
        ports=(_port(Config().host, Config().port),),
        limits=(_open_files(),),
        gpus=_gpus(),
        network=(_network(runtimes),),
    )


def _runtime(name: str) -> Finding:
    try:
        runtime: RuntimeKind = resolve("runtime", name)
        can = runtime.available()
        if can.ok and name in TRIED:
            can = _tried(name, runtime, can)
    except OutriderError as error:
        can = Availability(ok=False, detail=error.message, hint=error.hint)
    except OSError as error:  # such as a full disk: the report must say so, and go on with the other checks
        detail = f"a sandbox cannot be tried here: {error.strerror or error}"
        can = Availability(ok=False, detail=detail, hint=HINTS.get(name))
    return Finding(name=name, ok=can.ok, detail=can.detail, hint=can.hint)


def _tried(name: str, runtime: RuntimeKind, can: Availability) -> Availability:
    """Start a sandbox of this runtime as a trial. `can` is the availability that the runtime itself reports. Returns
    `can` if the trial succeeds, or else an availability that describes the problem."""
    with tempfile.TemporaryDirectory(prefix="outrider-doctor-") as folder:
        for part in ("sandbox", "gateway"):
            Path(folder, part).mkdir()
        try:
            writable = asyncio.run(_try(name, runtime, Path(folder)))
        except OutriderError as error:
            lines = (error.log_tail or "").strip().splitlines()
            detail = f"a sandbox was tried, and does not work: {lines[-1] if lines else error.message}"
            return Availability(ok=False, detail=detail, hint=error.hint or HINTS[name])
    if name == "namespace" and os.stat("/usr").st_uid == os.geteuid() and not writable:
        detail = f"{can.detail}; /usr is read-only in the sandboxes, because of its own mount or a mount below it"
        return Availability(ok=True, detail=detail, hint=READ_ONLY_HINT)
    return can


async def _try(name: str, runtime: RuntimeKind, folder: Path) -> bool:
    """Run commands in a sandbox whose files are in `folder`. Returns True only for a namespace sandbox in which
    programs can write to /usr. Raises OutriderError."""
    async with Host(folder) as host:
        context = SandboxContext(
            session_id="doctor",
            attempt=1,
            directory=folder / "sandbox",
            host=host,
            gateway_url="http://127.0.0.1:1",
            gateway_socket=folder / "gateway",
        )
        sandbox = runtime.create(RuntimeSpec(kind=name), context)
        try:
            await sandbox.start()
            ran = await sandbox.exec("true", seconds=TRIAL_SECONDS)
            if ran.exit_code != 0:
                raise RuntimeFailure(f"`true` ends with exit code {ran.exit_code}", log_tail=ran.log_tail())
            # A process sandbox uses the host's own /usr, so the check does not write there.
            return name == "namespace" and (await sandbox.exec(WRITE_IN_USR, seconds=TRIAL_SECONDS)).exit_code == 0
        finally:
            await sandbox.stop()


def _preset(name: str) -> Finding:
    preset = load_preset(name)
    if preset.install is None:
        return Finding(name=name, ok=True, detail="part of every sandbox")
    found = installation(preset)
    if found is None:
        missing: HarnessUnavailable = unavailable(preset)
        return Finding(name=name, ok=False, detail=missing.message, hint=missing.hint)
    return Finding(name=name, ok=True, detail=f"{preset.install.version} in {found.prefix}")


def _needs(engine: str) -> str:
    return f"needs a server: --engine {engine}=URL{SERVERS[engine]}" if engine in SERVERS else NOTHING_MORE


def _plugin(kind: str, name: str, detail: str) -> Finding:
    try:
        resolve(kind, name)
    except OutriderError as error:
        return Finding(name=name, ok=False, detail=error.message, hint="reinstall the package that it comes with")
    return Finding(name=name, ok=True, detail=detail)


def _libraries(extra: str) -> Finding:
    missing = [library for library in LIBRARIES[extra] if find_spec(library) is None]
    if missing:
        detail = f"{' and '.join(missing)} not installed"
        return Finding(name=extra, ok=False, detail=detail, hint=install_command(extra))
    return Finding(name=extra, ok=True, detail=f"{' and '.join(LIBRARIES[extra])} installed")


def _open_files() -> Finding:
    number = file_descriptors.available()
    each = file_descriptors.shares(number).session
    detail = f"{number}, of which {each} for the calls of one session at once"
    if number >= file_descriptors.LEAST:
        return Finding(name="open files", ok=True, detail=detail)
    hint = (
        f"raise the hard limit (ulimit -Hn) to {file_descriptors.WANTED}: with LimitNOFILE= in a systemd unit, "
        "in limits.conf, or with --ulimit of a container"
    )
    return Finding(name="open files", ok=False, detail=f"{detail}, which is few", hint=hint)


def _gpus() -> tuple[Finding, ...]:
    """Return a finding for each GPU that sandboxes may use by default. If there are none, returns one finding that is
    not ok."""
    if found := NVIDIA.visible():
        return tuple(Finding(name=gpu.name, ok=True, detail=f"{gpu.model} {gpu.uuid}".strip()) for gpu in found)
    if not (there := NVIDIA.gpus()):
        hint = "only tasks that ask for GPUs need a GPU; name GPUs of another maker with --sandbox-gpu"
        return (Finding(name="NVIDIA", ok=False, detail="no GPU that this user may open", hint=hint),)
    hint = "unset CUDA_VISIBLE_DEVICES, or name the GPUs that sandboxes may use: --sandbox-gpu 0"
    detail = f"{len(there)}, of which CUDA_VISIBLE_DEVICES leaves none"
    return (Finding(name="NVIDIA", ok=False, detail=detail, hint=hint),)


def _network(runtimes: Iterable[Finding]) -> Finding:
    """Return a finding that shows whether sandboxes can have a network, and whether this network uses a proxy."""
    kinds = [one.name for one in runtimes if one.ok and getattr(resolve("runtime", one.name), "filters_network", False)]
    named = [name for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY") if environment(name)]
    way = f"through the proxy of {named[0]}" if named else "by direct connections"
    if not kinds:
        hint = "a task's network needs a kind such as namespace or docker"
        return Finding(name="network", ok=False, detail="no usable kind of sandbox filters a network", hint=hint)
    detail = f"{way}, from sandboxes of kind {', '.join(kinds)}, as far as network.allow lists destinations"
    return Finding(name="network", ok=True, detail=detail)


def _port(host: str, port: int) -> Finding:
    name = f"{host}:{port}"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Servers set this option, too. Without the option, a port would seem taken for a minute after its server has
        # ended.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            detail = f"cannot listen there: {error.strerror}"
            return Finding(
                name=name,
                ok=False,
                detail=detail,
                hint="run: outrider serve --port 0 (any free port), or name another one",
            )
    return Finding(name=name, ok=True, detail="free")
