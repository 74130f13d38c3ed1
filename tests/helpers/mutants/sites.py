"""The places of a module where one token can be changed, and the changes: a bound, a sign, an index, a dtype, a flag,
or a term that is dropped.

A change keeps the operands of its expression and computes something else from them, so a place can be watched: the
operands are computed once, and both results are compared. Left out is what only talks or is checked by the type
checker: annotations, messages, assertions, names of a class, and kernels that a compiler reads.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

KINDS = ("bound", "sign", "index", "dtype", "term", "flag")
STATEMENT = "statement"  # the kind of a change that puts a whole statement in the place of another
WATCH = "__rlexp_watch__"
Make = Callable[[Sequence[ast.expr]], ast.expr]

BOUNDS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
EXTREMES = {"min": "max", "max": "min"}
SIDES = {"left": "right", "right": "left"}
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add}
LOSES_BOTH = (ast.Add, ast.Mult, ast.BitOr)  # either operand may be the one that is dropped
LOSES_RIGHT = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod)
DTYPES = {"float32": "bfloat16", "float64": "float32", "bfloat16": "float32"}
CASTS = ("float", "double", "bfloat16")  # methods
WIDE = ("wide", "accumulation_dtype")  # functions of a dtype
SILENT = ("__repr__", "__str__")
BODY = ("body", "orelse", "handlers", "finalbody")


@dataclass(frozen=True)
class Change:
    """What an expression becomes, as functions of its operands. A statement is dropped, or gets another operator."""

    kind: str
    name: str
    operands: tuple[ast.expr, ...] = ()
    before: Make | None = None
    after: Make | None = None
    statement: ast.stmt | None = None  # in the place of the statement
    lazy: bool = False  # operands are computed only where they are asked for


@dataclass(frozen=True)
class Site:
    """A place and its change. `path` is relative to the checkout, `node` counts the nodes of the module's tree."""

    path: str
    node: int
    name: str
    kind: str
    line: int
    column: int
    before: str
    after: str
    checks: bool = False  # whether it only takes a check away, so that nothing else can differ: zip(…, strict=True)

    @property
    def id(self) -> str:
        return f"{self.path}:{self.line}:{self.node}:{self.name}"


# ---- which places there are ----


def sites_of(path: str, source: str) -> list[Site]:
    tree = ast.parse(source)
    checks = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.keyword) and each.arg == "strict"}
    sites = []
    for number, node in _numbered(tree):
        for change in _changes(node):
            before, after = (ast.unparse(each) for each in _texts(node, change))
            place = (node.lineno, node.col_offset, before, after, id(node) in checks)
            sites.append(Site(path, number, change.name, change.kind, *place))
    return sites


def chosen(sites: Sequence[Site], count: int, seed: int) -> list[Site]:
    """Draw places, as many of each kind as there are or as come round, and no node twice."""
    draw = random.Random(seed)
    waiting = {kind: [site for site in sites if site.kind == kind] for kind in KINDS}
    for each in waiting.values():
        draw.shuffle(each)
    taken: dict[tuple[str, int], Site] = {}
    while len(taken) < count and any(waiting.values()):
        for kind in KINDS:
            if waiting[kind] and len(taken) < count:
                site = waiting[kind].pop()
                taken.setdefault((site.path, site.node), site)
    return sorted(taken.values(), key=lambda site: (site.path, site.line, site.column))


def _numbered(tree: ast.Module) -> Iterator[tuple[int, ast.expr | ast.stmt]]:
    """Yield the nodes inside functions that may be changed, with their numbers among all nodes."""
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}

    def below(node: ast.AST, *, inside: bool) -> Iterator[tuple[int, ast.expr | ast.stmt]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not _is_talk(node):
                for each in node.body:
                    yield from below(each, inside=True)
            return
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                yield from below(each, inside=False)
            return
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.pattern | ast.Import | ast.ImportFrom):
            return
        if inside and isinstance(node, ast.expr | ast.stmt):
            yield numbers[id(node)], node
        for name, value in ast.iter_fields(node):
            if name == "annotation":
                continue
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST) and not _part_of_number(node, each):
                    yield from below(each, inside=inside)

    yield from below(tree, inside=False)


def _is_talk(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function only makes texts, or is compiled from its source by another compiler."""
    text = isinstance(function.returns, ast.Name) and function.returns.id == "str"
    compiled = any("jit" in ast.unparse(each) for each in function.decorator_list)
    return text or compiled or function.name in SILENT


def _part_of_number(node: ast.AST, child: ast.AST) -> bool:
    """Return whether a child is the 1 of -1, which is one token here."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(child, ast.Constant)


# ---- which changes a place has ----


def _changes(node: ast.expr | ast.stmt) -> Iterator[Change]:
    match node:
        case ast.BinOp():
            yield from _of_operator(node)
        case ast.Compare(ops=[op]) if type(op) in BOUNDS:
            yield _with(node, "bound", _spelled(BOUNDS[type(op)]), "ops", [BOUNDS[type(op)]()])
        case ast.BoolOp(values=[_, _]) if not _binds(node):
            yield from _of_condition(node)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            yield _constant(node, "index", 1 - value)
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield Change("sign", "dropped", (operand,), _rebuilt(node, ["operand"]), lambda given: given[0])
        case ast.Constant(value=bool(value)):
            yield _constant(node, "flag", not value)
        case ast.Constant(value=int(value) | float(value)):
            yield _constant(node, "index", value + 1)
        case ast.Constant(value=str(value)) if value in SIDES:
            yield _constant(node, "bound", SIDES[value])
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in DTYPES and isinstance(node.value, ast.Name):
            other = ast.Attribute(copy.deepcopy(node.value), DTYPES[name], ast.Load())
            yield Change("dtype", other.attr, (), lambda _: copy.deepcopy(node), lambda _: other)
        case ast.Call():
            yield from _of_call(node)
        case ast.AugAssign(op=op) if type(op) in SIGNS:
            other_op = SIGNS[type(op)]
            yield Change("sign", _spelled(other_op), statement=ast.AugAssign(node.target, other_op(), node.value))
        case ast.Expr(value=ast.Call(func=called)) if not ast.unparse(called).endswith("__init__"):
            yield Change("term", "dropped", statement=ast.Pass())
        case _:
            return


def _of_operator(node: ast.BinOp) -> Iterator[Change]:
    if any(isinstance(each, ast.JoinedStr) or _is_text(each) for each in (node.left, node.right)):
        return
    if type(node.op) in SIGNS:
        other = SIGNS[type(node.op)]
        yield _with(node, "sign", _spelled(other), "op", other())
    operands, before = (node.left, node.right), _rebuilt(node, ["left", "right"])
    if isinstance(node.op, (*LOSES_BOTH, *LOSES_RIGHT)):
        yield Change("term", "left alone", operands, before, lambda given: given[0])
    if isinstance(node.op, LOSES_BOTH):
        yield Change("term", "right alone", operands, before, lambda given: given[1])


def _of_condition(node: ast.BoolOp) -> Iterator[Change]:
    operands = (node.values[0], node.values[1])

    def before(given: Sequence[ast.expr]) -> ast.expr:
        return ast.BoolOp(node.op, list(given))

    yield Change("term", "left alone", operands, before, lambda given: given[0], lazy=True)
    yield Change("term", "right alone", operands, before, lambda given: given[1], lazy=True)


def _of_call(node: ast.Call) -> Iterator[Change]:
    if any(isinstance(each, ast.Starred) for each in node.args) or any(each.arg is None for each in node.keywords):
        return
    match node:
        case ast.Call(func=ast.Name(id=name), args=[_, _, *_], keywords=[]) if name in EXTREMES:
            yield _with(node, "bound", EXTREMES[name], "func", ast.Name(EXTREMES[name], ast.Load()))
        case ast.Call(func=ast.Name(id=name), args=[given], keywords=[]) if name in WIDE:
            yield Change("dtype", "dropped", (given,), _rebuilt(node, ["args"]), lambda given: given[0])
        case ast.Call(func=ast.Attribute(value=cast, attr=name), args=[], keywords=[]) if name in CASTS:
            yield Change("dtype", "dropped", (cast,), _method(name), lambda given: given[0])
        case ast.Call(func=ast.Attribute(value=cast, attr="to"), args=[to], keywords=[]):
            yield Change("dtype", "dropped", (cast, to), _method("to"), lambda given: given[0])
        case ast.Call(func=ast.Attribute(value=holder, attr=name), keywords=keywords) if _has_dtype(keywords):
            names = [each.arg for each in keywords]
            operands = (holder, *node.args, *(each.value for each in keywords))
            kept = [each for each in names if each != "dtype"]
            yield Change("dtype", "no dtype", operands, _called(name, len(node.args), names, names),
                         _called(name, len(node.args), names, kept))  # fmt: skip


def _has_dtype(keywords: Sequence[ast.keyword]) -> bool:
    return any(each.arg == "dtype" for each in keywords)


def _called(method: str, args: int, names: Sequence[str | None], kept: Sequence[str | None]) -> Make:
    def make(given: Sequence[ast.expr]) -> ast.expr:
        keywords = zip(names, given[1 + args :], strict=True)
        return ast.Call(
            ast.Attribute(given[0], method, ast.Load()), list(given[1 : 1 + args]),
            [ast.keyword(name, value) for name, value in keywords if name in kept],
        )  # fmt: skip

    return make


def _method(name: str) -> Make:
    return lambda given: ast.Call(ast.Attribute(given[0], name, ast.Load()), list(given[1:]), [])


def _with(node: ast.expr, kind: str, name: str, field: str, value: object) -> Change:
    """Keep the operands of an expression and change what is done with them."""
    fields = {ast.Compare: ["left", "comparators"], ast.BinOp: ["left", "right"], ast.Call: ["args"]}[type(node)]
    other = copy.copy(node)
    setattr(other, field, value)
    operands = [each for part in fields for each in _listed(getattr(node, part))]
    return Change(kind, name, tuple(operands), _rebuilt(node, fields), _rebuilt(other, fields))


def _rebuilt(node: ast.expr, fields: Sequence[str]) -> Make:
    def make(given: Sequence[ast.expr]) -> ast.expr:
        other, waiting = copy.copy(node), list(given)
        for field in fields:
            old = getattr(node, field)
            setattr(other, field, [waiting.pop(0) for _ in old] if isinstance(old, list) else waiting.pop(0))
        return other

    return make


def _listed(value: ast.expr | list[ast.expr]) -> list[ast.expr]:
    return value if isinstance(value, list) else [value]


def _constant(node: ast.expr, kind: str, value: bool | int | float | str) -> Change:
    return Change(kind, repr(value), (), lambda _: copy.deepcopy(node), lambda _: ast.Constant(value))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _binds(node: ast.expr) -> bool:
    """Return whether an expression cannot be moved into a function of its own."""
    return any(
        isinstance(each, ast.NamedExpr | ast.Await | ast.Yield) or (isinstance(each, ast.Name) and each.id == "super")
        for each in ast.walk(node)
    )


def _spelled(operator: type[ast.AST]) -> str:
    return {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Add: "+",
            ast.Sub: "-"}[operator]  # fmt: skip


def _texts(node: ast.expr | ast.stmt, change: Change) -> tuple[ast.AST, ast.AST]:
    if change.after is None:
        assert change.statement is not None
        return node, change.statement
    return node, change.after(change.operands)


# ---- whole statements ----


def bare(statement: ast.stmt, body: ast.stmt | None = None) -> ast.stmt:
    """Return a statement without those that are in it, or with those that are in another."""
    other = copy.copy(statement)
    for name in {*BODY} & {*statement._fields}:
        setattr(other, name, getattr(body, name, []))
    return other


def parsed(text: str) -> ast.stmt:
    """Return the statement that a text is, or the first line of one that has a body."""
    (statement,) = ast.parse(f"{text} pass" if text.endswith(":") else text).body
    return bare(statement)


# ---- the changed and the watched module ----


def _change(node: ast.expr | ast.stmt, site: Site) -> Change:
    if site.kind == STATEMENT:
        return Change(STATEMENT, site.name, statement=bare(parsed(site.after), node))
    return next(each for each in _changes(node) if each.name == site.name and each.kind == site.kind)


def changed(source: str, site: Site) -> ast.Module:
    """Return the module's tree with the change."""
    return _rewritten(source, {site.node: (0, site)}, watched=False)


def watched(source: str, sites: Mapping[int, Site]) -> ast.Module:
    """Return the module's tree in which every place reports itself, by its number."""
    return _rewritten(source, {site.node: (number, site) for number, site in sites.items()}, watched=True)


def _rewritten(source: str, sites: dict[int, tuple[int, Site]], *, watched: bool) -> ast.Module:
    tree = ast.parse(source)
    wanted = {id(node): sites[number] for number, node in enumerate(ast.walk(tree)) if number in sites}
    assert len(wanted) == len(sites), "the module is not the one whose places were listed"

    class Rewriter(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:
            found = wanted.get(id(node))
            self.generic_visit(node)  # operands first: places may lie in each other
            if found is None:
                return node
            number, site = found
            assert isinstance(node, ast.expr | ast.stmt)
            change = _change(node, site)
            if isinstance(node, ast.stmt):
                assert change.statement is not None
                told = ast.Expr(ast.Call(ast.Name(WATCH, ast.Load()), [ast.Constant(number)], []))
                return [told, node] if watched else change.statement
            assert change.after is not None
            return _watching(number, change) if watched else change.after(change.operands)

    Rewriter().generic_visit(tree)
    return ast.fix_missing_locations(tree)


def _watching(number: int, change: Change) -> ast.expr:
    """Call the watcher with the number, both functions of the operands, and the operands."""
    names = [f"operand_{place}" for place in range(len(change.operands))]
    given: list[ast.expr] = [ast.Name(name, ast.Load()) for name in names]
    if change.lazy:
        given = [ast.Call(each, [], []) for each in given]
    functions = [ast.Lambda(_arguments(names), copy.deepcopy(make(given)))
                 for make in (change.before, change.after) if make is not None]  # fmt: skip
    operands = [ast.Lambda(_arguments([]), each) if change.lazy else each for each in change.operands]
    return ast.Call(ast.Name(WATCH, ast.Load()), [ast.Constant(number), *functions, *operands], [])


def _arguments(names: Sequence[str]) -> ast.arguments:
    return ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
