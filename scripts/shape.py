"""Measures the shape of Python packages from their source: sizes, comments, single-use helpers, import chains.

    python scripts/shape.py src/outrider [OTHER_PACKAGE_DIR ...] [--json | --list]

Prints a table with one column per package. `--json` prints the same numbers as a list with one object per package.
`--list` adds the sources of the first package's numbers: its single-use helpers, its longest import chain, and the
files with the fewest comments. Standard library only. There are no targets: a number is a question, not a rule.
Invariant: the script parses and tokenizes files and imports none of them, so the packages need not be installed.

Definitions:

- A file is any `*.py` below the folder. All of its lines count, empty ones included.
- Median and p90 are the smallest value that at least 50 % or 90 % of the values do not exceed.
- A function is any `def`: methods, properties, overloads and nested functions count as functions of their own. Its
  lines run from `def` to its last line; the docstring is included, decorators are not.
- A docstring is the first string of a module, class or function. A string directly below an assignment in the body of
  a module or class documents the assigned name. A code line has a token that belongs to no docstring, no such string
  and no comment.
- A comment is a line with a `#`, also behind code. A shebang, a coding line, and a comment that is only an
  instruction to a tool (`type: ignore`, `noqa`, `pragma: no cover`, `fmt: off`) do not count; an instruction with a
  reason behind it counts. A string that documents an assigned name counts as one comment.
- A private helper is a function whose name starts with exactly one underscore. It is left out if it has a decorator
  that is not in TRANSPARENT, which may register it, or if its module defines two helpers of this name, such as a
  method and its override.
- A helper is used once if the package refers to it once, whether it calls it or passes it on. References to a method
  are the attributes of its name in its module; references to another function are the names in its module. Other
  modules refer to a function by `module.name` and by the uses of the imported name; an import without use counts as
  one. Objects are not traced to their types: an attribute of that name counts for every class. Two modules often use
  the same name for different helpers; the second row of helpers leaves such names out.
- The import graph has an edge from a module to each module of the package that it imports while it is imported
  itself, so not within functions, nor below an `if` whose test starts with TYPE_CHECKING. `from pkg import name`
  leads to `pkg.name` if that is a module, else to `pkg`. Importing `pkg.name` is no edge to `pkg`. A chain is a path
  in this graph; its length is its number of modules, and a cycle of modules counts as one.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeGuard

TRANSPARENT = frozenset(
    {"staticmethod", "classmethod", "property", "contextmanager", "asynccontextmanager", "cache", "override"}
)
"""Decorators that only change how a function is called."""

FEWEST = 10
"""Number of files that `--list` prints, those with the fewest comments first."""

TO_A_TOOL = re.compile(
    r"type:\s*ignore(\[[^\]]*\])?"
    r"|(ruff:\s*)?noqa(:\s*[A-Z]+-?[0-9]+([,\s]+[A-Z]+-?[0-9]+)*)?"
    r"|pragma:\s*no\s?(cover|branch)"
    r"|((ruff:\s*)?(fmt|isort)|mypy|pyright):.*"
)
FIRST_LINES = re.compile(r"#!.*|#.*?coding[:=].*")
NOT_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    node: Definition
    owner: ast.AST
    """The module, class or function that contains the definition."""

    @property
    def lines(self) -> int:
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1

    @property
    def is_helper(self) -> bool:
        name = self.node.name
        transparent = all(last_name(decorator) in TRANSPARENT for decorator in self.node.decorator_list)
        return name.startswith("_") and not name.startswith("__") and transparent


@dataclass(frozen=True)
class Imported:
    """The binding of one name by an import statement: to `module` or, if `name` is given, to this attribute of
    `module`."""

    binding: str
    module: str
    name: str = ""


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    source: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def lines(self) -> int:
        return self.source.count("\n") + (not self.source.endswith("\n") and self.source != "")

    @cached_property
    def functions(self) -> list[Function]:
        return list(functions_in(self.tree, self.tree))

    @cached_property
    def names(self) -> Counter[str]:
        """The number of reads of each name."""
        names = (node for node in self.nodes if isinstance(node, ast.Name))
        return Counter(node.id for node in names if isinstance(node.ctx, ast.Load))

    @cached_property
    def attributes(self) -> Counter[str]:
        """The number of uses of each attribute name. Uses on all objects are counted together."""
        return Counter(node.attr for node in self.nodes if isinstance(node, ast.Attribute))

    @cached_property
    def code_lines(self) -> int:
        spans = [span(string) for string in (*docstrings(self.nodes), *strings_below_assignments(self.nodes))]
        lines: set[int] = set()
        for token in self._tokens:
            documents = token.type == tokenize.STRING and any(start <= token.start < end for start, end in spans)
            if token.type not in NOT_CODE and not documents:
                lines.update(range(token.start[0], token.end[0] + 1))
        return len(lines)

    @cached_property
    def comments(self) -> int:
        written = [token for token in self._tokens if token.type == tokenize.COMMENT]
        return sum(map(says_something, written)) + len(list(strings_below_assignments(self.nodes)))

    @cached_property
    def comment_rate(self) -> float:
        return per_100(self.comments, self.code_lines)

    @cached_property
    def _tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.source).readline))


@dataclass(frozen=True)
class Package:
    """`modules` are the package's modules by dotted name, including those of sub-packages."""

    name: str
    modules: dict[str, Module]


@dataclass(frozen=True)
class Spread:
    median: int
    p90: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Spread:
        ordered = sorted(values) or [0]
        return cls(*(ordered[(percent * len(ordered) - 1) // 100] for percent in (50, 90)))

    def __str__(self) -> str:
        return f"{self.median} / {self.p90}"


@dataclass(frozen=True)
class Shape:
    """The numbers of one package: a column of the table."""

    package: str
    files: int
    lines: int
    file_lines: Spread
    functions: int
    function_lines: Spread
    code_lines: int
    comments_per_100_code_lines: float
    helpers_used_once_percent: float
    unique_helpers_used_once_percent: float
    """The percentage of helpers that are used once and whose name is used nowhere else in the package."""
    longest_import_chain: int

    @property
    def rows(self) -> dict[str, str]:
        return {
            "": self.package,
            "files": f"{self.files}",
            "lines in all": f"{self.lines}",
            "file lines, median / p90": f"{self.file_lines}",
            "functions": f"{self.functions}",
            "function lines, median / p90": f"{self.function_lines}",
            "comments per 100 code lines": f"{self.comments_per_100_code_lines:.1f}",
            "private helpers used once, % of functions": f"{self.helpers_used_once_percent:.1f}",
            "  only names used nowhere else, %": f"{self.unique_helpers_used_once_percent:.1f}",
            "longest import chain, modules": f"{self.longest_import_chain}",
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the shape of Python packages from their source.")
    parser.add_argument("packages", nargs="+", type=Path, metavar="PACKAGE_DIR")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--list", action="store_true", help="print also what the first package's numbers come from")
    options = parser.parse_args(arguments)
    try:
        packages = [read(folder) for folder in options.packages]
    except (OSError, SyntaxError, ValueError) as error:
        sys.exit(f"a package cannot be read: {error}")
    shapes = [measure(package) for package in packages]
    if options.json:
        print(json.dumps([asdict(shape) for shape in shapes], indent=2))
        return
    print(table(shapes))
    if options.list:
        print("\n".join(listing(packages[0])))


def read(folder: Path) -> Package:
    """Parse the package in `folder`. Raises OSError if there are no files, SyntaxError or ValueError for a file that is
    not Python."""
    root = folder.resolve()
    names = [root.name]
    # Imports use the full name of a package inside another package.
    while (root.parent / "__init__.py").exists():
        root = root.parent
        names.insert(0, root.name)
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        inner = path.relative_to(folder).with_suffix("").parts
        name = ".".join((*names, *(inner[:-1] if inner[-1] == "__init__" else inner)))
        with tokenize.open(path) as file:
            source = file.read()
        modules[name] = Module(name, path, source, ast.parse(source, str(path)))
    if not modules:
        raise FileNotFoundError(f"{folder} holds no Python files")
    return Package(".".join(names), modules)


def measure(package: Package) -> Shape:
    modules = package.modules.values()
    functions = [function for module in modules for function in module.functions]
    code_lines = sum(module.code_lines for module in modules)
    once = [function.node.name for _, function in helpers_used_once(package)]
    words: Counter[str] = Counter()
    for module in modules:
        words += module.names + module.attributes
    return Shape(
        package=package.name,
        files=len(modules),
        lines=sum(module.lines for module in modules),
        file_lines=Spread.of([module.lines for module in modules]),
        functions=len(functions),
        function_lines=Spread.of([function.lines for function in functions]),
        code_lines=code_lines,
        comments_per_100_code_lines=per_100(sum(module.comments for module in modules), code_lines),
        helpers_used_once_percent=per_100(len(once), len(functions)),
        unique_helpers_used_once_percent=per_100(sum(words[name] == 1 for name in once), len(functions)),
        longest_import_chain=len(longest_chain(import_graph(package))),
    )


def table(shapes: Sequence[Shape]) -> str:
    columns = [list(shapes[0].rows), *(list(shape.rows.values()) for shape in shapes)]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for title, *cells in zip(*columns, strict=True):
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join((title.ljust(widths[0]), *padded)))
    return "\n".join(lines)


def listing(package: Package) -> Iterator[str]:
    """Yield the lines that `--list` adds to the table."""
    yield "\nprivate helpers used once:"
    for module, function in helpers_used_once(package):
        yield f"  {module.path}:{function.node.lineno} {function.node.name}"
    yield "\nlongest import chain, each module importing the next:"
    for cycle in longest_chain(import_graph(package)):
        yield f"  {' = '.join(sorted(cycle))}"
    yield "\nfewest comments per 100 code lines, the longest files first:"
    written = [module for module in package.modules.values() if module.code_lines]
    for module in sorted(written, key=lambda each: (each.comment_rate, -each.code_lines))[:FEWEST]:
        yield f"  {module.comment_rate:4.1f} in {module.code_lines:4} lines  {module.path}"


def helpers_used_once(package: Package) -> Iterator[tuple[Module, Function]]:
    outside = references_from_outside(package)
    for module in package.modules.values():
        helpers = [function for function in module.functions if function.is_helper]
        defined = Counter(function.node.name for function in helpers)
        for function in helpers:
            name = function.node.name
            if isinstance(function.owner, ast.ClassDef):
                references = module.attributes[name]
            elif isinstance(function.owner, ast.Module):
                references = module.names[name] + outside[module.name, name]
            else:
                references = module.names[name]
            if defined[name] == 1 and references == 1:
                yield module, function


def import_graph(package: Package) -> dict[str, set[str]]:
    """Return for each module the modules of the package that are imported during the import of the module."""
    return {
        module.name: {
            imported.module
            for statement in early_imports(module.tree)
            for imported in imported_by(statement, module, package)
        }
        for module in package.modules.values()
    }


def longest_chain(graph: dict[str, set[str]]) -> tuple[frozenset[str], ...]:
    """Return the longest path from importer to imported. Each node of the path is one module, or all modules of a
    cycle."""
    reached = {name: reached_from(graph, name) for name in graph}
    cycles = {
        name: frozenset({name, *(other for other in found if name in reached[other])})
        for name, found in reached.items()
    }

    @cache
    def chain_from(cycle: frozenset[str]) -> tuple[frozenset[str], ...]:
        below = {cycles[target] for name in cycle for target in graph[name]} - {cycle}
        return (cycle, *max(map(chain_from, sorted(below, key=sorted)), key=len, default=()))

    return max(map(chain_from, sorted(set(cycles.values()), key=sorted)), key=len, default=())


def reached_from(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    frontier = {start}
    while frontier:
        frontier = {target for name in frontier for target in graph[name]} - found
        found |= frontier
    return found


def early_imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run when the module is imported."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    for child in node.orelse if is_for_types(node) else ast.iter_child_nodes(node):
        if not isinstance(child, Definition):
            yield from early_imports(child)


def is_for_types(node: ast.AST) -> TypeGuard[ast.If]:
    if not isinstance(node, ast.If):
        return False
    # An example is anyio's `if TYPE_CHECKING or not install_lazy_importer()`.
    test = node.test.values[0] if isinstance(node.test, ast.BoolOp) else node.test
    return last_name(test) == "TYPE_CHECKING"


def imported_by(statement: ast.Import | ast.ImportFrom, importer: Module, package: Package) -> Iterator[Imported]:
    """Yield the names that the statement imports from the package."""
    if isinstance(statement, ast.Import):
        found = (Imported(alias.asname or alias.name, alias.name) for alias in statement.names)
        yield from (imported for imported in found if imported.module in package.modules)
        return
    source = source_of(statement, importer)
    for alias in statement.names:
        binding, inner = alias.asname or alias.name, f"{source}.{alias.name}"
        if inner in package.modules:
            yield Imported(binding, inner)
        elif source in package.modules:
            yield Imported(binding, source, alias.name)


def source_of(statement: ast.ImportFrom, importer: Module) -> str:
    """Return the full name of the module that follows `from`."""
    if not statement.level:
        return statement.module or ""
    is_package = importer.path.name == "__init__.py"
    parents = importer.name.split(".")
    parents = parents[: len(parents) + is_package - statement.level]
    return ".".join((*parents, statement.module) if statement.module else parents)


def references_from_outside(package: Package) -> Counter[tuple[str, str]]:
    """Count the references to private names from other modules, by defining module and name."""
    references: Counter[tuple[str, str]] = Counter()
    for module in package.modules.values():
        modules = {}
        for statement in module.nodes:
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                continue
            for imported in imported_by(statement, module, package):
                if imported.name:
                    references[imported.module, imported.name] += max(1, module.names[imported.binding])
                else:
                    modules[imported.binding] = imported.module
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                owner = modules.get(ast.unparse(node.value))
                if owner is not None:
                    references[owner, node.attr] += 1
    return references


def functions_in(node: ast.AST, owner: ast.AST) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield Function(child, owner)
        yield from functions_in(child, child if isinstance(child, Definition | ast.ClassDef) else owner)


def docstrings(nodes: Sequence[ast.AST]) -> Iterator[ast.Expr]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | Definition) and node.body and is_string(node.body[0]):
            yield node.body[0]


def strings_below_assignments(nodes: Sequence[ast.AST]) -> Iterator[ast.Expr]:
    """Yield the strings that describe constants, fields and, inside functions, attributes such as `self.name`."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | Definition):
            for above, statement in zip(node.body, node.body[1:], strict=False):
                if not isinstance(above, ast.Assign | ast.AnnAssign) or not is_string(statement):
                    continue
                target = above.target if isinstance(above, ast.AnnAssign) else above.targets[0]
                if isinstance(node, ast.Module | ast.ClassDef) or isinstance(target, ast.Attribute):
                    yield statement


def is_string(statement: ast.stmt) -> TypeGuard[ast.Expr]:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def span(node: ast.Expr) -> tuple[tuple[int, int], tuple[int, int]]:
    # Columns of the syntax tree are bytes and columns of tokens are characters. The two differ only behind non-ASCII
    # text on the same line.
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)


def says_something(comment: tokenize.TokenInfo) -> bool:
    """Return False for a comment that is only an instruction to a tool."""
    if comment.start[0] <= 2 and FIRST_LINES.fullmatch(comment.string):
        return False
    parts = [part.strip() for part in comment.string.split("#")[1:]]
    return not all(TO_A_TOOL.fullmatch(part) for part in parts)


def last_name(node: ast.expr) -> str:
    """Return the last name of an expression, such as `cache` for `@cache`, `@functools.cache` and
    `@functools.cache()`."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def per_100(count: int, of: int) -> float:
    return 100 * count / of if of else 0.0


if __name__ == "__main__":
    main()
