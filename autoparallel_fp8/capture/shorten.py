"""A deep model's dynamo graph cut to the six blocks from which `lengthen` makes the whole joint graph.

Tracing autograd through a float8 block takes about a second and models repeat one block up to a hundred times. If all
blocks of a stack but the first and the last are the same program on their own parameters, each fed by the block before
it, the graph is cut to the first and last three blocks. What is compared is dynamo's graph of the whole model, after
its control flow: a model that treats one block in another way is traced in full.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, fx

from autoparallel_fp8.capture.dropout import without_call

NUM_KEPT = 6  # first three, last three: two inner blocks to compare, each with an inner block on both sides


@dataclass(frozen=True)
class Stack:
    """Blocks "prefix.0" to "prefix.(depth - 1)"; all but the first and last three are cut from the graph."""

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


def shorten(graph: fx.Graph, module_of: Callable[[fx.Node], str], fqns: Iterable[str], prefix: str) -> Stack | None:
    """Cuts the middle blocks out of a dynamo graph, in place; None and nothing cut where that is not safe.

    Args:
        graph: dynamo's, of the whole model.
        module_of: fqn of the module that made a node.
        fqns: of all parameters and buffers.
        prefix: what the traced module puts before them.
    """
    stack = _find_stack([module_of(node) for node in graph.nodes if node.op != "placeholder"])
    if stack is None:
        return None
    blocks = _split(graph, stack, module_of)
    if blocks is None or not _Comparison(stack, blocks, _held(graph, fqns, prefix)).holds():
        return None
    first_cut, last_cut = 3, stack.depth - 4
    cut = [node for block in blocks[first_cut : last_cut + 1] for node in block]
    stand_in = dict(zip(blocks[last_cut], blocks[2], strict=True))
    cut_nodes = set(cut)
    readers = {user for node in cut for user in node.users} - cut_nodes
    if any(user not in set(blocks[last_cut + 1]) for user in readers):
        return None
    for user in readers:
        for node in [item for item in user.all_input_nodes if item in cut_nodes]:
            user.replace_input_with(node, stand_in[node])
    for node in reversed(cut):
        graph.erase_node(node)
    return stack


def _held(graph: fx.Graph, fqns: Iterable[str], prefix: str) -> dict[fx.Node, str]:
    """Placeholder -> fqn of its parameter or buffer, by the name dynamo gives it: L_self_modules_a_parameters_b_."""
    names: dict[str, str] = {}
    for fqn in fqns:
        *path, last = f"{prefix}{fqn}".split(".")
        for kind in ("parameters", "buffers"):
            names["_".join([*(f"modules_{part}" for part in path), kind, last, ""])] = fqn
    found = {}
    for node in graph.nodes:
        name = re.sub(r"^L_[^_]+_", "", str(node.target)) if node.op == "placeholder" else ""
        if name in names:
            found[node] = names[name]
    return found


def _find_stack(modules: list[str]) -> Stack | None:
    """The longest run of numbered siblings among the modules that made nodes, if it is worth cutting."""
    numbers: dict[str, set[int]] = {}
    for name in set(modules):
        for found in re.finditer(r"\.(\d+)(?=\.|$)", f".{name}"):
            numbers.setdefault(f".{name}"[: found.start()].removeprefix("."), set()).add(int(found[1]))
    whole = [Stack(prefix, len(found)) for prefix, found in numbers.items() if found == set(range(len(found)))]
    best = max(whole, key=lambda stack: (stack.depth, stack.prefix), default=None)
    return best if best is not None and best.prefix and best.depth > NUM_KEPT + 1 else None


def _split(graph: fx.Graph, stack: Stack, module_of: Callable[[fx.Node], str]) -> list[list[fx.Node]] | None:
    """The nodes of each block; None unless blocks run one after the other. Nodes of no module join the one before."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    owners = [stack.block_of(module_of(node)) for node in nodes]
    inside = [i for i, owner in enumerate(owners) if owner is not None]
    blocks: list[list[fx.Node]] = [[] for _ in range(stack.depth)]
    current = -1
    for i in range(inside[0], inside[-1] + 1):
        between = module_of(nodes[i]) in (
            "",
            stack.prefix.rpartition(".")[0],
        )  # code of the module that runs the blocks
        owner = current if between else owners[i]
        if owner is None or owner not in (current, current + 1):
            return None
        current = owner
        blocks[current].append(nodes[i])
    return blocks if current == stack.depth - 1 else None


class _Comparison:
    """Whether each inner block is the one before it, one number further."""

    def __init__(self, stack: Stack, blocks: list[list[fx.Node]], held: Mapping[fx.Node, str]) -> None:
        self.stack, self.blocks, self.held = stack, blocks, held
        self.places = {node: (number, at) for number, block in enumerate(blocks) for at, node in enumerate(block)}

    def holds(self) -> bool:
        """Compares neighbours, from the second block to the last but one; the outer two may be other programs."""
        inner = self.blocks[1:-1]
        return all(len(a) == len(b) and all(map(self._same_node, a, b)) for a, b in pairwise(inner))

    def _same_node(self, a: fx.Node, b: fx.Node) -> bool:
        same_target = a.op == b.op and _same_function(a.target, b.target) and a.op in ("call_function", "call_method")
        same_value = _shape(a.meta.get("example_value")) == _shape(b.meta.get("example_value"))
        if not same_target or not same_value:
            return False
        args_a, args_b = without_call(a.target, a.args), without_call(b.target, b.args)
        return self._same((args_a, dict(a.kwargs)), (args_b, dict(b.kwargs)), a)

    def _same(self, a: Any, b: Any, reader: fx.Node) -> bool:
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            return self._same_read(a, b, reader)
        if type(a) is not type(b):
            return False
        if isinstance(a, (tuple, list)):
            return len(a) == len(b) and all(self._same(x, y, reader) for x, y in zip(a, b, strict=True))
        if isinstance(a, dict):
            return list(a) == list(b) and all(self._same(a[key], b[key], reader) for key in a)
        if isinstance(a, slice):
            return self._same((a.start, a.stop, a.step), (b.start, b.stop, b.step), reader)
        return bool(a == b)

    def _same_read(self, a: fx.Node, b: fx.Node, reader: fx.Node) -> bool:
        """One value outside all inner blocks, each its own parameter, or one place in this block or in the last."""
        if a is b:
            return self.places.get(a, (0, 0))[0] == 0
        if a.op == "placeholder" and b.op == "placeholder":
            return self._same_parameter(a, b, reader)
        if a not in self.places or b not in self.places:
            return False
        number = self.places[reader][0]
        (block_a, at_a), (block_b, at_b) = self.places[a], self.places[b]
        return at_a == at_b and block_b == block_a + 1 and number - block_a in (0, 1)

    def _same_parameter(self, a: fx.Node, b: fx.Node, reader: fx.Node) -> bool:
        name_a, name_b = self.held.get(a, ""), self.held.get(b, "")
        number = self.places[reader][0]
        return self.stack.block_of(name_a) == number and self.stack.in_block(name_a, number + 1) == name_b


def _same_function(a: Any, b: Any) -> bool:
    """Whether two targets are one function, or closures of the same code over the same things (autograd functions)."""
    if a is b or (isinstance(a, str) and a == b):
        return True
    code, cells = getattr(a, "__code__", None), getattr(a, "__closure__", None)
    if code is None or code is not getattr(b, "__code__", None) or not cells or not b.__closure__:
        return False
    return all(x.cell_contents is y.cell_contents for x, y in zip(cells, b.__closure__, strict=True))


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return type(value)
