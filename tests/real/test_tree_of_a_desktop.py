"""The accessibility tree of a real desktop, in namespace sandboxes without a network: pages of MiniWoB are solved by a
model that reads the tree alone, and a page with very many elements is cut."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engines.upstream import upstream
from outrider.client.client import AsyncClient
from outrider.engines.base import Chunk, EngineOptions, GenerateRequest
from outrider.harnesses.desktop import BUS_CONFIGURATION, PROGRAMS, PYTHON
from outrider.harnesses.screen_tree import MAX_CHARACTERS
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.plugins import resolve
from outrider.spec import EngineSpec
from outrider.tasks.miniwob.tasks import BROWSER, HEIGHT, WIDTH, miniwob_examples
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import SessionResult, TokenMode
from support.service import END, running_service, say
from support.tokenizer import write_tokenizer

from .test_desktop import MODELS, VENDORS_CALLS, calls, says

pytestmark = pytest.mark.real

CONTEXT = 400_000
RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
LINE = re.compile(
    r"^ *(?P<role>[a-z ]+?)(?: (?P<name>\"(?:[^\"\\]|\\.)*\"))?(?: value (?P<value>\"(?:[^\"\\]|\\.)*\"))?"
    r"(?P<states>(?: \[[a-z-]+\])*) \((?P<x>-?\d+),(?P<y>-?\d+) (?P<width>\d+)x(?P<height>\d+)\)$"
)
WINDOW = """\
import gi
gi.require_version("Gtk", "3.0")
from gi.repository import Gtk
window, box, entry, button = Gtk.Window(title="Note"), Gtk.Box(spacing=9), Gtk.Entry(), Gtk.Button(label="Save")
button.connect("clicked", lambda _: open("note.txt", "w").write(entry.get_text()))
for each in (Gtk.Label(label="Write the word maple, and save it."), entry, button):
    box.add(each)
window.add(box)
window.show_all()
Gtk.main()
"""
# The search also fails if another window disappears during it, as some windows of a starting browser do.
SHOWN = "until xdotool search --onlyvisible --name {}; do sleep 0.2; done"
MANY = "<title>Many</title><script>document.write('<input type=checkbox aria-label=many>'.repeat(100000))</script>"


@pytest.fixture(autouse=True)
def _needs() -> None:
    if missing := [program for program in (*PROGRAMS, BROWSER, "dbus-daemon", PYTHON) if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (.ci/desktop installs them)")
    bindings = [PYTHON, "-c", 'import gi; gi.require_version("Atspi", "2.0")']
    if not Path(BUS_CONFIGURATION).exists() or subprocess.run(bindings, check=False, capture_output=True).returncode:
        pytest.skip("not installed: at-spi2-core, gir1.2-atspi-2.0, python3-gi (.ci/desktop installs them)")
    if not (can := resolve("runtime", "namespace").available()).ok:
        pytest.skip(can.detail)


@dataclass
class Element:
    role: str
    name: str
    value: str
    states: str
    middle: dict[str, int]


def elements(tree: str) -> list[Element]:
    found = [match for line in tree.splitlines() if (match := LINE.match(line))]
    return [
        Element(
            each["role"],
            json.loads(each["name"] or '""'),
            json.loads(each["value"] or '""'),
            each["states"],
            {side: int(each[side]) + int(each[size]) // 2 for side, size in (("x", "width"), ("y", "height"))},
        )
        for each in found
    ]


def tool(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>{END}"


class TreeModel(ScriptedEngine):
    """A model without image input. `reply` makes each reply from the tool results in the prompt."""

    def __init__(self, folder: Path, reply: Callable[[list[str]], str]) -> None:
        self.tokenizer = str(write_tokenizer(folder / "tokenizer"))
        super().__init__(self._answering(""))
        self.results: list[str] = []
        self._reply = reply
        self._words = Tokenizer.load(self.tokenizer)

    def _answering(self, reply: str) -> EngineOptions:
        options = {"replies": [reply], "context_tokens": CONTEXT}
        return EngineOptions(name="reads", tokenizer=self.tokenizer, options=options)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.results = RESPONSE.findall(self._words.decode(request.input_ids.tolist()))
        async for chunk in ScriptedEngine(self._answering(self._reply(self.results))).generate(request):
            yield chunk


def acting(plan: Callable[[list[Element]], list[str]]) -> Callable[[list[str]], str]:
    """Return the reply function of a model that reads the tree, carries out the actions that `plan` returns for the
    tree, and reads the tree again."""

    def reply(results: list[str]) -> str:
        planned = plan(elements(results[0])) if results else []
        return [tool("tree"), *planned, tool("wait", seconds=1), tool("tree"), say("Done.")][len(results)]

    return reply


def clicks(element: Element) -> str:
    return tool("click", **element.middle)


def shown(elements: list[Element], role: str, name: str | None = None) -> Element:
    return next(each for each in elements if each.role == role and name in (None, each.name))


def chooses(page: list[Element]) -> list[str]:
    text = next(each.name for each in page if each.name.startswith("Select "))
    return [clicks(shown(page, "radio button", text.split(" ")[1])), clicks(shown(page, "push button", "Submit"))]


def logs_in(page: list[Element]) -> list[str]:
    text = " ".join(each.name for each in page if each.role == "static")
    user, password = re.findall(r'"(.*?)"', text)
    return [
        clicks(shown(page, "entry")),
        tool("type", text=user),
        clicks(shown(page, "password text")),
        tool("type", text=password),
        clicks(shown(page, "push button", "Login")),
    ]


async def run(folder: Path, model: TreeModel, task: dict[str, Any]) -> SessionResult:
    """Run one session of the task, and return its result. Checks that its only row is token-exact and has no images."""
    async with running_service(tmp_path=folder, engine=model) as (_, url), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": {**task, "max_attempts": 1}})).id])
        result = done.sessions[0].result
        assert result is not None
        assert result.error is None
        [sample] = await client.samples(done.sessions[0].id)
    assert (sample.mode, sample.images, result.tokens.drift) == (TokenMode.TOKENS, (), 0)
    return result


@pytest.mark.parametrize(
    ("page", "plan"),
    [
        ("click-test", lambda page: [clicks(shown(page, "push button", "Click Me!"))]),
        ("click-option", chooses),
        ("login-user", logs_in),
    ],
)
async def test_a_page_is_solved_by_its_tree_alone(
    tmp_path: Path, page: str, plan: Callable[[list[Element]], list[str]]
) -> None:
    if importlib.util.find_spec("miniwob") is None:
        pytest.skip("the package miniwob is not installed")
    [example] = miniwob_examples(page, observation="tree")
    model = TreeModel(tmp_path, acting(plan))
    result = await run(tmp_path, model, example.task)
    assert result.verdict is not None
    assert (result.verdict.reward, result.verdict.reason) == (1.0, "the page gives 1")
    assert '"This task has ended."' in model.results[-1]
    assert "Click Me!" not in model.results[-1]


async def test_a_vendors_tool_shows_both(tmp_path: Path) -> None:
    """The tree comes after the image in the result of each call."""
    if importlib.util.find_spec("miniwob") is None:
        pytest.skip("the package miniwob is not installed")
    [example] = miniwob_examples("click-test", observation="both")
    task = {**example.task, "max_attempts": 1}
    task["harness"]["options"]["desktop"]["actions"] = "anthropic"
    (look, nothing), (click, arguments) = VENDORS_CALLS["anthropic"]
    answers = (
        calls([1, 2], [3], look, nothing),
        calls([1, 2, 3, 4], [5], click, arguments),
        says([1, 2, 3, 4, 5, 6], [7], content="Done."),
    )
    async with upstream(*answers, pages=MODELS) as (server_url, server):
        engine = EngineSpec(kind="openai", name="sees", url=server_url, options={"ids": True})
        async with running_service(tmp_path=tmp_path, engines=(engine,)) as (_, url), AsyncClient(url) as client:
            [done] = await client.wait([(await client.submit({"task": task})).id])
    result = done.sessions[0].result
    assert result is not None
    assert (result.error, result.verdict.reward) == (None, 1.0)
    contents = [message["content"] for message in server.posts[-1][1]["messages"] if message["role"] == "tool"]
    assert [[part["type"] for part in content] for content in contents] == [["image_url", "text"]] * 2
    first, second = (content[1]["text"] for content in contents)
    assert shown(elements(first), "push button", "Click Me!").middle == {"x": 61, "y": 283}
    assert '"This task has ended."' in second


def desktop_task(program: str, evaluator: dict[str, Any], *prepare: dict[str, Any], **options: Any) -> dict[str, Any]:
    desktop = {"width": WIDTH, "height": HEIGHT, "observation": "tree", "run": program}
    return {
        "instruction": "Do what the window says.",
        "harness": {
            "agent": "tools",
            "options": {"tools": ["desktop"], "max_turns": 30, "desktop": desktop, **options},
        },
        "runtime": {"kind": "namespace", "prepare": list(prepare)},
        "evaluator": evaluator,
    }


@pytest.fixture
def _needs_gtk() -> None:
    if subprocess.run([PYTHON, "-c", WINDOW.split("from")[0]], check=False, capture_output=True).returncode:
        pytest.skip("not installed: gir1.2-gtk-3.0 (.ci/desktop installs it)")


@pytest.mark.usefixtures("_needs_gtk")
async def test_a_window_of_gtk_is_used_by_its_tree(tmp_path: Path) -> None:
    def plan(window: list[Element]) -> list[str]:
        assert "Write the word maple, and save it." in {each.name for each in window}
        return [clicks(shown(window, "text")), tool("type", text="maple"), clicks(shown(window, "push button", "Save"))]

    opened = f"setsid {PYTHON} window.py </dev/null >/dev/null 2>&1 & " + SHOWN.format("Note")
    task = desktop_task(opened, {"run": "grep -qx maple note.txt"}, {"write": WINDOW, "to": "window.py"})
    model = TreeModel(tmp_path, acting(plan))
    result = await run(tmp_path, model, task)
    assert result.verdict is not None
    assert result.verdict.reward == 1.0
    assert shown(elements(model.results[-1]), "text").value == "maple"


@pytest.mark.nightly
async def test_a_page_of_100000_elements_is_cut(tmp_path: Path) -> None:
    """The browser takes a while to make the page's tree. Until then, the model quickly gets a tree without the page,
    and requests the tree again."""
    took: list[float] = []
    asked: list[float] = []

    def reply(results: list[str]) -> str:
        if asked:
            took.append(time.monotonic() - asked.pop())
        if len(results) >= 99 or (results and "[cut " in results[-1]):
            return say("Done.")
        if len(results) % 2:
            return tool("wait", seconds=5)
        asked.append(time.monotonic())
        return tool("tree")

    opened = (
        f"setsid {BROWSER} --no-sandbox --test-type --no-first-run --disable-gpu --kiosk --force-renderer-accessibility"
        " --user-data-dir=/tmp/chromium --app=file://$PWD/many.html </dev/null >/dev/null 2>&1 &"
        " " + SHOWN.format("Many")
    )
    task = desktop_task(opened, {"run": "true"}, {"write": MANY, "to": "many.html"}, max_turns=100)
    model = TreeModel(tmp_path, reply)
    await run(tmp_path, model, task)
    print(f"{len(took)} trees in {[round(each, 1) for each in took]} s")
    assert re.search(r"^\[cut (at|after|because) ", model.results[-1], re.MULTILINE)
    assert sum(each.name == "many" for each in elements(model.results[-1])) > 10
    assert max(took) < 40
    assert max(map(len, model.results)) < MAX_CHARACTERS + 500
