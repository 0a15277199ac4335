"""Destinations: which servers a pattern matches and covers, and which network settings are refused."""

from __future__ import annotations

import io
from itertools import product

import pytest
from rich.console import Console

from outrider.cli.show import _server
from outrider.config import Config
from outrider.destinations import MIRRORS, Destination, Phase, host_name, not_covered
from outrider.schemas import SpanView
from outrider.spec import NetworkSpec
from outrider.timeline import EntryKind, Timeline

HOSTS = ("a.test", "b.a.test", "c.b.a.test", "xa.test", "test", "93.184.216.34", "2606:2800::1")
PORTS = (80, 443, 22, 8443)
PATTERNS = tuple(
    f"{host}{port}"
    for host, port in product(
        ("a.test", "b.a.test", "*.a.test", "*.b.a.test", "*.test", "*", "93.184.216.34", "[2606:2800::1]"),
        ("", ":443", ":8443", ":*"),
    )
)


@pytest.mark.parametrize(
    ("text", "matched"),
    [
        ("a.test", {("a.test", 80), ("a.test", 443)}),
        ("A.Test:8443", {("a.test", 8443)}),
        ("*.a.test:443", {("b.a.test", 443), ("c.b.a.test", 443)}),
        ("93.184.216.34:22", {("93.184.216.34", 22)}),
        ("[2606:2800:0::1]:22", {("2606:2800::1", 22)}),
        ("*:22", {(host, 22) for host in HOSTS}),
        ("*:*", set(product(HOSTS, PORTS))),
        ("mirror:pip", set()),
    ],
)
def test_what_a_destination_matches(text: str, matched: set[tuple[str, int]]) -> None:
    if "[2606:2800:0::1]" in text:
        with pytest.raises(ValueError, match="is no destination"):  # each address has only one valid spelling
            Destination.read(text)
        text = "[2606:2800::1]:22"
    found = Destination.read(text)
    assert {place for place in product(HOSTS, PORTS) if found.matches(*place)} == matched


def test_what_is_covered_is_matched() -> None:
    """If a pattern covers another pattern, it matches every server that the other matches. Each pattern covers
    itself."""
    pairs = 0
    for wide, narrow in product(PATTERNS, PATTERNS):
        one, other = Destination.read(wide), Destination.read(narrow)
        if one.covers(other):
            pairs += 1
            assert all(one.matches(*place) for place in product(HOSTS, PORTS) if other.matches(*place)), (wide, narrow)
        assert wide != narrow or one.covers(other)
    assert pairs > 100


def test_several_destinations_cover_the_ports_of_one() -> None:
    assert not_covered(["a.test"], ["a.test:80"]) == [0]
    assert not_covered(["a.test"], ["*.test:80", "a.test:443"]) == []
    assert not_covered(["a.test:*"], ["a.test:80", "a.test:443"]) == [0]
    assert not_covered(["mirror:pip", "mirror:npm"], ["*:*", "mirror:npm"]) == [0]


@pytest.mark.parametrize(
    "text",
    [
        *("", "https://a.test", "a.test/x", "a.test:", "a.test:0", "a.test:65536", "a.test:http", "a..test", "-a.test"),
        *("*a.test", "a.*.test", "*.*.test", "*.93.184.216.34", "2606:2800::1", "[a.test]", "[::1", "user@a.test"),
        *("2130706433", "0x7f.1", "127.1", "0177.0.0.1", "[fe80::1%eth0]", "mirror:x", "mirror:", "a test", "é.test"),
        "a.test.",
    ],
)
def test_what_is_no_destination(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no destination|has no port|there is no mirror"):
        Destination.read(text)
    with pytest.raises(ValueError, match="network"):
        Config.model_validate({"network": {"allow": [text]}})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *(("A.Test", "a.test"), ("a.test.", "a.test"), ("127.0.0.1", "127.0.0.1"), ("0:0::1", "::1")),
        *(("127.1", None), ("0x7f000001", None), ("a.0x1", None), ("a.1", None), ("1.a", "1.a"), ("a" * 64, None)),
    ],
)
def test_a_host_has_one_spelling(text: str, name: str | None) -> None:
    assert host_name(text) == name


@pytest.mark.parametrize(
    ("setting", "value", "why"),
    [
        ("pip_index", "http://me:secret@mirror.lan/simple", "must have no user name"),
        ("pip_index", "ftp://mirror.lan/simple", "is no URL"),
        ("npm_registry", "mirror.lan", "is no URL"),
        ("apt_hosts", ["*.lan"], "is not one host"),
        ("apt_hosts", ["http://packages.lan"], "is not one host"),
        ("apt_cache", "https://cache.lan", "is no http:// address of a proxy"),
        ("internal", ["*.lan:80"], "is not one host with one port"),
        ("internal", ["files.lan"], "is not one host with one port"),
    ],
)
def test_what_the_settings_refuse(setting: str, value: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Config.model_validate({"network": {setting: value}})


def test_a_list_of_a_phase_replaces_the_common_one() -> None:
    spec = NetworkSpec(allow=["a.test"], agent=[], verifier=["mirror:pip"])
    assert [spec.of(phase) for phase in Phase] == [["a.test"], [], ["mirror:pip"]]
    assert spec.mirrors == {"pip"} <= set(MIRRORS)
    with pytest.raises(ValueError, match="record or replay"):
        NetworkSpec(record=True, replay="x")
    with pytest.raises(ValueError, match="stays inside"):
        NetworkSpec(replay="../x")


def test_the_line_of_a_server() -> None:
    data = {"phase": "agent", "sandbox": "agent", "requests": 2, "sent": 10, "received": 2048, "refused": 1}
    data |= {"failed": 0, "refusal": "the rules\x1b[31m"}
    console = Console(file=io.StringIO(), width=200)
    console.print(_server(SpanView(kind="network", name="a.test:443", start=1.0, end=2.0, data=data)))
    line = console.file.getvalue()  # type: ignore[attr-defined]
    assert line.startswith(
        "network (agent, agent) a.test:443 · 2 requests · 10 bytes sent, 2,048 received · 1 refused: "
    )
    assert "\x1b" not in line


def test_an_entry_that_goes_on_changes() -> None:
    timeline = Timeline("s", 1)
    number = timeline.begin(EntryKind.NETWORK, "a.test:443", requests=1)
    timeline.take()
    timeline.update(number, requests=2)
    part = timeline.take()
    assert part is not None
    timeline.end(number)
    timeline.update(number, requests=3)  # too late
    assert b"\x02" in part.entries
    assert timeline.take() is not None
    assert timeline.take() is None
