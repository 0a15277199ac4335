"""The reader of server-sent events: pieces of any size, and the rules of the standard."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.http.sse import SseReader

PAYLOADS = st.lists(
    st.binary(min_size=1, max_size=40).map(lambda data: data.replace(b"\n", b"n").replace(b"\r", b"r")), max_size=6
)


def read(pieces: list[bytes]) -> list[bytes]:
    reader = SseReader()
    return [payload for piece in pieces for payload in reader.feed(piece)]


@given(payloads=PAYLOADS, newline=st.sampled_from([b"\n", b"\r\n", b"\r"]), data=st.data())
def test_payloads_do_not_depend_on_the_cuts(payloads: list[bytes], newline: bytes, data: st.DataObject) -> None:
    plain = data.draw(st.booleans())
    stream = b"" if plain else b": hello" + newline + newline
    for payload in payloads:
        before, after = (b"", b"") if plain else (b"event: token" + newline, b"id: 7" + newline)
        stream += before + b"data: " + payload + newline + after + newline
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[start:end] for start, end in pairwise(edges)]
    assert read(pieces) == payloads
    assert read([bytes([byte]) for byte in stream]) == payloads


@pytest.mark.parametrize(
    ("stream", "payloads"),
    [
        (b"data:tight\n\n", [b"tight"]),
        (b"data:  two spaces\n\n", [b" two spaces"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data\n\ndatabase: x\n\n", []),
        (b"data: cut off\n", []),
        (b"\n\n\n", []),
        ("data: \u2028 is no line end\n\n".encode(), ["\u2028 is no line end".encode()]),
    ],
)
def test_reads_as_the_standard_says(stream: bytes, payloads: list[bytes]) -> None:
    assert read([stream]) == payloads


def test_a_payload_in_many_pieces_is_joined_once() -> None:
    pieces = [b"data: "] + [b"x" * 1000] * 500 + [b"\n\n"]
    assert read(pieces) == [b"x" * 500_000]
