"""What a process may use, on machines made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.sessions.machine_capacity import machine

MEBIBYTE = 1 << 20


def laid_out(folder: Path, group: str, files: dict[str, str]) -> Path:
    """A /proc and a /sys/fs/cgroup below `folder`."""
    for name, text in {"proc/self/cgroup": group, **{f"cgroup/{name}": text for name, text in files.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def found(folder: Path) -> tuple[float, int]:
    amount = machine(proc=folder / "proc", cgroups=folder / "cgroup")
    return amount.cpus, amount.memory_mb


def test_without_bounds_it_is_the_machines(tmp_path: Path) -> None:
    whole = found(tmp_path)
    assert whole[0] >= 1
    assert whole[1] > 16
    unbounded = {"a/cpu.max": "max 100000\n", "a/memory.max": "max\n"}
    assert found(laid_out(tmp_path, "0::/a/b\n", unbounded)) == whole


@pytest.mark.parametrize(
    ("group", "files"),
    [
        ("0::/\n", {"cpu.max": "50000 100000\n", "memory.max": f"{64 * MEBIBYTE}\n"}),
        (
            "0::/a/b\n",
            {
                "a/b/cpu.max": "max 100000\n",
                "a/cpu.max": "25000 50000\n",
                "a/b/memory.max": f"{64 * MEBIBYTE}\n",
                "a/memory.max": f"{65 * MEBIBYTE}\n",
            },
        ),
        (
            "3:cpu,cpuacct:/docker/x\n2:memory:/docker/x\n0::/\n",
            {
                "cpu/cpu.cfs_quota_us": "50000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": f"{64 * MEBIBYTE}\n",
            },
        ),
    ],
    ids=["version 2 in a container", "version 2, from above", "version 1 in a container"],
)
def test_the_tightest_bound_counts(tmp_path: Path, group: str, files: dict[str, str]) -> None:
    assert found(laid_out(tmp_path, group, files)) == (0.5, 64)


def test_no_bound_of_version_1(tmp_path: Path) -> None:
    whole = found(tmp_path)
    files = {
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert found(laid_out(tmp_path, "3:cpu,cpuacct:/\n2:memory:/\n", files)) == whole
