"""The rules of the code's shape, checked on its syntax trees: nothing of the package is imported here."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "outrider"

LAYERS = (
    (
        "redaction",
        "errors",
        "faults",
        "destinations",
        "lifecycle",
        "messages",
        "media",
        "constraint",
        "trajectory",
        "timeline",
        "spec",
        "config",
        "environment",
        "plugins",
        "schemas",
        "sample_columns",
        "callbacks",
        "text_files",
        "printable",
        "logs",
        "counts",
        "computer_tools",
        "concurrency",
    ),
    ("tokens", "dialects", "wire", "sandbox"),
    ("engines", "harnesses", "evaluators", "vision", "store", "client", "relay", "slurm", "tasks"),
    ("sessions", "nodes", "service", "mcp"),
    ("api",),
    ("trainers", "cli", "doctor", "lab", "outrider", "__main__"),
)
LAYER = {unit: number for number, units in enumerate(LAYERS) for unit in units}
SIDEWAYS = {
    ("relay", "engines"),
    ("vision", "evaluators"),
    ("tasks", "evaluators"),
    ("tasks", "harnesses"),
    ("nodes", "sessions"),
    ("service", "nodes"),
    ("service", "sessions"),
    ("lab", "trainers"),
    ("cli", "doctor"),
    ("cli", "lab"),
    ("outrider", "cli"),
    ("__main__", "cli"),
}
# Programs of their own: they have no configuration but their environment.
INSIDE_SANDBOXES = (
    "outrider.sandbox.runtimes.guest",
    "outrider.evaluators.swebench.pytest_plugin",
    "outrider.evaluators.swebench.shadow_finder",
)


@dataclass(frozen=True)
class Module:
    name: str
    path: str
    source: str

    @property
    def unit(self) -> str:
        """The file or folder of the package that it belongs to; `cli_x` belongs to `cli`."""
        unit = self.name.split(".")[1] if "." in self.name else self.name
        return "cli" if unit.startswith("cli_") else unit

    @property
    def tree(self) -> ast.Module:
        return _parsed(self)

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree: most rules look at each."""
        return _nodes(self)

    def at(self, node: ast.AST, what: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {what}"


@cache
def _parsed(module: Module) -> ast.Module:
    return ast.parse(module.source, module.path)


@cache
def _nodes(module: Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(module.tree))


@cache
def package() -> dict[str, Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, str(path.relative_to(PACKAGE.parent.parent)), path.read_text())
    return found


def imports(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Every module of ours that it imports, early or late."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in package() else str(node.module) for name in inner]
        else:
            continue
        yield from ((node, name) for name in dict.fromkeys(names) if name.split(".")[0] == "outrider")


def dotted(node: ast.expr) -> str:
    """`asyncio.get_running_loop().create_task` as it reads, without calls."""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def calls(module: Module) -> Iterator[tuple[ast.Call, str]]:
    for node in module.nodes:
        if isinstance(node, ast.Call):
            yield node, dotted(node.func)


def imports_go_down(module: Module) -> Iterator[str]:
    if module.unit not in LAYER:
        yield module.at(module.tree, f"{module.unit} has no layer: give it one in LAYERS")
        return
    here = LAYER[module.unit]
    for node, name in imports(module):
        unit = Module(name, "", "").unit
        there = LAYER.get(unit, len(LAYERS))
        beside = unit == module.unit or here == 0 or name.endswith(".base") or (module.unit, unit) in SIDEWAYS
        if there > here or (there == here and not beside):
            yield module.at(node, f"{module.unit} (layer {here}) imports {name} (layer {there})")


def imports_are_absolute(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield module.at(node, "a relative import")


def no_global(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Global):
            yield module.at(node, f"global {', '.join(node.names)}")


def tasks_have_an_owner(module: Module) -> Iterator[str]:
    if module.name == "outrider.concurrency.cancellation":
        return  # `shielded` owns its task: it returns only after the task has ended
    for node, name in calls(module):
        owner, _, method = name.rpartition(".")
        bare = owner.rpartition(".")[2].lstrip("_") in ("", "asyncio", "loop", "get_running_loop", "get_event_loop")
        if method == "ensure_future" or (method == "create_task" and bare):
            yield module.at(node, f"{name}: only a task group's create_task gives a task an owner")


def environment_is_read_in_one_file(module: Module) -> Iterator[str]:
    if module.name == "outrider.environment" or module.name.startswith(INSIDE_SANDBOXES):
        return
    for node in module.nodes:
        words = [node.attr] if isinstance(node, ast.Attribute) and dotted(node.value) == "os" else []
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            words = [alias.name for alias in node.names]
        for word in words:
            if word.removesuffix("b") in ("environ", "getenv"):
                yield module.at(node, f"os.{word}: the environment is read in environment.py")


def only_the_cli_prints(module: Module) -> Iterator[str]:
    if module.unit == "cli" or module.name.startswith(INSIDE_SANDBOXES):
        return
    for node, name in calls(module):
        if name == "print" or name.rpartition(".")[2] in ("basicConfig", "addHandler", "dictConfig", "fileConfig"):
            yield module.at(node, f"{name}: only the command line prints and configures logging")


def errors_are_never_changed(module: Module) -> Iterator[str]:
    for node in module.nodes:
        for target in node.targets if isinstance(node, ast.Assign) else []:
            if (
                isinstance(target, ast.Attribute)
                and target.attr in ("message", "hint", "field", "log_tail", "inside")
                and dotted(target.value) != "self"
            ):
                yield module.at(node, f"{dotted(target)}: `OutriderError.replace` makes an error with other attributes")


def methods_are_never_replaced(module: Module) -> Iterator[str]:
    """A change is published on a feed (concurrency/events.py), or a callback is given to the constructor."""
    if module.name == "outrider.evaluators.checks.swebench_check":
        return  # replaces functions of the swebench package, in a process of its own
    imported = {
        alias.asname or alias.name
        for node in module.nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in module.nodes:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if not isinstance(target, ast.Attribute) or dotted(target.value).split(".")[0] in imported:
                continue
            function = isinstance(node.value, ast.Lambda) or (
                isinstance(node.value, ast.Call) and dotted(node.value.func) == "partial"
            )
            if dotted(target.value) != "self" and (function or target.attr.startswith("on_")):
                yield module.at(node, f"{dotted(target)} is another object's method")


def modules_say_what_they_are(module: Module) -> Iterator[str]:
    if module.source and not ast.get_docstring(module.tree):
        yield module.at(module.tree, "the module has no docstring")


RULES: dict[Callable[[Module], Iterator[str]], str] = {
    imports_go_down: "'x'\nfrom outrider.api import server",
    imports_are_absolute: "'x'\nfrom . import sql",
    no_global: "'x'\ndef f():\n    global a",
    tasks_have_an_owner: "'x'\nself._loop.create_task(f())",
    environment_is_read_in_one_file: "'x'\nfrom os import environ",
    only_the_cli_prints: "'x'\nlogging.getLogger().addHandler(h)",
    errors_are_never_changed: "'x'\nerror.inside = True",
    methods_are_never_replaced: "'x'\npool.changed = lambda: None",
    modules_say_what_they_are: "x = 1",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Callable[[Module], Iterator[str]]) -> None:
    broken = [line for module in package().values() for line in rule(module)]
    assert not broken, "\n" + "\n".join(broken)


def test_a_public_class_name_stands_once() -> None:
    places = defaultdict(list)
    for module in package().values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.at(node, node.name))
    assert not {name: where for name, where in places.items() if len(where) > 1}


@pytest.mark.parametrize(("rule", "source"), RULES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_rule_is_seen_where_it_is_broken(rule: Callable[[Module], Iterator[str]], source: str) -> None:
    [line] = list(rule(Module("outrider.store.x", "store/x.py", source)))
    assert line.startswith("store/x.py:")


def test_folders_of_a_layer_meet_in_their_base_modules() -> None:
    def broken(target: str) -> list[str]:
        return list(imports_go_down(Module("outrider.harnesses.x", "x.py", f"'x'\nimport {target}")))

    assert not broken("outrider.sandbox.runtimes.base")
    assert not broken("outrider.harnesses.command")
    assert not broken("outrider.trajectory")
    assert broken("outrider.engines.pool.pool")
    assert broken("outrider")


def test_no_import_runs_in_a_circle() -> None:
    graph = {name: {target for _, target in imports(module)} for name, module in package().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(f"{package()[name].path}:1" for name in error.args[1]))
