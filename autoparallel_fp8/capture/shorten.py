"""A deep model cut to the six blocks from which `lengthen` makes the whole joint graph.

Tracing a float8 block through dynamo and autograd takes about a second and models repeat one block up to a hundred
times. If all blocks of a stack but the first and the last run the same program on their own parameters, each fed by the
block before it, the first and last three are enough. What is compared is what the whole model's own code does
(`record`), after its control flow, and again what it does with the six: a model that treats one block in another way
is traced in full.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from autoparallel_fp8.capture.from_fx import layer_of
from autoparallel_fp8.capture.record import Program, Recorder, Unclear, program
from autoparallel_fp8.graph import Graph

NUM_KEPT = 6  # first three, last three: two inner blocks to compare, each with an inner block on both sides
_MOST_TRIED = 3  # stacks of a model, deepest first


@dataclass(frozen=True)
class Stack:
    """Blocks "prefix.0" to "prefix.(depth - 1)"; all but the first and last three are cut from the model."""

    prefix: str
    depth: int

    @property
    def kept(self) -> tuple[int, ...]:
        return (0, 1, 2, self.depth - 3, self.depth - 2, self.depth - 1)

    def block_of(self, name: str) -> int | None:
        """The number of the block that a module or parameter belongs to."""
        found = re.match(rf"{re.escape(self.prefix)}\.(\d+)(?:\.|$)", name)
        return int(found[1]) if found else None

    def in_block(self, name: str, block: int) -> str:
        """The name with another block's number."""
        return re.sub(rf"^({re.escape(self.prefix)})\.\d+", rf"\g<1>.{block}", name)

    def renamed(self, name: str) -> str:
        """A name in the cut model as it is in the whole one."""
        block = self.block_of(name)
        return name if block is None else self.in_block(name, self.kept[block])


def shorten(model: nn.Module, run: Callable[[], Any], arguments: Sequence[Tensor]) -> Stack | None:
    """Finds a stack whose inner blocks all do the same; None where there is none, or where that is not certain.

    Args:
        model: a copy on the meta device; it is left as it was.
        run: calls the model, or what wraps it, with the arguments.
        arguments: the tensors among them.
    """
    stacks = _stacks(model)
    if not stacks:
        return None
    blocks = {stack.prefix: list(model.get_submodule(stack.prefix).children()) for stack in stacks}
    whole = _recorded(model, run, arguments, blocks)
    if whole is None:
        return None
    for stack in stacks:
        with cut(model, stack):
            kept = list(model.get_submodule(stack.prefix).children())
            short = _recorded(model, run, arguments, {stack.prefix: kept})
        if short is not None and _agree(whole, short, stack):
            return stack
    return None


@contextmanager
def cut(model: nn.Module, stack: Stack | None) -> Any:
    """The model with the kept blocks of a stack alone, numbered anew, for the while."""
    if stack is None:
        yield
        return
    holder = model.get_submodule(stack.prefix)
    before = dict(holder._modules)
    kept = {str(i): before[str(number)] for i, number in enumerate(stack.kept)}
    _put(holder, kept)
    try:
        yield
    finally:
        _put(holder, before)


def _put(holder: nn.Module, children: dict[str, nn.Module | None]) -> None:
    holder._modules.clear()
    holder._modules.update(children)


def as_in_whole(graph: Graph, stack: Stack) -> Graph:
    """The graph of the cut model with the names that its modules and tensors have in the whole one."""

    def name(kind: str, target: str) -> str:
        return stack.renamed(target) if kind in ("parameter", "buffer", "gradient") else target

    nodes = []
    for node in graph.nodes:
        module = stack.renamed(node.module)
        layer = layer_of(module) if node.layer else node.layer
        nodes.append(replace(node, target=name(node.kind, node.target), module=module, layer=layer))
    outputs = [replace(one, target=name(one.kind, one.target)) for one in graph.outputs]
    aliases = [(stack.renamed(alias), stack.renamed(first)) for alias, first in graph.aliases]
    return replace(graph, nodes=tuple(nodes), outputs=tuple(outputs), aliases=tuple(aliases))


def _stacks(model: nn.Module) -> list[Stack]:
    """Modules whose children are numbered and of one class, and more than are kept; deepest first."""
    found = []
    for name, module in model.named_modules():
        names = list(module._modules)
        is_numbered = names == [str(i) for i in range(len(names))]
        if name and is_numbered and len(names) > NUM_KEPT + 1 and len({type(m) for m in module.children()}) == 1:
            found.append(Stack(name, len(names)))
    return sorted(found, key=lambda stack: (-stack.depth, stack.prefix))[:_MOST_TRIED]


def _recorded(
    model: nn.Module, run: Callable[[], Any], arguments: Sequence[Tensor], stacks: dict[str, list[nn.Module]]
) -> Recorder | None:
    # Whatever the model's own code raises on meta tensors, tracing it in full will say better, with its place.
    try:
        with Recorder(model, arguments, stacks) as recorder:
            run()
    except Exception:
        return None
    return recorder


def _agree(whole: Recorder, short: Recorder, stack: Stack) -> bool:
    """Whether the inner blocks are alike, and the cut model does what the whole one does around them."""
    half = NUM_KEPT // 2
    try:
        full = program(whole, stack.prefix, stack.depth, half)
        few = program(short, stack.prefix, NUM_KEPT, half)
    except Unclear:
        return False
    inner = full.blocks[1]
    alike = all(block == inner for block in (*full.blocks[2:-1], *few.blocks[1:-1]))
    return alike and _around(full) == _around(few)


def _around(one: Program) -> tuple[Any, ...]:
    return one.head, one.blocks[0], one.blocks[-1], one.tail
