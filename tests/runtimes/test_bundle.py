"""The program that is bundled for the inside of a sandbox, and its wire format."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import RuntimeUnavailable
from outrider.sandbox.runtimes.guest.command import Capture
from outrider.sandbox.runtimes.guest.msgpack import Unpacker, pack
from outrider.sandbox.runtimes.tool_server.bundle import MODULES, compiled, program, source

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.binary() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES)
def test_both_ends_understand_each_other(value: object) -> None:
    packed = bytearray()
    pack(value, packed)
    assert msgspec.msgpack.decode(packed) == value
    assert Unpacker(msgspec.msgpack.encode(value)).value() == value


def test_a_frame_cut_short_is_refused() -> None:
    for whole in (b"\xc4\x05abc", b"\x93\x01", b"\xcd\x01", b"\xc1", b"\xcb" + bytes(8)):
        with pytest.raises(ValueError, match=r"ends early|unknown"):
            Unpacker(whole).value()


@given(st.lists(st.binary(max_size=40)), st.integers(2, 30))
def test_capture_keeps_both_ends(pieces: list[bytes], cap: int) -> None:
    capture = Capture(cap)
    for piece in pieces:
        capture.add(piece)
    whole, half, kept = b"".join(pieces), cap // 2, capture.take()
    if len(whole) <= 2 * half:
        assert kept == whole
    else:
        assert kept == whole[:half] + b"\n[... %d bytes cut ...]\n" % (len(whole) - 2 * half) + whole[-half:]


def test_the_program_is_python_3_8_and_imports_only_what_is_cheap() -> None:
    tree = ast.parse(program(), feature_version=(3, 8))
    ast.parse(source("shells.python_program"), feature_version=(3, 8))
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"_signal", "errno", "posix", "select", "sys", "time"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def test_names_of_its_modules_do_not_collide() -> None:
    named = Counter[str]()
    for node in ast.parse(program()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            named[node.name] += 1
        elif isinstance(node, ast.Assign):
            named.update(
                name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            )
    assert [name for name, times in named.items() if times > 1] == []
    assert len(set(MODULES)) == len(MODULES)


def test_no_usable_interpreter() -> None:
    with pytest.raises(RuntimeUnavailable, match="is no usable Python"):
        compiled(("/bin/false",))
    with pytest.raises(RuntimeUnavailable, match="cannot run"):
        compiled(("/no/such/python",))
    assert compiled((sys.executable,))


@pytest.mark.deep
def test_threads_that_ask_at_once_get_the_same_bytecode() -> None:
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(compiled, (sys.executable, "-S") if at < 8 else (sys.executable,)) for at in range(16)]
    assert len({task.result() for task in asked}) == 1
