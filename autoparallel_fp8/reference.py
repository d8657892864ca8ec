"""The unsharded graph on one device, quantised with the scale scopes of a plan: what `verify` holds a plan against.

Where the plan lets every rank keep a maximum of its own, one device has one scale a part: the maximum of each part is
spread over the part, so that scale arithmetic works element by element on tensors of the data's own shape, and what is
multiplied by it carries it along through casts and moves. A scaled GEMM then multiplies data over scale, which is what
ranks get who each undo their own scaling. No rule, no collective and no layout but the places of scales is used here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from .expansion import Space
from .graph import ABSENT, Node, Ref, map_refs
from .layout import Layout, R
from .ops.stand_ins import stand_in
from .parts import coordinates, parts
from .products import Option
from .simulate import given_values

aten = torch.ops.aten

_MOVES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.expand.default, aten.clone.default, aten.alias.default, aten.detach.default,
}  # fmt: skip


@dataclass(frozen=True)
class Scaled:
    """Data that was multiplied by scales of parts; `scale` has the data's shape."""

    data: Tensor
    scale: Tensor


def run_reference(
    space: Space,
    choices: Sequence[int],
    parameters: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor] | None = None,
    *,
    seed: int = 0,
) -> dict[str, dict[str, Tensor]]:
    """Results, gradients and new buffer values, as `simulate.run_graph` gives them.

    Args:
        space: options; those chosen say where a maximum is each rank's own.
        choices: the option of every variable.
        parameters: parameters and buffers by fqn, whole.
        inputs: one tensor for each input node, in order, whole.
        tangents: one for each tangent node; ones by default.
        seed: of the step's dropout, where the graph has some.

    Raises:
        UsageError: a parameter, buffer, input or tangent is missing.
    """
    run = _Reference(space, choices)
    with torch.no_grad():
        return run.everything(parameters, inputs, tangents, seed)


class _Reference:
    """The values of the graph, each kept until it was read for the last time.

    Attributes:
        values: of every result: a tensor, a scale spread over its parts, or `Scaled` data.
        spread: results that are such scales.
        undone: products whose scaling by parts is undone already, which the graph undoes only later.
        left: of a product of scales that undoes it later, the scale among them that is one for all parts.
    """

    def __init__(self, space: Space, choices: Sequence[int]) -> None:
        self.space, self.choices = space, choices
        self.values: dict[Ref, Any] = {}
        self.spread: set[Ref] = set()
        self.undone: set[Ref] = set()
        self.left: dict[Ref, Tensor] = {}
        self.last: dict[Ref, int] = {ref: uses[-1] for ref, uses in space.graph.readers().items()}

    def everything(
        self, parameters: Mapping[str, Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor] | None, seed: int
    ) -> dict[str, dict[str, Tensor]]:
        graph = self.space.graph
        given = given_values(graph, parameters, inputs, tangents, seed)
        leaving = {output.ref for output in graph.outputs}
        for i, node in enumerate(graph.nodes):
            if node.kind == "op":
                self._op(i, node)
                for ref in node.reads():
                    if self.last[ref] == i and ref not in leaving:
                        self.values.pop(ref, None)
            else:
                self.values[Ref(i)] = given[i]
        found: dict[str, dict[str, Tensor]] = {"output": {}, "gradient": {}, "buffer": {}}
        for output in graph.outputs:
            found[output.kind][output.target] = self.values[output.ref]
        return found

    def _op(self, i: int, node: Node) -> None:
        option = self.space.kind(i).options[self.choices[i]]
        reads = list(node.reads())
        made_here = self._is_scale(i)
        takes = any(ref in self.spread or isinstance(self.values[ref], Scaled) for ref in reads)
        if made_here and not any(p.kind == "V" for layout in option.operands for p in layout):
            self.values[Ref(i)] = self._maximum(i, node, option)
            self.spread.add(Ref(i))
        elif not takes and not any(ref in self.undone for ref in reads):
            self._plain(i, node)
        elif self.space.signatures[i] is not None and self.space.signatures[i].scaled:  # type: ignore[union-attr]
            self._gemm(i, node, option)
        else:
            self._pass(i, node, reads)

    def _plain(self, i: int, node: Node) -> None:
        args, kwargs = (map_refs(x, lambda ref: self.values[ref]) for x in (node.args, node.kwargs))
        made = stand_in(node.op)(*args, **dict(kwargs))
        for k, value in enumerate(made if isinstance(made, (tuple, list)) else (made,)):
            if node.outputs[k] is not ABSENT:
                self.values[Ref(i, k)] = value

    def _maximum(self, i: int, node: Node, option: Option) -> Tensor:
        """The maximum of every part, spread over the part."""
        (ref,) = node.reads()
        x = self.values[ref]
        sizes, factors = self.space.mesh.sizes, self.space.factors[ref]
        axes = [a for a, p in enumerate(option.results[0]) if p.kind == "V"]
        layout: Layout = tuple(p if a in axes else R for a, p in enumerate(option.operands[0]))
        made = torch.empty_like(x)
        rest = {name: value for name, value in _named(node).items() if name != "keepdim"}
        for coordinate in coordinates(sizes):
            if any(c for a, c in enumerate(coordinate) if a not in axes):
                continue
            where = torch.meshgrid(
                *(
                    torch.tensor(p.positions() if p.factors else range(n))
                    for p, n in zip(parts(factors, layout, sizes, coordinate), x.shape, strict=True)
                ),
                indexing="ij",
            )
            part = x[where]
            dims = rest.get("dim")
            dims = list(dims) if isinstance(dims, tuple) and dims else list(range(x.ndim))
            made[where] = part.amax(dims, keepdim=True).expand(part.shape)
        return made

    def _pass(self, i: int, node: Node, reads: list[Ref]) -> None:
        """Scale arithmetic, the scaling of data, moves of scaled data, and the undoing that a GEMM did already."""
        undone = [ref for ref in reads if ref in self.undone]
        if undone:
            rest = [self.left[ref] for ref in reads if ref in self.left]
            self.values[Ref(i)] = prod(rest, start=self.values[undone[0]]).to(node.outputs[0].dtype)
            return
        carried = [ref for ref in reads if isinstance(self.values[ref], Scaled)]
        if carried:
            self.values[Ref(i)] = Scaled(self._call(node, "data"), self._moved(node, carried[0]))
            return
        if len(reads) == 1 or all(ref in self.spread for ref in reads) or self._is_scale(i):
            self.values[Ref(i)] = self._scale(node, reads)
            self.spread.add(Ref(i))
            if len(reads) > 1 and any(ref in self.spread for ref in reads):
                self.left.update({Ref(i): self.values[ref] for ref in reads if ref not in self.spread})
            return
        (scale,) = [ref for ref in reads if ref in self.spread]
        self.values[Ref(i)] = Scaled(self._call(node, "data"), self.values[scale])

    def _scale(self, node: Node, reads: list[Ref]) -> Tensor | None:
        """A scale made of scales; None for a product with another tensor's, which a GEMM has undone before."""
        values = [self.values[ref] for ref in reads]
        shapes = {tuple(value.shape) for value in values if value is not None and value.numel() > 1}
        if any(value is None for value in values) or len(shapes) > 1:
            return None
        return (values[0] if node.op in _MOVES else self._call(node, "data")).to(node.outputs[0].dtype)

    def _is_scale(self, i: int) -> bool:
        """Whether the result is a scale still, and not data."""
        option = self.space.kind(i).options[self.choices[i]]
        return any(p.kind == "V" for p in option.results[0])

    def _call(self, node: Node, what: str) -> Tensor:
        def value(ref: Ref) -> Any:
            held = self.values[ref]
            return getattr(held, what) if isinstance(held, Scaled) else held

        args, kwargs = (map_refs(x, value) for x in (node.args, node.kwargs))
        made: Tensor = node.op(*args, **dict(kwargs))
        return made

    def _moved(self, node: Node, carried: Ref) -> Tensor:
        """The scale beside data that an op casts, clamps or moves."""
        held = self.values[carried]
        if node.op not in _MOVES:
            return held.scale
        return self._call(node, "scale")

    def _gemm(self, i: int, node: Node, option: Option) -> None:
        """Data over scale, multiplied in float64."""
        named = _named(node)
        signature = self.space.signatures[i]
        assert signature is not None
        reads = list(node.reads())
        wide: list[Tensor] = []
        is_unscaled = any(p.kind == "Q" for p in option.results[0])
        for data, scale in signature.scaled:
            held = self.values[reads[data]]
            if isinstance(held, Scaled):
                wide.append(held.data.to(torch.float64) / held.scale.to(torch.float64))
            else:
                factor = self.values[reads[scale]]
                wide.append(held.to(torch.float64) * factor.to(torch.float64))
        product = torch.mm(*wide)
        bias = named.get("bias")
        if isinstance(bias, Ref):
            product = product + self.values[bias].to(torch.float64)
        self.values[Ref(i)] = product.to(node.outputs[0].dtype)
        if is_unscaled:
            self.undone.add(Ref(i))


def _named(node: Node) -> dict[str, Any]:
    names = [argument.name for argument in node.op._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **dict(node.kwargs)}
