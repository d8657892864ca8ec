"""Prices of everything a plan may choose: each option of each variable, each redistribution on each link, and bytes.

In: the `Space` and the `Structure` made of it, device, topology. Out: cost vectors and link tables as `formulate` takes
them, and the memory that every option of a parameter or a kept activation holds. No solver here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from autoparallel_fp8.expansion import Space
from autoparallel_fp8.graph import Ref, TensorSpec
from autoparallel_fp8.layout import Factors, Layout, local_shape
from autoparallel_fp8.products import local_specs
from autoparallel_fp8.reach import Reach
from autoparallel_fp8.redistribute import Routes, Step
from autoparallel_fp8.structure import Link, Structure

from .collectives import collective_us
from .compute import memory_us, op_us
from .device import DeviceProfile
from .fusion import Fusion, Traffic, fuse
from .links import Topology, group_link

Array = npt.NDArray[np.float64]


TIE_BREAK_US = 1e-5


@dataclass(frozen=True)
class Optimizer:
    """What the optimizer keeps and moves for one parameter element.

    Attributes:
        state_bytes: kept between steps; None for AdamW's two moments in the parameter's dtype.
    """

    state_bytes: float | None = None

    def bytes_per_element(self, dtype: torch.dtype) -> float:
        return 2.0 * dtype.itemsize if self.state_bytes is None else self.state_bytes


@dataclass
class Pricing:
    """Prices of one space on one device; keeps what it has worked out.

    Attributes:
        space, shape: options and variables.
        device, topology: rates and how ranks lie on nodes.
        optimizer: state and update traffic.
        hidden_share: what a hideable collective still costs of its time; None for the device's.
        emulate: float8 GEMMs without a kernel are priced as bfloat16 ones.
    """

    space: Space
    shape: Structure
    device: DeviceProfile
    topology: Topology = field(default_factory=Topology)
    optimizer: Optimizer = field(default_factory=Optimizer)
    hidden_share: float | None = None
    emulate: bool = False

    def __post_init__(self) -> None:
        self.fusion: Fusion = fuse(self.space.graph)
        self._routes: dict[tuple[TensorSpec, Factors, Reach, int], Routes] = {}
        self._together = _reduced_together(self.space)
        self._costs: dict[object, Array] = {}
        self._layouts: dict[tuple[Layout, ...], int] = {}
        self._by_id: dict[int, tuple[tuple[Layout, ...], int]] = {}

    @property
    def share(self) -> float:
        return self.device.hidden_share if self.hidden_share is None else self.hidden_share

    # ---- options ----

    def costs(self) -> list[Array]:
        """Microseconds of each option of each variable, in the structure's order."""
        return [self._variable_costs(v) for v in range(len(self.shape.variables))]

    def waiting_costs(self) -> list[Array]:
        """The same without compute: what a step costs that waits for communication (`overlap.py`)."""
        nodes = self.space.graph.nodes
        zeros: dict[int, Array] = {}
        found = []
        for v, variable in enumerate(self.shape.variables):
            is_op = variable.role == "node" and nodes[variable.node].kind == "op"
            count = self.shape.num_options(v)
            found.append(zeros.setdefault(count, np.zeros(count)) if is_op else self._variable_costs(v))
        return found

    def _variable_costs(self, v: int) -> Array:
        variable = self.shape.variables[v]
        count = self.shape.num_options(v)
        node = self.space.graph.nodes[variable.node]
        if variable.role != "node" or node.kind not in ("op", "parameter"):
            key: object = ("zero", count)
            make: Callable[[], Array] = lambda: np.zeros(count)  # noqa: E731
        elif node.kind == "parameter":
            has_gradient = any(o.kind == "gradient" and o.target == node.target for o in self.space.graph.outputs)
            key = ("parameter", self.space.kind_of[variable.node], has_gradient)
            make = lambda: self._tie_breaks(count) + (self._parameter_costs(variable.node) if has_gradient else 0.0)  # noqa: E731
        else:
            traffic = self.fusion.traffic[variable.node]
            key = ("op", self.space.kind_of[variable.node], traffic)
            make = lambda: self._op_costs(variable.node, traffic)  # noqa: E731
        if key not in self._costs:
            self._costs[key] = make()
        return self._costs[key]

    def _op_costs(self, node: int, traffic: Traffic) -> Array:
        kind = self.space.kind(node)
        sizes = self.space.mesh.sizes
        found = []
        for option in kind.options:
            operands = local_specs(kind.call.tensors, kind.operand_factors, option.operands, sizes)
            results = local_specs(kind.call.out, kind.result_factors, option.results, sizes)
            found.append(op_us(kind.call, traffic, operands, results, self.device, emulate=self.emulate))
        return np.array(found)

    def _parameter_costs(self, node: int) -> Array:
        """The optimizer's update: parameter and state read and written, gradient read."""
        spec = self.space.graph.nodes[node].outputs[0]
        per_element = 3.0 * spec.dtype.itemsize + 2.0 * self.optimizer.bytes_per_element(spec.dtype)
        return np.array([memory_us(n * per_element, self.device) for n in self._local_numels(node)])

    def _tie_breaks(self, count: int) -> Array:
        """Next to nothing for each option, growing, so that equal layers break ties alike: for the earlier option."""
        return np.arange(count, dtype=np.float64) * TIE_BREAK_US

    def _local_numels(self, node: int, output: int = 0) -> list[int]:
        kind, spec = self.space.kind(node), self.space.graph.nodes[node].outputs[output]
        return [
            _numel(spec, kind.result_factors[output], option.results[output], self.space.mesh.sizes)
            for option in kind.options
        ]

    # ---- links ----

    def waiting_table(
        self, link: Link, starts: tuple[Layout, ...], ends: tuple[Layout, ...]
    ) -> tuple[object, Callable[[], Array]]:
        """As `table`, with hideable collectives at their full time."""
        return self.table(link, starts, ends, share=1.0)

    def table(
        self, link: Link, starts: tuple[Layout, ...], ends: tuple[Layout, ...], share: float | None = None
    ) -> tuple[object, Callable[[], Array]]:
        """A key that equal tables share, and how to make the table, for `formulate`.

        Args:
            link: what moves.
            starts, ends: layouts, one an option of either end.
            share: of its time that a hideable collective costs; None for the device's.
        """
        share = self.share if share is None else share
        spec, factors = self.space.graph.spec(link.ref), self.space.factors[link.ref]
        unwritten = link.ref in self.fusion.unwritten
        reach = (self.space.reach[link.ref], self._together.get(link.ref, 1))
        flags = (link.is_hideable, link.is_tie, link.keeps_partial, unwritten)
        key = (spec, factors, reach, self._number(starts), self._number(ends), flags)
        return key, lambda: self._make_table(spec, factors, starts, ends, link, unwritten, share)

    def _number(self, layouts: tuple[Layout, ...]) -> int:
        known = self._by_id.get(id(layouts))
        if known is None:
            known = (layouts, self._layouts.setdefault(layouts, len(self._layouts)))
            self._by_id[id(layouts)] = known
        return known[1]

    def _make_table(
        self,
        spec: TensorSpec,
        factors: Factors,
        starts: tuple[Layout, ...],
        ends: tuple[Layout, ...],
        link: Link,
        unwritten: bool,
        share: float,
    ) -> Array:
        table = np.full((len(starts), len(ends)), np.inf)
        positions: dict[Layout, list[int]] = {}
        for j, layout in enumerate(ends):
            positions.setdefault(layout, []).append(j)
        for i, layout in enumerate(starts):
            table[i, positions.get(layout, [])] = 0.0
        if link.is_tie:
            return table
        routes = self.routes(link.ref)
        index = routes.layouts.index
        rows = [i for i, layout in enumerate(starts) if layout in index]
        columns = [j for j, layout in enumerate(ends) if layout in index]
        cost = routes.cost_us[np.ix_([index[starts[i]] for i in rows], [index[ends[j]] for j in columns])]
        cost = cost * (share if link.is_hideable else 1.0)
        if unwritten:
            cost = np.where(cost > 0, cost + self._spill_us(spec, factors, starts, ends, rows, columns), 0.0)
        if link.keeps_partial:
            reduced = [[_reduces(starts[i], ends[j]) for j in columns] for i in rows]
            cost = np.where(np.array(reduced), np.inf, cost)
        table[np.ix_(rows, columns)] = cost
        return table

    def _spill_us(
        self,
        spec: TensorSpec,
        factors: Factors,
        starts: tuple[Layout, ...],
        ends: tuple[Layout, ...],
        rows: list[int],
        columns: list[int],
    ) -> Array:
        """A value that would have stayed in registers is written before it moves and read after."""
        sizes, width = self.space.mesh.sizes, spec.dtype.itemsize
        out = np.array([memory_us(_numel(spec, factors, starts[i], sizes) * width, self.device) for i in rows])
        back = np.array([memory_us(_numel(spec, factors, ends[j], sizes) * width, self.device) for j in columns])
        return out[:, None] + back[None, :]

    def routes(self, ref: Ref) -> Routes:
        """Cheapest redistributions of a value, worked out once for each spec, factors and reach."""
        together = self._together.get(ref, 1)
        key = (self.space.graph.spec(ref), self.space.factors[ref], self.space.reach[ref], together)
        if key not in self._routes:
            self._routes[key] = Routes(*key[:3], self.space.mesh.sizes, partial(self._step_us, together=together))
        return self._routes[key]

    def _step_us(self, step: Step, spec: TensorSpec, *, together: int) -> float:
        """Time of one step: the collective, and copies around it where the split dim is not outermost in memory.

        Args:
            together: how many equal small reductions go as one; each bears its share.
        """
        names = self.space.mesh.names
        if step.kind == "slice":
            return memory_us(2.0 * step.num_bytes, self.device)
        group = group_link(self.space.mesh, tuple(names[a] for a in step.axes), self.device, self.topology)
        us = collective_us(step.kind, step.num_bytes * together, group) / together
        old, new = step.source[step.axes[0]], step.target[step.axes[0]]
        if step.kind == "all_gather" and not _is_outermost(spec, old.dim):
            us += memory_us(2.0 * step.num_bytes, self.device)
        if step.kind == "reduce_scatter" and not _is_outermost(spec, new.dim):
            us += memory_us(2.0 * step.num_bytes, self.device)
        if step.kind == "all_to_all":
            us += memory_us(4.0 * step.num_bytes / group.ranks, self.device)
        return us

    # ---- memory ----

    def parameter_bytes(self, node: int) -> dict[str, Array]:
        """Bytes on one rank of each option of a parameter: "parameters", "gradients", "optimizer"."""
        graph = self.space.graph
        spec, target = graph.nodes[node].outputs[0], graph.nodes[node].target
        numels = np.array(self._local_numels(node), dtype=float)
        gradients = [graph.spec(o.ref) for o in graph.outputs if o.kind == "gradient" and o.target == target]
        state = self.optimizer.bytes_per_element(spec.dtype) if gradients else 0.0
        return {
            "parameters": numels * spec.dtype.itemsize,
            "gradients": numels * (gradients[0].dtype.itemsize if gradients else 0),
            "optimizer": numels * state,
        }

    def kept_bytes(self, ref: Ref) -> Array:
        """Bytes on one rank of a value kept for backward (`fusion.kept`), for each option of the node that makes it."""
        itemsize = self.space.graph.spec(ref).dtype.itemsize
        return np.array(self._local_numels(ref.node, ref.output), dtype=float) * itemsize


def _reduced_together(space: Space) -> dict[Ref, int]:
    """Maxima of weights -> how many of one layer and phase there are: their small reductions run, and cost, as one."""
    groups: dict[tuple[str, str], list[Ref]] = {}
    for i, node in enumerate(space.graph.nodes):
        begins = "M" in space.reach[Ref(i)].partials and not any("M" in space.reach[r].partials for r in node.reads())
        if node.from_parameters and node.kind == "op" and begins:
            groups.setdefault((node.layer, node.phase), []).append(Ref(i))
    return {ref: len(refs) for refs in groups.values() for ref in refs}


def _reduces(start: Layout, end: Layout) -> bool:
    return any(a.kind == "P" and b.kind != "P" for a, b in zip(start, end, strict=True))


def _numel(spec: TensorSpec, factors: Factors, layout: Layout, sizes: tuple[int, ...]) -> int:
    count = 1
    for size in local_shape(spec.shape, factors, layout, sizes):
        count *= size
    return count


def _is_outermost(spec: TensorSpec, dim: int) -> bool:
    """Whether no dim of the tensor with more than one element lies outside `dim` in memory."""
    return all(spec.shape[d] == 1 or spec.stride[d] <= spec.stride[dim] for d in range(len(spec.shape)) if d != dim)
