"""The captured model as plain data: one joint forward and backward graph.

`capture.py` makes it; every later stage reads it and nobody edits it. A node is an op on *global* tensors. A value is
one tensor result of a node (`Ref`). Parameters, buffers, inputs, tangents and the seed are nodes without an op. What
leaves the graph (results, gradients, new buffer values) stands in `Graph.outputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True)
class TensorSpec:
    """Shape, stride (in elements) and dtype of a global tensor; no device, no data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor of these is row-major and dense; the stride of a dim of size 1 says nothing."""
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and found != step:
            return False
        step *= size
    return True


ABSENT = TensorSpec((0,), (1,), torch.uint8)  # keeps the position of a result that an op left out


@dataclass(frozen=True, order=True)
class Ref:
    """One tensor result of a node: `graph.nodes[node].outputs[output]`."""

    node: int
    output: int = 0


@dataclass(frozen=True)
class Node:
    """One op, parameter, buffer, input, tangent or seed.

    Attributes:
        name: unique in the graph, stable for the same model.
        kind: "parameter", "buffer", "input", "tangent", "op" or "seed" (int64 [], of the step's random numbers).
        op: the overload that runs, for kind "op"; None otherwise.
        args, kwargs: as the op's schema has them, tensors replaced by `Ref`; devices are left out.
        outputs: one spec a tensor result, in order; `ABSENT` where the op returns None in place of a tensor.
        phase: "forward" or "backward".
        target: fqn of the parameter or buffer, name of the input; "" for ops.
        module: fqn of the module whose code made the op; "" where unknown.
        layer: the part of `module` up to its first number ("model.layers.3"), "" where there is none.
        from_parameters: the value depends on parameters (and constants) alone.
    """

    name: str
    kind: str
    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorSpec, ...]
    phase: str
    target: str = ""
    module: str = ""
    layer: str = ""
    from_parameters: bool = False

    @property
    def op_name(self) -> str:
        """`aten.mm.default` for ops, the kind otherwise."""
        return str(self.op) if self.kind == "op" else self.kind

    @property
    def module_of_target(self) -> str:
        """The module that a parameter or buffer belongs to."""
        return self.target.rpartition(".")[0]

    def reads(self) -> Iterator[Ref]:
        """Every value the node reads, in argument order, repeats included."""
        return iter(self._reads)

    @cached_property
    def _reads(self) -> tuple[Ref, ...]:
        return (*refs_in(self.args), *refs_in(tuple(value for _, value in self.kwargs)))


@dataclass(frozen=True)
class Output:
    """A value that leaves the graph: kind "output" (a result), "gradient" or "buffer" (new value of a mutated one)."""

    kind: str
    ref: Ref
    target: str


@dataclass(frozen=True)
class Result:
    """Stands for a tensor in `Graph.returns`: `graph.outputs[index]`."""

    index: int


@dataclass(frozen=True)
class Graph:
    """Nodes in execution order, forward before backward, and what leaves the graph.

    Attributes:
        nodes: topologically sorted.
        outputs: results, then gradients, then buffers.
        skipped: fqn of every linear that the recipe left alone, with the reason.
        notes: sentences about the capture that the user should read.
        aliases: (alias, kept) for every parameter or buffer that is registered under several fqns; only the kept one
            has a node.
        returns: what the model's forward returns, each tensor replaced by the `Result` that finds it.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    returns: Any = None

    def spec(self, ref: Ref) -> TensorSpec:
        return self.nodes[ref.node].outputs[ref.output]

    def readers(self) -> dict[Ref, list[int]]:
        """Value -> the nodes that read it, in order, a node once a read."""
        found: dict[Ref, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for ref in node.reads():
                found.setdefault(ref, []).append(index)
        return found


def refs_in(value: Any) -> Iterator[Ref]:
    """Every `Ref` inside nested tuples, in order."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from refs_in(item)


def map_refs(value: Any, function: Callable[[Ref], Any]) -> Any:
    """The same nested tuples with `function` applied to every `Ref`."""
    return map_items(value, Ref, function)


def map_items(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """The same nested tuples with `function` applied to everything of a type, in order."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, tuple):
        nested = (kind, tuple)
        return tuple([map_items(item, kind, function) if isinstance(item, nested) else item for item in value])
    return value
