"""Dropout calls as the op of `ops.dropout`, each with its own number, and the seed that they read.

Calls are numbered in the order of dynamo's graph. Blocks that are compared may differ in these numbers
(`without_call`), a copied block counts on as its neighbours do, and what comes after it counts on from there
(`call_in_block`): so the graph is the same whether blocks are shared or not.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autoparallel_fp8.graph import Graph, Node, Ref, map_refs
from autoparallel_fp8.ops import dropout as _registers_the_ops  # noqa: F401

SEED = "dropout_seed"
"""Name of the seed's node."""

_DROPOUT = torch.ops.autoparallel_fp8.dropout.default
_STEP_SEED = torch.ops.autoparallel_fp8.step_seed.default
_CALL = 3  # position of the call's number among the op's arguments
_ARGS: dict[Any, tuple[str, ...]] = {
    F.dropout: ("input", "p", "training", "inplace"),
    torch.dropout: ("input", "p", "train"),
    torch.dropout_: ("input", "p", "train"),
}
_DEFAULTS = {"p": 0.5, "training": True, "inplace": False}


def replace_dropout(root: fx.GraphModule) -> None:
    """Dropout calls that draw numbers, in a dynamo graph and its subgraphs, as calls of our op, in place.

    Outside of training, or with p = 0, a call is left: torch traces it as nothing. So is one in a subgraph that is run
    more than once, whose runs would share a number.
    """
    readers = Counter(node.target for node in root.graph.nodes if node.op == "get_attr")
    numbers = itertools.count()
    for name, module in root.named_modules():
        if isinstance(module, fx.GraphModule) and readers[name] <= 1:
            _replace_in(module.graph, numbers.__next__)


def _replace_in(graph: fx.Graph, next_number: Callable[[], int]) -> None:
    seed: fx.Node | None = None
    for node in list(graph.nodes):
        call = _dropout_call(node)
        if call is None:
            continue
        if seed is None:
            with graph.inserting_before(next(one for one in graph.nodes if one.op != "placeholder")):
                seed = graph.call_function(_STEP_SEED)
        with graph.inserting_before(node):
            new = graph.call_function(_DROPOUT, (call["input"], float(call["p"]), seed, next_number()))
            new.meta = dict(node.meta)
            if call["inplace"] and not _read_later(node, call["input"], new):
                new = graph.call_method("copy_", (call["input"], new))
                new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _read_later(node: fx.Node, changed: fx.Node, new: fx.Node) -> bool:
    """Lets whoever reads the tensor after an in-place call read the new value; False where a view or argument sees it.

    There the new value has to be written into the tensor, which leaves a copy and zeros in the joint graph.
    """
    x = changed.meta["example_value"]
    before = list(itertools.takewhile(lambda one: one is not new, node.graph.nodes))
    names = [one for one in before if one.meta.get("example_value") is x]  # in-place ops return what they change
    if any(one.op in ("placeholder", "get_attr") for one in names):
        return False
    if any(_shares_memory(one.meta.get("example_value"), x) for one in before if one not in names):
        return False
    earlier = {*before, new, node}
    for one in names:
        one.replace_all_uses_with(new, delete_user_cb=lambda user: user not in earlier)
    return True


def _shares_memory(value: Any, x: Tensor) -> bool:
    # torch has no public way to tell whether fake tensors share a storage (2.11 to 2.14).
    return isinstance(value, Tensor) and value.untyped_storage()._cdata == x.untyped_storage()._cdata


def _dropout_call(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of a dropout call that draws numbers, by `F.dropout`'s names; None for any other node."""
    if node.op != "call_function" or node.target not in _ARGS:
        return None
    call = {**_DEFAULTS, **dict(zip(_ARGS[node.target], node.args, strict=False)), **node.kwargs}
    call["training"] = call.pop("train", call["training"])
    call["inplace"] = call["inplace"] or node.target is torch.dropout_
    return call if call["training"] and call["p"] else None


def seed_as_source(graph: Graph) -> Graph:
    """The graph with one node of kind "seed", after the inputs, in place of the ops that stand for the seed."""
    stand_ins = {i for i, node in enumerate(graph.nodes) if node.op is _STEP_SEED}
    if not stand_ins:
        return graph
    at = next(i for i, node in enumerate(graph.nodes) if node.kind == "op")
    kept = [i for i in range(len(graph.nodes)) if i not in stand_ins]
    moved = {old: new + (old >= at) for new, old in enumerate(kept)} | dict.fromkeys(stand_ins, at)

    def to(ref: Ref) -> Ref:
        return Ref(moved[ref.node], ref.output)

    nodes = [replace(node, args=map_refs(node.args, to), kwargs=map_refs(node.kwargs, to)) for node in graph.nodes]
    nodes = [nodes[i] for i in kept]
    nodes.insert(at, Node(SEED, "seed", None, (), (), graph.nodes[min(stand_ins)].outputs, "forward", SEED))
    outputs = tuple(replace(output, ref=to(output.ref)) for output in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


# ---- repeated blocks ----


def without_call(op: Any, args: Any) -> Any:
    """The arguments of an op without the number of the call, where it is dropout: equal in equal blocks."""
    return (*args[:_CALL], *args[_CALL + 1 :]) if op is _DROPOUT else args


def calls_per_block(pairs: Sequence[tuple[Node, Node]]) -> int | None:
    """How many calls one block makes, from equal nodes of two neighbours; None where they disagree."""
    steps = {twin.args[_CALL] - node.args[_CALL] for node, twin in pairs if node.op is _DROPOUT}
    if len(steps) > 1:
        return None
    return steps.pop() if steps else 0


def first_call(nodes: Iterable[Node]) -> float:
    """The lowest number of a call among the nodes; inf where none is one."""
    return min((node.args[_CALL] for node in nodes if node.op is _DROPOUT), default=math.inf)


def call_in_block(node: Node, blocks: int, per_block: int, first: float = -math.inf) -> Node:
    """The node as it is that many blocks further, where its call's number is `first` or higher."""
    if node.op is not _DROPOUT or node.args[_CALL] < first:
        return node
    args = (*node.args[:_CALL], node.args[_CALL] + blocks * per_block, *node.args[_CALL + 1 :])
    return replace(node, args=args)
