"""Small changes of a program: what a test that looks at the line should notice.

==============  ===============================================================================
operator        change
==============  ===============================================================================
comparison      ``==`` and ``!=``, ``in`` and ``not in``, ``is`` and ``is not`` swap; ``<`` becomes
                ``>=``, ``<=`` becomes ``>``, and the reverse
boundary        ``<`` and ``<=`` swap, ``>`` and ``>=`` swap
arithmetic      ``+`` and ``-`` swap, ``*`` and ``/`` swap, ``//`` becomes ``/``, ``%`` becomes
                ``*``, ``**`` becomes ``*``
constant        0 becomes 1, 1 becomes 0, another whole number one more, a fraction twice as large,
                ``True`` and ``False`` swap; defaults of arguments and fields among them
connective      ``and`` and ``or`` swap
negation        ``not`` and unary minus are left out
condition       an ``if`` or ``while`` takes the other way, unless it is a single comparison
extreme         ``min`` and ``max``, ``any`` and ``all``, ``minimum`` and ``maximum``, ``argmin``
                and ``argmax``, ``floor`` and ``ceil`` swap
slice           ``[1:]`` and ``[:-1]`` swap
return          ``return value`` returns None
statement       a call whose value is not used, or an assignment with an operator, is left out
==============  ===============================================================================

Annotations, decorators, docstrings, ``raise`` and ``assert`` statements, formatted strings and what
type checkers alone read are left as they are: no mutant changes a message. So is ``strict=True`` of
a ``zip``, which asserts that lengths are equal.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARED = {
    ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in", ast.Is: "is not",
    ast.IsNot: "is", ast.Lt: ">=", ast.GtE: "<", ast.LtE: ">", ast.Gt: "<=",
}  # fmt: skip
BOUNDARY = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Mod: "*",
    ast.Pow: "*",
}  # fmt: skip
PAIRS = (
    ("min", "max"), ("any", "all"), ("minimum", "maximum"), ("argmin", "argmax"), ("floor", "ceil"),
)  # fmt: skip
SWAPPED = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
UNTOUCHED = ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of one place of a file; ``begin`` and ``end`` count characters.

    ``function`` is the outermost function or the class that it is in, ``first`` and ``last`` are
    the lines of its statement, counted from the function's ``def``; a class has no such lines.
    ``constants`` are the names that a statement of the module itself gives a value.
    """

    path: str
    line: int
    begin: int
    end: int
    operator: str
    text: str
    function: str
    first: int = 0
    last: int = -1
    constants: tuple[str, ...] = ()

    def apply(self, source: str) -> str:
        """Return the changed source."""
        return source[: self.begin] + self.text + source[self.end :]

    def lines(self, source: str) -> tuple[str, str]:
        """Return the place before and after, one line each."""
        first = source.rfind("\n", 0, self.begin) + 1
        last = source.find("\n", self.end)
        old = source[first:last]
        new = source[first : self.begin] + self.text + source[self.end : last]
        return " ".join(old.split()), " ".join(new.split())


def find_mutants(path: str, source: str) -> list[Mutant]:
    """Return all mutants of a module, in the order of their places."""
    return sorted(_Finder(path, source).find())


def read_mutants(root: Path, folders: tuple[str, ...]) -> list[Mutant]:
    """Return all mutants of folders of the package."""
    files = sorted(p for f in folders for p in (root / "src" / "equifed" / f).rglob("*.py"))
    found = [(p.relative_to(root).as_posix(), p.read_text(encoding="utf-8")) for p in files]
    return [mutant for path, source in found for mutant in find_mutants(path, source)]


class _Finder:
    """Walks one module."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source
        self._lines = [line.encode() for line in source.splitlines(keepends=True)]
        lengths = [len(line.decode()) for line in self._lines]
        self._starts = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
        self._statement: tuple[int, int] = (0, -1)
        self._constants: tuple[str, ...] = ()

    def find(self) -> Iterator[Mutant]:
        """Yield the mutants."""
        yield from self._walk(ast.parse(self.source), "", 0)

    def _walk(self, node: ast.AST, function: str, start: int) -> Iterator[Mutant]:
        if isinstance(node, UNTOUCHED) or _is_for_type_checkers(node) or _asserts(node):
            return
        if isinstance(node, ast.stmt):
            self._statement = _header(node)
            self._constants = () if function else _names_given(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not start:
            function = f"{function}.{node.name}".lstrip(".")
            start = 0 if isinstance(node, ast.ClassDef) else node.lineno
        for begin, end, operator, text in self._changes(node):
            line = self.source.count("\n", 0, begin) + 1
            lines = [one - start for one in self._statement] if start else (0, -1)
            first, last = lines
            where = function, first, last, self._constants
            yield Mutant(self.path, line, begin, end, operator, text, *where)
        for name, child in ast.iter_fields(node):
            if name in {"annotation", "returns", "decorator_list", "format_spec", "type_params"}:
                continue
            for one in child if isinstance(child, list) else [child]:
                if isinstance(one, ast.AST):
                    yield from self._walk(one, function, start)

    def _changes(self, node: ast.AST) -> Iterator[tuple[int, int, str, str]]:
        match node:
            case ast.Compare():
                yield from self._compared(node)
            case ast.BinOp() if type(node.op) in ARITHMETIC and not _is_text(node):
                yield self._between(node.left, node.right, "arithmetic", ARITHMETIC[type(node.op)])
            case ast.AugAssign():
                yield (*self._span(node), "statement", "pass")
                if type(node.op) in ARITHMETIC:
                    text = ARITHMETIC[type(node.op)]
                    yield self._between(node.target, node.value, "arithmetic", f"{text}=")
            case ast.BoolOp():
                word = "or" if isinstance(node.op, ast.And) else "and"
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield self._between(left, right, "connective", word)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                yield (*self._span(node), "negation", self._text(node.operand))
            case ast.Constant() if (text := _another(node.value)) is not None:
                yield (*self._span(node), "constant", text)
            case ast.If() | ast.While() | ast.IfExp():
                if not _is_one_comparison(node.test):  # which has operators of its own
                    text = f"not ({self._text(node.test)})"
                    yield (*self._span(node.test), "condition", text)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in SWAPPED:
                end = self._span(node.func)[1]
                yield end - len(name), end, "extreme", SWAPPED[name]
            case ast.Slice() if self._text(node) in {"1:", ":-1"}:
                yield (*self._span(node), "slice", ":-1" if self._text(node) == "1:" else "1:")
            case ast.Return(value=value) if value is not None and self._text(value) != "None":
                yield (*self._span(value), "return", "None")
            case ast.Expr(value=ast.Call()):
                yield (*self._span(node), "statement", "pass")

    def _compared(self, node: ast.Compare) -> Iterator[tuple[int, int, str, str]]:
        sides = [node.left, *node.comparators]
        for op, left, right in zip(node.ops, sides, node.comparators, strict=False):
            yield self._between(left, right, "comparison", COMPARED[type(op)])
            if type(op) in BOUNDARY:
                yield self._between(left, right, "boundary", BOUNDARY[type(op)])

    def _between(
        self, left: ast.expr, right: ast.expr, operator: str, text: str
    ) -> tuple[int, int, str, str]:
        """Return the change of the operator that stands between two expressions."""
        begin, end = self._span(left)[1], self._span(right)[0]
        while self.source[begin] in ") \n" or self.source[begin] == "#":
            begin = self.source.find("\n", begin) if self.source[begin] == "#" else begin + 1
        while self.source[end - 1] in "( \n":
            end -= 1
        return begin, end, operator, text

    def _span(self, node: ast.AST) -> tuple[int, int]:
        first, last = getattr(node, "lineno"), getattr(node, "end_lineno")  # noqa: B009
        begin = self._lines[first - 1][: getattr(node, "col_offset")]  # noqa: B009
        end = self._lines[last - 1][: getattr(node, "end_col_offset")]  # noqa: B009
        return (
            self._starts[first - 1] + len(begin.decode()),
            self._starts[last - 1] + len(end.decode()),
        )

    def _text(self, node: ast.AST) -> str:
        begin, end = self._span(node)
        return self.source[begin:end]


def _header(node: ast.stmt) -> tuple[int, int]:
    """Return the lines of a statement, without those of the statements in it."""
    last = node.end_lineno or node.lineno
    body = getattr(node, "body", None)
    return node.lineno, max(node.lineno, body[0].lineno - 1) if body else last


def _names_given(node: ast.stmt) -> tuple[str, ...]:
    """Return the names that an assignment gives a value."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = (part for one in targets if one is not None for part in ast.walk(one))
    return tuple(part.id for part in names if isinstance(part, ast.Name))


def _another(value: object) -> str | None:
    """Return another constant, or None for what is no number."""
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return {0: "1", 1: "0"}.get(value, str(value + 1))
    if isinstance(value, float):
        return repr(2 * value) if value else "1.0"
    return None


def _is_one_comparison(test: ast.expr) -> bool:
    if isinstance(test, ast.UnaryOp):
        test = test.operand
    return isinstance(test, ast.Constant) or (isinstance(test, ast.Compare) and len(test.ops) == 1)


def _is_text(node: ast.BinOp) -> bool:
    """Tell whether an operation puts strings together."""
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


def _asserts(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
