"""The examples of agents in Python: whole sessions in real sandboxes, graded by the real graders, with exact tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluators.grader_server import a_grader
from outrider.cli.task_file import load_example
from outrider.cli.task_sources import load_group
from outrider.client.client import AsyncClient
from outrider.config import SandboxesConfig
from outrider.errors import InvalidField
from outrider.harnesses.factory import make_harness
from outrider.lab.fakes.scripted_engine import ScriptedEngine, scripted_logprob
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.schemas import SessionView
from outrider.service.admission import validate_group
from outrider.spec import GroupSpec, HarnessSpec
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import Sample
from support.service import END, running_service, say, scripted_engine

EXAMPLES = Path(__file__).parents[2] / "examples"
AGENTS = EXAMPLES / "agents"

needs_namespaces = pytest.mark.skipif(not NamespaceRuntime.available().ok, reason="no user namespaces on this machine")


@pytest.fixture
def own_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(AGENTS)


@pytest.fixture
def ipython(monkeypatch: pytest.MonkeyPatch, ipython_home: Path) -> None:
    pytest.importorskip("IPython")
    monkeypatch.setenv("OUTRIDER_HOME", str(ipython_home))


def call(tool: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>{END}"


async def rollout(folder: Path, task: Path | GroupSpec, *replies: str, **settings: Any) -> tuple[SessionView, str]:
    """Run a task whose model gives these replies. Returns the session and the decoded text of its sample, after a check
    of every token."""
    engine = scripted_engine(folder, replies)
    group = load_group(task, n=1, priority=0) if isinstance(task, Path) else task
    async with running_service(tmp_path=folder, engine=engine, **settings) as (_, url), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit(group)).id])
        [session] = done.sessions
        samples = await client.samples(session.id)
    [sample] = samples
    tokenizer = Tokenizer.load(str(folder / "tokenizer"))
    assert_exact(sample, engine, tokenizer, replies)
    return session, tokenizer.decode(sample.ids.tolist())


def assert_exact(sample: Sample, engine: ScriptedEngine, tokenizer: Tokenizer, replies: tuple[str, ...]) -> None:
    """Check that each prompt of the engine is a prefix of the row, that the sampled tokens are the script's replies,
    and that only sampled tokens are trained and have the engine's log-probabilities."""
    trained = {place for start, end in sample.turn_spans for place in range(start, end)}
    assert trained == {place for place, trains in enumerate(sample.loss_mask) if trains}
    prompts = [request.input_ids.tolist() for request in engine.requests][-len(replies) :]  # of the last attempt
    for prompt, (start, end), reply in zip(prompts, sample.turn_spans, replies, strict=True):
        assert prompt == sample.ids[:start].tolist()
        assert tokenizer.decode(sample.ids[start:end].tolist()) == reply
    for place, (token, logprob) in enumerate(zip(sample.ids, sample.logprobs, strict=True)):
        assert logprob == (scripted_logprob(place, token) if place in trained else 0.0)


def reward(session: SessionView) -> float:
    assert session.result is not None
    assert session.result.error is None, session.result.error
    assert session.result.verdict is not None
    return session.result.verdict.reward


COUNT = "sum(x * x + y * y <= 100 for x in range(-10, 11) for y in range(-10, 11))"


@pytest.mark.deep
@needs_namespaces
@pytest.mark.usefixtures("ipython")
@pytest.mark.parametrize(
    ("answer", "worth"), [(r"\boxed{317}", 1.0), (r"\boxed{\frac{634}{2}}", 1.0), (r"\boxed{316}", 0.0)]
)
async def test_mathematics(tmp_path: Path, answer: str, worth: float) -> None:
    pytest.importorskip("math_verify")
    session, seen = await rollout(
        tmp_path,
        EXAMPLES / "lattice_points.toml",
        call("think", thought="A square holds the disc: count in it."),
        call("ipython", code=f"count = {COUNT}"),
        call("ipython", code="count"),
        say(f"There are {answer}."),
    )
    assert reward(session) == worth
    assert "<tool_response>\n[noted]\n</tool_response>" in seen
    assert "<tool_response>\n317\n</tool_response>" in seen


@pytest.mark.deep
@needs_namespaces
@pytest.mark.usefixtures("ipython")
@pytest.mark.parametrize(("answer", "worth"), [("2381", 1.0), ("2.381", 0.0)])
async def test_stem(tmp_path: Path, answer: str, worth: float) -> None:
    pytest.importorskip("math_verify")
    session, seen = await rollout(
        tmp_path,
        EXAMPLES / "discharge.toml",
        call("ipython", code="import math\ntau = 220e-6 * 4.7e3\ntau * math.log(10) * 1000"),
        call("ipython", code="!echo $tau"),
        say(rf"It takes \boxed{{{answer}}}."),
    )
    assert reward(session) == worth
    assert "<tool_response>\n2380.87" in seen
    assert "<tool_response>\n1.034" in seen


def with_runtime(example: str, **runtime: Any) -> GroupSpec:
    return validate_group(
        {"task": load_example(EXAMPLES / example).task | {"runtime": {"kind": "namespace"} | runtime}}
    )


@pytest.mark.deep
@needs_namespaces
async def test_ipython_has_what_the_sandboxes_own_python_has(tmp_path: Path) -> None:
    """The sandbox mounts an environment of the host that has SymPy and IPython, as the page about these agents
    describes."""
    pytest.importorskip("math_verify")
    pytest.importorskip("IPython")
    places = sorted({Path(sys.prefix), Path(sys.base_prefix)})
    group = with_runtime(
        "lattice_points.toml",
        mounts=[{"source": str(place)} for place in places],
        env={"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"},
    )
    code = "import sympy\nsympy.factorint(317)"
    allowed = SandboxesConfig(allow=tuple(places))
    replies = (call("ipython", code=code), say(r"\boxed{317}"))
    session, seen = await rollout(tmp_path, group, *replies, sandboxes=allowed)
    assert reward(session) == 1.0
    assert "<tool_response>\n{317: 1}\n</tool_response>" in seen


@pytest.mark.deep
async def test_a_sandbox_without_ipython_is_an_error_that_says_how_to_get_it(tmp_path: Path) -> None:
    """The model's call meets the error, but the missing program is not the model's fault: there is no reward."""
    pytest.importorskip("math_verify")
    group = with_runtime("lattice_points.toml", kind="memory")
    session, _ = await rollout(tmp_path, group, call("ipython", code="1"))
    assert session.result is not None
    assert session.result.verdict is None
    error = session.result.error
    assert error is not None
    assert (error.code, error.message) == ("runtime_failure", "no IPython in the sandbox")
    assert "has bash only" in (error.hint or "")


RIGHT = """\
pieces = sorted(tuple(map(int, input().split())) for _ in range(int(input())))
length, reached = 0, -10**18
for start, end in pieces:
    length += max(0, end - max(start, reached))
    reached = max(reached, end)
print(length)
"""


@needs_namespaces
@pytest.mark.parametrize(("fix", "worth"), [("max(start, reached)", 1.0), ("max(start, 0)", 0.0)])
async def test_code(tmp_path: Path, fix: str, worth: float) -> None:
    """The agent writes a wrong program and edits it in one place."""
    trial = call("bash", command="for n in 1 2; do python3 solution.py < public/$n.in | diff - public/$n.out; done")
    session, seen = await rollout(
        tmp_path,
        EXAMPLES / "covered_length.toml",
        call("edit", path="solution.py", old="", new=RIGHT.replace("max(start, reached)", "start")),
        trial,
        call("edit", path="solution.py", old="end - start", new=f"end - {fix}"),
        trial,
        say("All come out right."),
    )
    assert reward(session) == worth
    assert "wrote solution.py" in seen
    assert "changed solution.py" in seen
    assert "< 7\n---\n> 6" in seen


BEST = """\
best = here = None
for number in map(int, input().split()):
    here = number if here is None or here < 0 else here + number
    best = here if best is None else max(best, here)
print(best)
"""


def program(text: str) -> str:
    return say(f"Here it is:\n```python\n{text}```")


@pytest.mark.deep
@needs_namespaces
@pytest.mark.usefixtures("own_agents")
@pytest.mark.parametrize(("last", "worth"), [(BEST, 1.0), ("print(max(6, 6) if input()[0] == '3' else -1)\n", 0.0)])
async def test_a_program_is_run_on_the_public_examples(tmp_path: Path, last: str, worth: float) -> None:
    """Both last programs pass the public examples; only the hidden cases distinguish them."""
    session, seen = await rollout(
        tmp_path,
        AGENTS / "contest.toml",
        say("I would use Kadane's algorithm."),
        program("print(sum(map(int, input().split())))\n"),
        program(last),
    )
    assert reward(session) == worth
    assert "There is no program between" in seen
    assert "the program printed:\n4\n\nIt must print:\n6\n" in seen


@pytest.mark.deep
@needs_namespaces
@pytest.mark.usefixtures("own_agents")
async def test_a_program_that_is_never_right_is_submitted_all_the_same(tmp_path: Path) -> None:
    session, seen = await rollout(tmp_path, AGENTS / "contest.toml", *[program("print(1)\nx\n")] * 3)
    assert reward(session) == 0.0
    assert seen.count("NameError") == 2


@needs_namespaces
@pytest.mark.usefixtures("own_agents")
@pytest.mark.deep
@pytest.mark.parametrize(("answer", "worth"), [("200", 1.0), ("400", 0.0)])
async def test_a_search_is_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, worth: float) -> None:
    pytest.importorskip("math_verify")
    page = {"title": "Caesium-137", "url": "https://a.example/cs", "content": "half-life: 30.05 years"}
    async with a_grader(lambda _: {"results": [page]}) as server:
        monkeypatch.setenv("SEARCH_URL", f"{server.url}/search")
        session, seen = await rollout(
            tmp_path,
            AGENTS / "research.toml",
            call("search", query="half-life of caesium-137"),
            call("bash", command="echo $((800 / 4))"),
            say(rf"\boxed{{{answer}}}"),
        )
    assert reward(session) == worth
    assert server.paths == ["/search"]
    assert "Caesium-137\nhttps://a.example/cs\nhalf-life: 30.05 years" in seen


@pytest.mark.deep
@needs_namespaces
@pytest.mark.usefixtures("own_agents")
async def test_a_search_that_fails_is_no_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_grader(lambda _: 503) as server:
        monkeypatch.setenv("SEARCH_URL", server.url)
        session, _ = await rollout(tmp_path, AGENTS / "research.toml", call("search", query="half-life"))
    assert session.result is not None
    assert session.result.verdict is None
    assert session.result.error is not None
    assert session.result.error.code == "harness_error"
    assert "503" in session.result.error.message


@pytest.mark.usefixtures("own_agents")
def test_a_service_without_a_search_server_refuses_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEARCH_URL", raising=False)
    with pytest.raises(InvalidField, match="SEARCH_URL"):
        make_harness(HarnessSpec(agent="researcher:Researcher"))
