"""Makes a compiled template charge its work to a `RenderBudget`.

A template is a program without `while`: only nested loops and macros that call each other take
long. A round of a loop and a call of a macro are charged by the size of their body, which bounds
the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from asyncinfer.text.caller_text import unescape_marks
from asyncinfer.text.render_budget import RenderBudget

__all__ = ["COUNTERS", "CountingNodes", "written"]

#: Nodes of a body that one step executes.
_NODES: Final = 8
#: Values in a tuple.
_MAX_TUPLE: Final = 1000

_Body = TypeVar("_Body", nodes.Block, nodes.Macro, nodes.CallBlock, nodes.For)


def written(budget: RenderBudget, value: Any) -> str:
    """`value` as a template writes it."""
    if isinstance(value, str):
        return str(value)
    budget.show(value)
    return unescape_marks(str(value))


@pass_context
def _step(context: Context, _: None, steps: int, size: int) -> None:
    budget = RenderBudget.of(context)
    budget.step(steps)
    budget.write(size)


@pass_context
def _rounds(context: Context, items: Iterable[Any], steps: int, size: int) -> Iterator[Any]:
    return RenderBudget.of(context).rounds(items, steps, size)


@pass_context
def _keep(context: Context, value: Any) -> Any:
    return RenderBudget.of(context).keep(value)


@pass_context
def _compare(context: Context, value: Any) -> Any:
    RenderBudget.of(context).compare(value)
    return value


@pass_context
def _search(context: Context, value: Any) -> Any:
    # Looking up a name is quick.
    if not isinstance(value, Mapping):
        RenderBudget.of(context).compare(value)
    return value


@pass_context
def _nest(context: Context, value: Any) -> Any:
    count = RenderBudget.of(context).walk(value)
    if isinstance(value, tuple):
        # A tuple can be a key, and every look-up hashes all of it.
        RenderBudget.of(context).check("a tuple", count, _MAX_TUPLE)
    return value


@pass_context
def _concat(context: Context, parts: list[Any]) -> str:
    budget = RenderBudget.of(context)
    texts = [part if type(part) is str else written(budget, part) for part in parts]
    budget.check("'~'", sum(map(len, texts)))
    return budget.keep("".join(texts))


#: Filters of the environment, whose names no template can write.
COUNTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "take a step": _step,
    "count rounds": _rounds,
    "keep": _keep,
    "compare": _compare,
    "search": _search,
    "nest": _nest,
    "concat": _concat,
}


class CountingNodes(NodeTransformer):
    """Inserts the counters where a template loops, calls, slices, compares and joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's way
        if node.recursive:
            return self._stepping(node)
        price = _price([*node.body, *([node.test] if node.test else [])])
        self.generic_visit(node)
        node.iter = _counter("count rounds", node.iter, *price)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._stepping(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:  # noqa: N802
        return self._stepping(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._stepping(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _counter("concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._nesting(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._nesting(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        # Another context is a target of a loop or of `set`.
        return self._nesting(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _counter("keep", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        left = node.expr
        for operand in node.ops:
            right = operand.expr
            if operand.op in ("in", "notin"):
                if not isinstance(right, nodes.Const):
                    operand.expr = _counter("search", right)
            elif not isinstance(left, nodes.Const) and not isinstance(right, nodes.Const):
                operand.expr = _counter("compare", right)
            left = right
        return node

    def _nesting(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:
        plain = all(isinstance(part, nodes.Const | nodes.Pair) for part in node.iter_child_nodes())
        if plain and not any(node.find_all((nodes.Name, nodes.Call, nodes.Filter))):
            return node
        self.generic_visit(node)
        return _counter("nest", node)

    def _stepping(self, node: _Body) -> _Body:
        steps, size = _price(node.body)
        self.generic_visit(node)
        step = _counter("take a step", nodes.Const(None, lineno=node.lineno), steps, size)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node


def _counter(name: str, value: nodes.Node, *arguments: int) -> nodes.Filter:
    constants = [nodes.Const(argument, lineno=value.lineno) for argument in arguments]
    assert isinstance(value, nodes.Expr)
    return nodes.Filter(value, name, constants, [], None, None, lineno=value.lineno)


def _price(body: list[nodes.Node]) -> tuple[int, int]:
    """The steps of a body, not counting rounds of loops in it, and the characters of the template's
    own text that it writes."""
    waiting, count, size = list(body), 0, 0
    while waiting:
        node = waiting.pop()
        count += 1
        if isinstance(node, nodes.TemplateData):
            size += len(node.data)
        if isinstance(node, nodes.For):
            # A nested loop charges its own rounds; only what it iterates over counts here.
            waiting.append(node.iter)
        elif not isinstance(node, nodes.Block | nodes.Macro | nodes.CallBlock):
            waiting += node.iter_child_nodes()
    return 1 + count // _NODES, size
