"""The small changes that a test should detect: one at a time, in the functions of one module, from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "startswith": "endswith", "endswith": "startswith"}


class Mutant(NamedTuple):
    function: str
    """qualified name"""
    was: str
    """the changed statement, only the head of a compound one"""
    becomes: str
    number: int
    """1, or 2 and so on when the function has the same statement and the same change before"""
    source: str
    """the whole module"""


def mutants(source: str, *, skip: Iterable[str] = ()) -> Iterator[Mutant]:
    """Every mutant of the module's functions but those named in `skip`. Strings and annotations stay as they are."""
    tree = ast.parse(source)
    seen: dict[tuple[str, str, str], int] = {}
    for name, function in _functions(tree, "", frozenset(skip)):
        for statement, place in _statements(function):
            for put, original, changed in _changes(statement, place):
                was = _head(statement)
                put(changed)
                # A statement replaced as a whole leaves its old node unchanged.
                becomes = _head(changed) if original is statement else _head(statement)
                text = ast.unparse(ast.fix_missing_locations(tree))
                put(original)
                key = (name, was, becomes)
                seen[key] = seen.get(key, 0) + 1
                yield Mutant(*key, seen[key], text)


def _functions(node: ast.AST, prefix: str, skip: frozenset[str]) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.", skip)
        elif isinstance(child, ast.FunctionDef) and child.name not in skip:
            yield prefix + child.name, child


Put = Callable[[ast.AST], None]
"""puts a node in place of another one"""


def _statements(node: ast.AST) -> Iterator[tuple[ast.stmt, Put]]:
    for _, values in ast.iter_fields(node):
        for i, item in enumerate(values) if isinstance(values, list) else ():
            if isinstance(item, ast.stmt):
                yield item, _list_setter(values, i)
            if isinstance(item, (ast.stmt, ast.match_case, ast.ExceptHandler)):
                yield from _statements(item)


def _head(statement: ast.AST) -> str:
    return ast.unparse(statement).split("\n")[0]


def _changes(statement: ast.stmt, put: Put) -> Iterator[tuple[Put, ast.AST, ast.AST]]:
    """(put, original, changed) for the statement and its own expressions, not those of its body."""
    if _may_be_dropped(statement):
        yield put, statement, ast.Pass()
    stack: list[tuple[ast.AST, Put]] = list(_own_expressions(statement))
    while stack:
        node, put_node = stack.pop(0)
        for changed in _variants(node):
            yield put_node, node, changed
        stack[:0] = _own_expressions(node)
    if isinstance(statement, ast.AugAssign) and type(statement.op) in OPERATORS:
        yield _setter(statement, "op"), statement.op, OPERATORS[type(statement.op)]()
    if isinstance(statement, (ast.If, ast.While)) and not isinstance(
        statement.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)
    ):
        yield _setter(statement, "test"), statement.test, ast.UnaryOp(ast.Not(), statement.test)


def _may_be_dropped(statement: ast.stmt) -> bool:
    """True for statements with an effect beyond local names: a call, a change of an object, a deletion, a refusal."""
    if isinstance(statement, (ast.AugAssign, ast.Delete, ast.Raise, ast.Break, ast.Continue)):
        return True
    if isinstance(statement, ast.Assign):
        return any(
            isinstance(t, (ast.Attribute, ast.Subscript)) for target in statement.targets for t in _parts(target)
        )
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)


def _parts(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, ast.Tuple) else [target]


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=right):
            for i, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield ast.Compare(left, [*ops[:i], other(), *ops[i + 1 :]], right)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            for i in range(len(values)):
                rest = [*values[:i], *values[i + 1 :]]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
            if value > 0:
                yield ast.Constant(value - 1)
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.Name(id=name) if name in NAMES:
            yield ast.Name(NAMES[name], ast.Load())
        case ast.Attribute(value=value, attr=name) if name in NAMES:
            yield ast.Attribute(value, NAMES[name], ast.Load())


def _own_expressions(node: ast.AST) -> Iterator[tuple[ast.AST, Put]]:
    """The expressions directly below a node, with a function that replaces each."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        if isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, (ast.expr, ast.comprehension, ast.keyword)):
                    yield item, _list_setter(value, i)
        elif isinstance(value, (ast.expr, ast.comprehension, ast.arguments)):
            yield value, _setter(node, field)


def _setter(node: ast.AST, field: str) -> Put:
    return lambda new: setattr(node, field, new)


def _list_setter(values: list[ast.AST], index: int) -> Put:
    def put(new: ast.AST) -> None:
        values[index] = new

    return put
