"""Bad input is refused in direct calls and over HTTP, and nothing of it is stored. A body that is no JSON object gives
a 400, any other mistake a 422 that names the field."""

from __future__ import annotations

import copy
import json
import time
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from outrider.errors import InvalidField, OutriderError
from outrider.evaluators.nested import nested_specs
from outrider.harnesses.command import MAX_INSTRUCTION
from outrider.sandbox.host_paths import HostPaths
from outrider.service.admission import check_group, parse_body
from outrider.spec import MAX_GROUP, MAX_INLINE_FILE, MAX_TEXT, EvaluatorSpec, GroupSpec

from .conftest import MakeWorld

GOOD: dict[str, Any] = {
    "task": {
        "instruction": "do it",
        "harness": {"command": ["true"]},
        "runtime": {"kind": "memory", "prepare": [{"run": "true"}]},
        "evaluator": {"run": "true", "carry": []},
        "limits": {},
        "sampling": {},
    },
    "n": 2,
}


class Change(Enum):
    DELETE = "delete"


DELETE = Change.DELETE


def changed(path: str, value: Any) -> dict[str, Any]:
    body = copy.deepcopy(GOOD)
    *way, last = path.split(".")
    place: Any = body
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    if value is DELETE:
        del place[last]
    else:
        place[int(last) if last.isdigit() else last] = value
    return body


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


STEP = "task.runtime.prepare.0"
GRADER = "task.evaluator.runtime"
FULL = "{option.o}" * 80_000
"""80 MB when the option is filled in."""

# path of the change, the new value, the field that the error must name (None: the path itself)
TABLE: list[tuple[str, Any, str | None]] = [
    # unknown fields at every level
    ("nn", 1, None),
    ("task.instructions", "x", None),
    ("task.harness.presets", "x", None),
    ("task.runtime.images", "x", None),
    ("task.evaluator.command", "x", None),
    ("task.limits.steps", 1, None),
    ("task.sampling.temprature", 1, None),
    (f"{STEP}.shell", "x", None),
    # missing
    ("task", DELETE, None),
    ("task.instruction", DELETE, None),
    ("task.harness", DELETE, None),
    ("task.evaluator", DELETE, None),
    # wrong types
    ("task", [], None),
    ("n", "2", None),
    ("n", 2.5, None),
    ("n", True, None),
    ("n", None, None),
    ("priority", "high", None),
    ("idempotency_key", 7, None),
    ("callback_url", "nowhere", None),
    ("callback_url", "ftp://host/x", None),
    ("callback_url", 3, None),
    ("callback_url", "http://a..b/", None),
    ("callback_url", f"http://{'a' * 64}.example/", None),
    ("task.instruction", ["x"], None),
    ("task.harness.command", "ls", None),
    ("task.harness.command", [1], "task.harness.command.0"),
    ("task.harness.env", [], None),
    ("task.runtime.kind", 3, None),
    ("task.runtime.prepare", {}, None),
    ("task.labels", {"a": 1}, "task.labels.a"),
    ("task.limits.turns", 1.5, None),
    ("task.history", "forgotten", None),
    ("task.evaluator.carry", "some", None),
    ("task.evaluator.carry", [1], "task.evaluator.carry.0"),
    ("task.evaluator.carry", ["a", "../b"], "task.evaluator.carry.1"),
    ("task.evaluator.carry", ["a\0"], "task.evaluator.carry.0"),
    ("task.evaluator.carry", ["/"], "task"),
    ("task.artifacts", "*", None),
    ("task.artifacts", ["../*"], "task.artifacts.0"),
    ("task.artifacts", [""], "task.artifacts.0"),
    (STEP, "true", None),
    (STEP, {"run": 3}, f"{STEP}.run"),
    (STEP, {"write": 3, "to": "x"}, f"{STEP}.write"),
    (STEP, {"upload": "a"}, f"{STEP}.to"),
    (STEP, {"write": "x", "to": "y", "encoding": "rot13"}, f"{STEP}.encoding"),
    (STEP, {"write": "???", "to": "y", "encoding": "base64"}, STEP),
    # empty, zero and negative values, and absurd sizes
    ("n", 0, None),
    ("n", -1, None),
    ("n", MAX_GROUP + 1, None),
    ("n", 10**30, None),
    ("priority", 1001, None),
    ("idempotency_key", "", None),
    ("idempotency_key", "k" * 257, None),
    ("task.instruction", "", None),
    ("task.instruction", "x" * (MAX_TEXT + 1), None),
    ("task.instruction", "é" * (MAX_INSTRUCTION // 2 + 1), None),
    ("task.max_attempts", 0, None),
    ("task.max_attempts", 101, None),
    ("task.labels", {str(number): "x" for number in range(65)}, None),
    ("task.harness.command", [], None),
    ("task.harness.command", ["x"] * 1025, None),
    ("task.runtime.prepare", [{"run": "true"}] * 1025, None),
    ("task.runtime.env", {f"A{number}": "x" for number in range(1025)}, None),
    ("task.limits.session_seconds", 0, None),
    ("task.limits.session_seconds", -1.0, None),
    ("task.limits.agent_seconds", 1e12, None),
    ("task.limits.turns", 0, None),
    ("task.limits.response_tokens", 0, None),
    ("task.sampling.temperature", -0.1, None),
    ("task.sampling.top_p", 0, None),
    ("task.sampling.max_tokens", 0, None),
    (STEP, {"write": "x" * (MAX_INLINE_FILE + 1), "to": "y"}, f"{STEP}.write"),
    (STEP, {"run": ""}, f"{STEP}.run"),
    ("task.evaluator.options", {"x": nested(500)}, "task.evaluator.options.x"),
    # names of things that do not exist
    ("task.runtime.kind", "vmware", None),
    ("task.runtime.kind", "os:path", None),
    ("task.runtime.kind", "os.path:join", None),
    ("task.runtime.kind", "no.such.module:Runtime", None),
    ("task.runtime.kind", "pathlib:Path", None),
    ("task.runtime.kind", ":", None),
    ("task.runtime.rootfs", "/no/such/folder", None),
    ("task.runtime.rootfs", "/" + "x" * 300, None),
    ("task.runtime.rootfs", "relative", None),
    ("task.runtime.workdir", "relative", None),
    ("task.evaluator.kind", "oracle", None),
    ("task.evaluator.kind", "os:path", None),
    ("task.evaluator", {"kind": "callable", "path": "no.such:grader"}, "task.evaluator.path"),
    ("task.evaluator", {"kind": "callable", "path": "math:pi"}, "task.evaluator.path"),
    ("task.evaluator", {"kind": "callable"}, "task.evaluator"),
    ("task.evaluator", {}, "task.evaluator"),
    ("task.harness", {"preset": "no-such-agent"}, "task.harness.preset"),
    ("task.harness", {"preset": "../../etc/passwd"}, "task.harness.preset"),
    ("task.harness", {"preset": "a\0b"}, "task.harness.preset"),
    ("task.harness", {"agent": "no.such:Agent"}, "task.harness.agent"),
    ("task.harness", {"agent": "os:path"}, "task.harness.agent"),
    ("task.harness", {"agent": "tools", "options": {"tool": "x"}}, "task.harness.options.tool"),
    ("task.harness", {}, "task.harness"),
    ("task.harness", {"command": ["true"], "agent": "tools"}, "task.harness"),
    ("task.harness", {"preset": "pi", "files": {"a": "b"}}, "task.harness"),
    ("task.harness", {"agent": "tools", "venv": "/a"}, "task.harness"),
    # files of a command
    ("task.harness.files", {"a": 1}, "task.harness.files.a"),
    ("task.harness.files", {"../a": "b"}, "task.harness.files.../a"),
    ("task.harness.files", {"": "b"}, "task.harness.files."),
    ("task.harness.files", {str(number): "x" for number in range(65)}, None),
    ("task.harness.files", {"a": "x" * (MAX_TEXT + 1)}, "task.harness.files.a"),
    ("task.harness", {"command": ["x"], "files": {"a": FULL}, "options": {"o": "x" * 1000}}, "task.harness.files.a"),
    ("task.harness.files", {"a": "{option.x}"}, "task.harness.options.x"),
    # a virtual environment in a `memory` sandbox, which runs no programs of the host, and a relative path
    ("task.harness.venv", "/no/such/folder", None),
    ("task.harness.venv", "relative", None),
    # paths that lead outside, and invalid paths
    (STEP, {"upload": "none.txt", "to": "x"}, f"{STEP}.upload"),
    (STEP, {"upload": "../secret", "to": "x"}, f"{STEP}.upload"),
    (STEP, {"upload": "/etc/passwd", "to": "x"}, f"{STEP}.upload"),
    (STEP, {"upload": "link", "to": "x"}, f"{STEP}.upload"),
    (STEP, {"upload": "a\0b", "to": "x"}, f"{STEP}.upload"),
    (STEP, {"upload": "x" * 256, "to": "x"}, f"{STEP}.upload"),
    (STEP, {"upload": "loop", "to": "x"}, f"{STEP}.upload"),
    (STEP, {"write": "x", "to": "../x"}, f"{STEP}.to"),
    (STEP, {"write": "x", "to": "a\0b"}, f"{STEP}.to"),
    ("task.runtime.workdir", "/a/../b", None),
    ("task.runtime.workdir", "/a\0b", None),
    ("task.runtime.rootfs", "/a\0b", None),
    ("task.runtime.image", "/a\0b", None),
    ("task.runtime.mounts", [{"source": "/etc"}], "task.runtime.mounts.0.source"),
    # the same in a grader's own sandbox
    (GRADER, {"kind": "vmware"}, f"{GRADER}.kind"),
    (GRADER, {"kind": "os:path"}, f"{GRADER}.kind"),
    (GRADER, {"rootfs": "/no/such/folder"}, f"{GRADER}.rootfs"),
    (GRADER, {"image": "no-such-image"}, f"{GRADER}.image"),
    (GRADER, {"image": "/etc"}, f"{GRADER}.image"),
    (GRADER, {"mounts": [{"source": "/etc"}]}, f"{GRADER}.mounts.0.source"),
    (GRADER, {"prepare": [{"upload": "../secret", "to": "x"}]}, f"{GRADER}.prepare.0.upload"),
    (GRADER, {"prepare": [{"run": "true"}, {"upload": "link", "to": "x"}]}, f"{GRADER}.prepare.1.upload"),
    (GRADER, {"kind": "process", "image": "x"}, f"{GRADER}.image"),
    # values that cannot be passed to a program
    ("task.harness.command", ["echo", "a\0b"], "task.harness.command.1"),
    ("task.harness.command", [""], "task.harness.command.0"),
    ("task.harness.env", {"A": "a\0b"}, "task.harness.env.A"),
    ("task.harness.env", {"A=B": "x"}, "task.harness.env.A=B"),
    ("task.harness.env", {"OPENAI_API_KEY": "x"}, "task.harness.env.OPENAI_API_KEY"),
    ("task.instruction", "a\0b", None),
    ("task.runtime.env", {"A": "a\0b"}, "task.runtime.env.A"),
    (STEP, {"run": "a\0b"}, f"{STEP}.run"),
    (STEP, {"run": "true", "env": {"A": "a\0b"}}, f"{STEP}.env.A"),
    (STEP, {"run": "true", "attempts": 0}, f"{STEP}.attempts"),
    ("task.evaluator.run", "a\0b", None),
]

RAW: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"null", "JSON object"),
    (b"[]", "JSON object"),
    (b'"x"', "JSON object"),
    (b'{"n": NaN}', "not JSON"),
    (b'{"n": Infinity}', "not JSON"),
    (b'{"task": {"limits": {"session_seconds": 1e999}}}', "not JSON"),
    (b'{"task": {"instruction": "\xff\xfe"}}', "not JSON"),
    (b'{"task": {"instruction": "\\ud800"}}', "not JSON"),
    (b"[" * 100_000, "not JSON"),
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return fill(tmp_path / "files")


def fill(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "loop").symlink_to("loop")
    (folder.parent / "secret").write_text("no")
    return folder


def ids(case: tuple[str, Any, str | None]) -> str:
    return f"{case[0]}={repr(case[1])[:30]}"


def test_the_good_one_is_good(files: Path) -> None:
    check_group(parse_body(GroupSpec, json.dumps(GOOD).encode()), paths=HostPaths.of(files))
    assert changed("n", 3) == GOOD | {"n": 3}


@pytest.mark.parametrize("case", TABLE, ids=ids)
def test_the_field_is_named(files: Path, case: tuple[str, Any, str | None]) -> None:
    path, value, field = case
    with pytest.raises(OutriderError) as refused:
        check_group(parse_body(GroupSpec, body(path, value)), paths=HostPaths.of(files))
    assert (refused.value.field, refused.value.http_status) == (field or path, 422)
    assert refused.value.message
    assert len(refused.value.message) < 1000


@pytest.mark.parametrize(("raw", "words"), RAW, ids=lambda value: repr(value)[:30])
def test_what_is_no_json_object(raw: bytes, words: str) -> None:
    with pytest.raises(OutriderError, match=words) as refused:
        parse_body(GroupSpec, raw)
    assert refused.value.http_status == 400


MANY = dict.fromkeys(map(str, range(80_000)), 0)
WRONG: dict[str, Any] = {
    "fields of the group": MANY,
    "labels": {"task": {"labels": MANY}},
    "fields of a prepare step": {"task": {"runtime": {"prepare": [MANY]}}},
    "prepare steps of every step": {"task": {"then": [{"prepare": [{}] * 1024}] * 64}},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_wrong_a_thousand_times_is_refused_like_what_is_wrong_once(wrong: Any) -> None:
    raw = json.dumps(wrong).encode()
    before = time.thread_time()
    with pytest.raises(InvalidField):
        parse_body(GroupSpec, raw)
    assert time.thread_time() - before < 2, "naming each mistake takes up to ten seconds"


@pytest.mark.parametrize("options", [{"parts": dict.fromkeys(map(str, range(2000)), 0)}, {"parts": {"a": {}}, "x": 1}])
def test_what_is_wrong_in_options_is_named_up_to_a_number(options: dict[str, Any]) -> None:
    spec = EvaluatorSpec(kind="weighted", options=options)
    with pytest.raises(InvalidField, match="2000 fields are wrong" if "x" not in options else "unknown field"):
        list(nested_specs(spec))


def body(path: str, value: Any) -> bytes:
    return json.dumps(changed(path, value)).encode()


@pytest.mark.deep
async def test_over_http_nothing_is_stored(world: MakeWorld, tmp_path: Path) -> None:
    async with world(http=True) as w, aiohttp.ClientSession(w.url) as http:
        fill(tmp_path / "files")
        for path, value, field in TABLE:
            async with http.post("/v1/groups", data=BytesIO(body(path, value))) as reply:
                error = await reply.json()
                assert (reply.status, error["field"]) == (422, field or path), error
                assert error["message"]
        for raw, words in RAW:
            async with http.post("/v1/groups", data=BytesIO(raw)) as reply:
                assert reply.status == 400
                assert words in (await reply.json())["message"]
        assert await w.service.store.groups() == []
        assert await w.service.store.events(after=0, limit=1) == []
        async with http.post("/v1/groups", data=json.dumps(GOOD)) as reply:
            assert reply.status == 201
            await w.service.cancel((await reply.json())["id"])
