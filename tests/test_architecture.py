"""Rules for the shape of the code, checked on the syntax trees of the package. The package is not imported."""

from __future__ import annotations

import ast
import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SETTERS = ("setattr", "delattr", "__setattr__", "__delattr__")
PROPERTIES = {"property", "cached_property", "setter"}
EVERY_ERROR = (
    *("message", "hint", "field", "log_tail", "inside"),
    *("args", "__context__", "__cause__", "__traceback__", "__suppress_context__", "__notes__"),
)
"""Attributes of every error. Code may change an attribute with one of these names on `self` only, because any other
object could be an error."""
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
# These programs run by themselves, and the environment is their only configuration.
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
        """The file or folder of the package to which the module belongs. `cli_x` belongs to `cli`."""
        unit = self.name.split(".")[1] if "." in self.name else self.name
        return "cli" if unit.startswith("cli_") else unit

    @property
    def tree(self) -> ast.Module:
        return _parsed(self)

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, cached because most rules visit all of them."""
        return _nodes(self)

    def at(self, node: ast.AST, what: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {what}"


@cache
def _parsed(module: Module) -> ast.Module:
    return ast.parse(module.source, module.path)


@cache
def _nodes(module: Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(module.tree))


@pytest.fixture(scope="module", autouse=True)
def _trees_are_no_garbage() -> Iterator[None]:
    """Keep the garbage collector off while the rules run, and drop the trees afterwards. The package has 800,000 nodes,
    and the collector would scan them again and again, which takes twice as long as parsing. Trees that were kept would
    slow later tests in the same way."""
    gc.disable()
    yield
    _parsed.cache_clear()
    _nodes.cache_clear()
    changes.cache_clear()
    gc.enable()


@cache
def package() -> dict[str, Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, str(path.relative_to(PACKAGE.parent.parent)), path.read_text())
    return found


def imports(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield every module of the package that the module imports, at its top or in a function."""
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
    """Return the dotted name of an expression, without calls: `asyncio.get_running_loop.create_task`."""
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


@dataclass(frozen=True)
class Change:
    """A change of the attribute `name` of `changed`, within the class `kind` ("" outside of classes) and the function
    `function` ("" outside of functions)."""

    node: ast.Attribute | ast.Call
    changed: str
    name: str
    kind: str
    function: str


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@cache
def changes(module: Module) -> tuple[Change, ...]:
    """Every change of an attribute, by an assignment of any form, `del`, `setattr` or `delattr`."""
    classes = [node for node in module.nodes if isinstance(node, ast.ClassDef)]
    functions = [node for node in module.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    def around(scopes: Sequence[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef], line: int) -> str:
        """Return the name of the innermost scope around the line. Outer scopes come first in the walk."""
        return next((each.name for each in reversed(scopes) if each.lineno <= line <= (each.end_lineno or 0)), "")

    found = []
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            changed, name = node.value, node.attr
        elif isinstance(node, ast.Call) and _last_name(node.func) in SETTERS and len(node.args) > 1:
            if not isinstance(node.args[1], ast.Constant):
                continue
            changed, name = node.args[0], str(node.args[1].value)
        else:
            continue
        scope = around(classes, node.lineno), around(functions, node.lineno)
        found.append(Change(node, dotted(changed), name, *scope))
    return tuple(found)


class Names:
    """The methods and the data attributes of the package's classes, by class name. `data` has fields, properties, and
    attributes that methods assign to `self`."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self.methods: defaultdict[str, set[str]] = defaultdict(set)
        self.data: defaultdict[str, set[str]] = defaultdict(set)
        self.bases: defaultdict[str, set[str]] = defaultdict(set)
        for module in modules:
            for node in module.nodes:
                if isinstance(node, ast.ClassDef):
                    self._read(node)
            for change in changes(module):
                if change.changed == "self" and isinstance(change.node, ast.Attribute):
                    self.data[change.kind].add(change.name)
        self.errors = {kind for kind in self.bases if "OutriderError" in self.family(kind)}
        self.of_errors = {name for kind in self.errors for name in self.data[kind]}
        self.of_others = {name for kind, names in self.data.items() if kind not in self.errors for name in names}
        self.every_method = {name for names in self.methods.values() for name in names}
        self.only_methods = self.every_method - self.of_errors - self.of_others

    def family(self, kind: str) -> set[str]:
        """The class, and all classes of the package that it inherits from."""
        return {kind}.union(*(self.family(base) for base in self.bases.get(kind, ())))

    def _read(self, kind: ast.ClassDef) -> None:
        self.bases[kind.name] |= {dotted(base).rpartition(".")[2] for base in kind.bases} - {kind.name}
        for node in kind.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_data = PROPERTIES & {dotted(each).rpartition(".")[2] for each in node.decorator_list}
                (self.data if is_data else self.methods)[kind.name].add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.data[kind.name] |= {target.id for target in targets if isinstance(target, ast.Name)}


@cache
def names() -> Names:
    return Names(package().values())


def errors_are_never_changed(module: Module) -> Iterator[str]:
    """An error's attributes are assigned only by its own `__init__` and by `OutriderError.replace`. (Python itself sets
    `__context__` while another error is handled.)

    If other classes have an attribute of the same name, such as `status`, a change counts only if the changed variable
    holds an error (see `_names_of_errors`)."""
    known = names()
    for change in changes(module):
        inside = change.kind in known.errors
        if inside and (change.function == "__init__" or (change.kind, change.function) == ("OutriderError", "replace")):
            continue
        if change.changed == "self":
            wrong = inside
        elif change.name in EVERY_ERROR:
            wrong = True
        else:
            wrong = change.name in known.of_errors and (
                change.name not in known.of_others or change.changed in _names_of_errors(module)
            )
        if wrong:
            what = f"{change.changed}.{change.name}"
            yield module.at(change.node, f"{what}: `OutriderError.replace` makes an error with other attributes")


@cache
def _names_of_errors(module: Module) -> set[str]:
    """The names of a module's variables that hold errors. Such a variable is bound by `except`, gets the result of a
    call of an error's class, is annotated with the class, or is tested with `isinstance`."""

    def names_one(node: ast.AST | None) -> bool:
        parts = (part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)) if node else ()
        return any(dotted(part).rpartition(".")[2] in names().errors for part in parts)

    found = set()
    for node in module.nodes:
        if isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if names_one(node.value.func) or dotted(node.value.func).rpartition(".")[2] == "error_from":
                found |= {dotted(target) for target in node.targets}
        elif isinstance(node, ast.AnnAssign) and names_one(node.annotation):
            found.add(dotted(node.target))
        elif isinstance(node, ast.arg) and names_one(node.annotation):
            found.add(node.arg)
        elif isinstance(node, ast.Call) and dotted(node.func) == "isinstance" and names_one(node.args[1]):
            found.add(dotted(node.args[0]))
    return found - {"self"}


def methods_are_never_replaced(module: Module) -> Iterator[str]:
    """Methods are not assigned. A change is published on a feed (concurrency/events.py) instead, or a callback is given
    to the constructor."""
    if module.name == "outrider.evaluators.checks.swebench_check":
        return  # replaces functions of the swebench package, in a separate process
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
                return
    known = names()
    for change in changes(module):
        of_self = change.changed == "self" and change.name in known.every_method
        own = known.family(change.kind) if of_self else set()
        if change.name in known.only_methods or any(change.name in known.methods[kind] for kind in own):
            yield module.at(change.node, f"{change.changed}.{change.name} is a method")
    for node, name in calls(module):
        if name == "setattr" and not isinstance(node.args[1], ast.Constant) and not isinstance(node.args[2], ast.BinOp):
            yield module.at(node, "setattr with a name that is not written out: only a count is seen to be no method")


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


@pytest.mark.parametrize(
    "source",
    [
        "error.message += 'more'",
        "error.hint: str = 'more'",
        "failed.__context__ = error",
        "error.inside, n = True, 1",
        "setattr(error, 'log_tail', 'more')",
        "object.__setattr__(error, 'field', 'more')",
        "del error.hint",
        "error = error_from(record)\nerror.overflow = None",
        "refused = Refused('text', status=400)\nrefused.status += 1",
        "try: pass\nexcept Exception as error: error.retry_after = 2",
        "if isinstance(failure, errors.Busy): failure.retry_after -= 2",
        "def f(given: Busy | None): given.retry_after = 2",
        "class Busy(ServiceError):\n    def wait(self): self.retry_after = 2",
        "class ContextOverflow(EngineError):\n    def f(self): self.anything = 2",
    ],
)
def test_a_changed_error_is_seen(source: str) -> None:
    [line] = list(errors_are_never_changed(Module("outrider.store.x", "store/x.py", f"'x'\n{source}")))
    assert line.endswith("`OutriderError.replace` makes an error with other attributes")


@pytest.mark.parametrize(
    "source",
    [
        "pool.adopt = replaced",
        "self.pool.adopt = None",
        "a, pool.adopt = 1, replaced",
        "EnginePool.adopt = replaced",
        "setattr(pool, 'adopt', replaced)",
        "object.__setattr__(pool, 'adopt', replaced)",
        "del pool.adopt",
        "setattr(pool, name, replaced)",
        "pool.on_change = replaced",
        "pool.changed = partial(f, 1)",
        "class EnginePool:\n    def __init__(self): self.status = replaced",
        "class Busy(ServiceError):\n    def __init__(self): self.record = replaced",
    ],
)
def test_a_replaced_method_is_seen(source: str) -> None:
    assert list(methods_are_never_replaced(Module("outrider.store.x", "store/x.py", f"'x'\n{source}")))


@pytest.mark.parametrize(
    "source",
    [
        "seen.status = 2\nline.overflow = ''\nprocess.code = 1",
        "class Busy(ServiceError):\n    def __init__(self): self.retry_after = 2",
        "class Mine:\n    def __init__(self): self.message, self.adopt = 'x', None",
        "setattr(counts, name, getattr(counts, name) + 1)",
    ],
)
def test_data_may_change(source: str) -> None:
    module = Module("outrider.store.x", "store/x.py", f"'x'\n{source}")
    assert not list(errors_are_never_changed(module))
    if "adopt" not in source:
        assert not list(methods_are_never_replaced(module))


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
