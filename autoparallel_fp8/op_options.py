"""What a mesh may do to one op: `options("aten.mm", a, b, mesh="dp=2,tp=4")`, without a model around it.

In: an op, a call of it, a mesh and a device. Out: an `OpOptions` with every layout that the op's rule allows, those
that a kernel refuses with its sentence, and the splits that do not come out even. The way is the planner's own: the
call becomes a graph (`capture/one_op.py`), `expansion.py` multiplies the rule's rows out over the mesh.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .capture.one_op import capture_call, overload_of, without_iterators
from .capture.rewritten import rewritten_as
from .cost_models import DeviceProfile, load_device
from .expansion import Kind, LoneOp, expand_lone
from .graph import ABSENT, TensorSpec, dtype_name
from .layout import Layout, Placement, local_factors
from .mesh import Mesh, MeshAxis, parse_mesh
from .products import Option, Refusal, local_specs, products
from .rules import AxisRow, OwnScales, Signature, advice, find_rule
from .rules.op_names import find_op, require_rule
from .rules.plugins import load_plugins


@dataclass(frozen=True)
class LocalTensor:
    """A tensor under one option: its layout, and what a rank holds of it.

    Attributes:
        name: of the op's argument, `tensors[1]` for members of lists; "result", or "result0" where there are several.
        layout: a placement for each mesh axis; `placements` has them as text.
        shape, stride, dtype: of the local tensor.
    """

    name: str
    layout: Layout
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def placements(self) -> tuple[str, ...]:
        return tuple(map(str, self.layout))

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "placements": list(self.placements),
            "local_shape": list(self.shape),
            "local_stride": list(self.stride),
        }


@dataclass(frozen=True)
class OpOption:
    """One way to run the op on the mesh.

    Attributes:
        operands, results: as laid out.
        notes: of the row taken on each mesh axis, such as "split k".
        local: the program that a rank runs instead of the plain op; "" for the plain op.
    """

    operands: tuple[LocalTensor, ...]
    results: tuple[LocalTensor, ...]
    notes: tuple[str, ...]
    local: str = ""

    def __getitem__(self, name: str) -> LocalTensor:
        return _named(name, (*self.operands, *self.results))

    def to_dict(self) -> dict[str, Any]:
        return {**_sides(self), "rows": list(self.notes), "local": self.local}


@dataclass(frozen=True)
class RefusedOption:
    """A way that fits the mesh but not the kernel, and the sentence that says why."""

    operands: tuple[LocalTensor, ...]
    results: tuple[LocalTensor, ...]
    sentence: str

    def __getitem__(self, name: str) -> LocalTensor:
        return _named(name, (*self.operands, *self.results))

    def to_dict(self) -> dict[str, Any]:
        return {**_sides(self), "sentence": self.sentence}


@dataclass(frozen=True)
class UnevenSplit:
    """A row of the rule that these mesh axes, taken together, do not divide: no option has it on all of them.

    Attributes:
        note: of the row, such as "split m".
        axes: names of the mesh axes.
        sentence: the first tensor that does not divide, such as "self: dim 0 of size 6 does not divide over tp=4".
    """

    note: str
    axes: tuple[str, ...]
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        return {"row": self.note, "axes": list(self.axes), "sentence": self.sentence}


@dataclass(frozen=True)
class OpOptions:
    """Everything a mesh may do to one call of an op; prints as tables.

    Attributes:
        op: the overload.
        operands, results: name -> shape, stride and dtype of every tensor read and made, whole.
        mesh, device: what it was asked for.
        options: all-replicated first; empty where the kernel takes no layout of the call.
        refused: what a constraint of the kernel removed.
        uneven: what does not divide; the smallest sets of axes only.
        advice: what helps where the kernel refuses the call even unsplit; "" where it does not.
    """

    op: Any
    operands: Mapping[str, TensorSpec]
    results: Mapping[str, TensorSpec]
    mesh: Mesh
    device: str
    options: tuple[OpOption, ...]
    refused: tuple[RefusedOption, ...]
    uneven: tuple[UnevenSplit, ...]
    advice: str = ""

    def __str__(self) -> str:
        from .report.options import format_options  # a view of this data, imported when asked for

        return format_options(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "op": str(self.op)}  # torch's overloads do not pickle

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "op": find_op(state["op"])})

    def to_dict(self) -> dict[str, Any]:
        """Plain data in a stable order."""
        return {
            "op": str(self.op),
            "operands": [{"name": name, **_spec_dict(spec)} for name, spec in self.operands.items()],
            "results": [{"name": name, **_spec_dict(spec)} for name, spec in self.results.items()],
            "mesh": {axis.name: axis.size for axis in self.mesh.axes},
            "device": self.device,
            "options": [option.to_dict() for option in self.options],
            "refused": [option.to_dict() for option in self.refused],
            "uneven": [split.to_dict() for split in self.uneven],
            "advice": self.advice,
        }

    def to_json(self) -> str:
        """The text of `to_dict`; the same call gives the same bytes."""
        return json.dumps(self.to_dict(), indent=1) + "\n"


def options(op: Any, /, *args: Any, mesh: Any, device: str | DeviceProfile = "H100", **kwargs: Any) -> OpOptions:
    """Every way to run one op on a mesh, and what kernels refuse.

    >>> import torch
    >>> a, b = torch.empty(6, 32, device="meta"), torch.empty(32, 64, device="meta")
    >>> found = options("aten.mm", a, b, mesh="tp=4")
    >>> for option in found.options[:3]:
    ...     print(option["self"].placements, option["mat2"].placements, option["result"].placements)
    ('R',) ('R',) ('R',)
    ('S(1)',) ('S(0)',) ('P(sum)',)
    ('R',) ('S(1)',) ('S(1)',)
    >>> found.uneven[0].sentence
    'self: dim 0 of size 6 does not divide over tp=4'

    Args:
        op: an overload, a packet (its overload follows from the arguments), or a name: "aten.mm.default", "aten.mm",
            "_scaled_mm".
        args, kwargs: as the op is called, with tensors of *global* shapes. Real, meta and fake ones do alike: nothing
            but shape, stride and dtype is read. `mesh` and `device` are this function's, never the op's: where an op's
            tensors live says nothing about their splits, so its own `device` is left out, and an argument that is
            called `mesh` is passed by position.
        mesh: a torch DeviceMesh, or "dp=2,tp=4", or {"dp": 2, "tp": 4}.
        device: a profile's name or a `DeviceProfile`, for the kernels' constraints.

    A scale of each rank's own (`Own(1)`: of the part that a split of dim 1 gives it) and data frozen under it
    (`Frozen(1)`) are among the options of scaled GEMMs and of the maxima that make such scales. Whether a plan may use
    them depends on the ops between the two.

    Raises:
        UsageError: no such op, or it does not take these arguments; the mesh or the device is none.
        RuleError: the op has no rule, or its rule does not fit the call.
    """
    found_mesh, profile = parse_mesh(mesh), load_device(device)
    load_plugins()
    found = find_op(op)
    args, kwargs = tuple(map(without_iterators, args)), {name: without_iterators(v) for name, v in kwargs.items()}
    overload = found if isinstance(found, torch._ops.OpOverload) else overload_of(found, args, kwargs)
    if find_rule(overload) is None:
        require_rule(overload, rewritten_as(overload, args, kwargs))
    graph = capture_call(overload, args, kwargs)
    lone = expand_lone(graph, found_mesh, architecture=profile.architecture, own_scales=own_places)
    return _described(lone, found_mesh, profile)


def own_places(signature: Signature) -> OwnScales | None:
    """Where a lone op may meet each rank's own scales: the data of a scaled GEMM wherever it splits, with its scale.

    The scale counts as taken of the data as the op reads it. None for ops that neither use nor make such scales.
    """
    if not signature.scaled and not signature.makes_own:
        return None
    operands: list[tuple[Any, ...]] = [()] * len(signature.operands)
    for data, scale in signature.scaled:
        places = [(d, f) for d, dim in enumerate(signature.operands[data]) for f in range(len(dim))]
        operands[data] = tuple((place, place) for place in places)
        operands[scale] = tuple((None, place) for place in places)
    return OwnScales(tuple(operands))


# ---- from the planner's own terms to the answer --------------------------------------------------------------------


def _described(lone: LoneOp, mesh: Mesh, profile: DeviceProfile) -> OpOptions:
    kind = lone.kind
    reads = kind.call.operand_names()
    count = len(kind.call.out)
    makes = tuple(f"result{k}" if count > 1 else "result" for k in range(count))

    def laid_out(option: Option | Refusal) -> tuple[tuple[LocalTensor, ...], tuple[LocalTensor, ...]]:
        operands = _local(reads, kind.call.tensors, kind.operand_factors, option.operands, mesh)
        return operands, _local(makes, kind.call.out, kind.result_factors, option.results, mesh)

    def described(option: Option) -> OpOption:
        notes = tuple(row.note for row in option.rows)
        local = next((row.local for row in option.rows if row.local), "")
        return OpOption(*laid_out(option), notes, local)

    return OpOptions(
        kind.call.op,
        dict(zip(reads, kind.call.tensors, strict=True)),
        {name: spec for name, spec in zip(makes, kind.call.out, strict=True) if spec is not ABSENT},
        mesh,
        profile.name,
        tuple(map(described, kind.options)),
        tuple(RefusedOption(*laid_out(option), option.sentence) for option in kind.refused),
        tuple(_uneven(lone, reads + makes, mesh)),
        "; ".join(advice(kind.call.op, kind.call.tensors, profile.architecture, kind.call)),
    )


def _local(
    names: Sequence[str], specs: tuple[TensorSpec, ...], factors: Any, layouts: tuple[Layout, ...], mesh: Mesh
) -> tuple[LocalTensor, ...]:
    local = local_specs(specs, factors, layouts, mesh.sizes)
    return tuple(
        LocalTensor(name, layout, spec.shape, spec.stride, spec.dtype)
        for name, layout, spec, whole in zip(names, layouts, local, specs, strict=True)
        if whole is not ABSENT
    )


def _uneven(lone: LoneOp, names: tuple[str, ...], mesh: Mesh) -> Iterator[UnevenSplit]:
    """Rows that the smallest sets of axes do not divide: a set is left out where a part of it fails already."""
    plain = {row.atom: row for row in reversed(lone.rows) if row.atom and not row.is_finer}
    finer = {row.atom: row for row in lone.rows if row.is_finer}
    axes = [axis for axis in mesh.axes if axis.size > 1]
    kind = lone.kind
    for atom in lone.signature.sizes:
        failed: list[set[MeshAxis]] = []
        for together in (c for n in range(1, len(axes) + 1) for c in itertools.combinations(axes, n)):
            if atom not in plain or any(smaller <= set(together) for smaller in failed):
                continue
            row, sizes = plain[atom], tuple(axis.size for axis in together)
            every = (row,) * len(sizes)
            ways = [(row,), *([(finer[atom],)] if atom in finer else [])]
            if not any(_fits(lone, way, sizes) for way in ways):
                failed.append(set(together))
                yield UnevenSplit(row.note, tuple(a.name for a in together), _why(kind, names, every, together))


def _fits(lone: LoneOp, rows: tuple[AxisRow, ...], sizes: tuple[int, ...]) -> bool:
    found = products(lone.signature, rows, lone.kind.operand_factors, lone.kind.result_factors, sizes)
    return next(found, None) is not None


def _why(kind: Kind, names: tuple[str, ...], rows: Sequence[Any], axes: tuple[MeshAxis, ...]) -> str:
    """The first tensor that does not divide, its dim and size; or that the split runs on where it may not."""
    over = " and ".join(map(str, axes)) + (" together" if len(axes) > 1 else "")
    placed: tuple[Placement, ...] = (*rows[0].operands, *rows[0].results)
    specs, factors = (*kind.call.tensors, *kind.call.out), (*kind.operand_factors, *kind.result_factors)
    split = [k for k, placement in enumerate(placed) if placement.kind == "S"]
    sizes = tuple(axis.size for axis in axes)
    uneven = [k for k in split if local_factors(factors[k], (placed[k],) * len(axes), sizes) is None]
    k = (uneven or split)[0]
    dim, factor = placed[k].dim, placed[k].factor
    size, parts = specs[k].shape[dim], factors[k][dim]
    where = f"{names[k]}: dim {dim} of size {size}"
    if len(parts) > 1:
        where = f"{names[k]}: factor {factor} of dim {dim} ({size} = {' x '.join(map(str, parts))})"
    return f"{where} does not divide over {over}" + ("" if uneven else " in the same way in every tensor")


def _named(name: str, tensors: Sequence[LocalTensor]) -> LocalTensor:
    found = {tensor.name: tensor for tensor in tensors}
    if name not in found:
        raise KeyError(f"{name!r}: the op's tensors are {', '.join(found)}")
    return found[name]


def _sides(option: OpOption | RefusedOption) -> dict[str, Any]:
    return {
        "operands": [tensor.to_dict() for tensor in option.operands],
        "results": [tensor.to_dict() for tensor in option.results],
    }


def _spec_dict(spec: TensorSpec) -> dict[str, Any]:
    return {"shape": list(spec.shape), "stride": list(spec.stride), "dtype": dtype_name(spec.dtype)}
