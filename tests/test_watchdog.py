"""The watchdog counts how often the event loop stands still, and logs where."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
import time

import pytest

from outrider.concurrency.watchdog import LOG_SECONDS, STALL, StallEvidence, StallKind, Watchdog, _Report, kind_of


def hold(seconds: float) -> None:
    """Block the event loop for `seconds` of processor time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_work_that_holds_the_loop_is_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "outrider.concurrency.watchdog"):
        async with Watchdog() as watchdog:
            with watchdog.witness() as seen:
                hold(4 * STALL)
                await asyncio.sleep(0.05)
    assert watchdog.stalls.count >= 1
    assert watchdog.stalls.longest >= 3 * STALL
    assert watchdog.stalls.held >= 4 * STALL
    assert watchdog.stalls.total >= watchdog.stalls.longest
    assert seen.longest >= 3 * STALL
    told = caplog.records[0].getMessage()
    # On a busy machine, the watchdog may have sampled no stack, or other processes may have had most of the time.
    assert "hold (" in told or "in one call" in told or "got no processor" in told


FRAMES_WHILE_THREADS_START = """
import gc, threading, time
from outrider.concurrency.watchdog import frame_of

ended = threading.Event()

def nap():
    time.sleep(0.0005)

def nap_again_and_again():
    while not ended.is_set():
        nap()

def look():
    while not ended.is_set():
        frame_of(threading.main_thread().ident)
        time.sleep(0.0001)

gc.callbacks.append(lambda phase, info: time.sleep(0.001))  # a collection lets other threads run
gc.set_threshold(10)
threads = [threading.Thread(target=nap_again_and_again) for _ in range(20)] + [threading.Thread(target=look)]
for thread in threads:
    thread.start()
until = time.monotonic() + 2
while time.monotonic() < until:
    started = threading.Thread(target=nap)
    started.start()
    started.join()
ended.set()
for thread in threads:
    thread.join()
assert gc.isenabled()
print("ended")
"""


@pytest.mark.deep
def test_the_process_goes_on_if_a_thread_starts_while_the_stack_is_read() -> None:
    """Without the watchdog's precaution, Python 3.11 hangs within a fraction of a second."""
    done = subprocess.run(
        [sys.executable, "-c", FRAMES_WHILE_THREADS_START], timeout=60, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("ended\n", 0), done.stderr


async def test_a_stall_counts_before_the_timer_has_run() -> None:
    async with Watchdog() as watchdog:
        before = watchdog.stalled_seconds()
        time.sleep(2 * STALL)  # noqa: ASYNC251  # the loop stands still
        assert watchdog.stalled_seconds() - before >= STALL


async def test_what_a_witness_has_not_seen_is_not_counted_for_it() -> None:
    async with Watchdog() as watchdog:
        hold(2 * STALL)
        await asyncio.sleep(0.05)
        with watchdog.witness() as seen:
            pass
    assert (seen.total, seen.longest) == (0, 0)


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        (StallEvidence(stalled=1.0, waited=0.9, worked=0.05, looks=2), StallKind.STARVED),  # a crowded machine
        (
            StallEvidence(stalled=1.0, waited=0.9, worked=0.9, looks=30),
            StallKind.BLOCKED,
        ),  # other threads of the process had the processor
        (
            StallEvidence(stalled=1.0, waited=0.0, worked=1.0, looks=0),
            StallKind.BLOCKED,
        ),  # one call held the interpreter
        (StallEvidence(stalled=1.0, waited=0.1, worked=0.8, looks=30), StallKind.BLOCKED),  # Python code held the loop
        (
            StallEvidence(stalled=1.0, waited=0.0, worked=0.0, looks=38),
            StallKind.BLOCKED,
        ),  # a system call, such as fsync
        (
            StallEvidence(stalled=1.0, waited=0.0, worked=0.0, looks=1),
            StallKind.STARVED,
        ),  # SIGSTOP, or a suspended machine
        (
            StallEvidence(stalled=1.0, waited=None, worked=0.02, looks=1),
            StallKind.STARVED,
        ),  # a kernel that does not report `waited`
        (StallEvidence(stalled=1.0, waited=None, worked=0.9, looks=1), StallKind.BLOCKED),
    ],
)
def test_a_starved_process_is_told_from_a_blocked_loop(seen: StallEvidence, kind: StallKind) -> None:
    assert kind_of(seen) is kind


STOPPED = """
import asyncio, json, os, sys
from outrider.concurrency.watchdog import Watchdog

async def main():
    async with Watchdog() as watchdog:
        print("ready", flush=True)
        while not watchdog.stalls.total > 1.5:
            await asyncio.sleep(0.01)
        print(json.dumps([watchdog.stalls.count, watchdog.stalls.starved]), flush=True)

asyncio.run(main())
"""


async def test_a_stopped_process_was_starved() -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", STOPPED, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    assert process.stderr is not None
    await process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(2)  # the process is stopped for this time
    process.send_signal(signal.SIGCONT)
    count, starved = json.loads(await process.stdout.readline())
    assert 1 <= starved <= count
    assert b"this process got no processor" in await process.stderr.read()
    await process.wait()


async def test_a_loop_that_waits_for_a_system_call_was_blocked() -> None:
    async with Watchdog() as watchdog:
        while watchdog.stalls.count == watchdog.stalls.starved:  # on a busy machine, some stalls are starvation
            time.sleep(6 * STALL)  # noqa: ASYNC251  # the loop stands still, and other threads run
            await asyncio.sleep(0.05)


def test_the_log_has_one_line_and_then_a_count_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    report, now = _Report(), 1000.0
    for number in range(1, 2 * int(LOG_SECONDS) + 1):
        report.note(now, StallKind.STARVED if number % 3 else StallKind.BLOCKED, 0.1 * number, 0.1, "f (x.py:1)")
        report.sum_up(now)
        now += 1
    assert [record.getMessage() for record in caplog.records] == [
        "this process got no processor for 0.10 s: the machine is overloaded, or it was stopped",
        "the event loop stood still in the last minute: starved 40 times, 6.10 s at most; "
        "blocked 20 times, 6.00 s at most",
    ]
    now += LOG_SECONDS
    report.sum_up(now)
    assert len(caplog.records) == 3
    now += LOG_SECONDS
    report.note(now, StallKind.BLOCKED, 0.25, 0.2, "f (x.py:1)")
    assert caplog.records[-1].getMessage().endswith("blocked for 0.25 s, with 0.20 s of processor time: f (x.py:1)")
