"""Data parallelism of a plan as calls of `fully_shard` and `replicate`: which modules, over which axes.

Every axis but the tensor parallel one feeds other tokens to its ranks. A unit is a module whose parameters are gathered
and reduced together: each layer, a block inside it (attention, MLP) that the plan splits over other axes than the rest,
embedding and head, and the model itself for what is left. A unit is split as most elements of its matrices are; what
deviates inside it goes along, and `placed` says how it then lies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .plan import Plan
from .plan_reading import Reading, layer_of, size_of
from .tensor_styles import TensorStyles

_GATHERED = re.compile(r"gathered in (\w+) over (.+?)(?: \(([^()]*)\))?")


@dataclass(frozen=True)
class Unit:
    """One call of `fully_shard`, or of `replicate` where nothing is split.

    Attributes:
        module: its name; "" for the model.
        split, whole: the data axes over which its parameters are split and repeated.
        reshard_after_forward: gathered again in backward.
    """

    module: str
    split: tuple[str, ...]
    whole: tuple[str, ...]
    reshard_after_forward: bool


@dataclass(frozen=True)
class Placed:
    """How a parameter lies here: `placements` and `split` as in a plan."""

    placements: tuple[str, ...]
    split: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Gathered:
    """A gather that a plan makes of a parameter: dtype that moves, axes, phases ("fwd", "bwd")."""

    dtype: str
    axes: tuple[str, ...]
    phases: tuple[str, ...]


@dataclass(frozen=True)
class ShardUnits:
    """All units, inner ones first.

    Attributes:
        axes: data axes with more than one rank.
        dims: parameter -> the dim that its unit splits, where this is not 0.
        ignored: scalar parameters, which `fully_shard` does not take.
        placed: parameter -> how it lies after tensor and data parallelism.
    """

    axes: tuple[str, ...]
    units: tuple[Unit, ...]
    dims: Mapping[str, int]
    ignored: tuple[str, ...]
    placed: Mapping[str, Placed]


def shard_units(plan: Plan, reading: Reading, tensor: TensorStyles) -> ShardUnits:
    """The units of a plan and where they put its parameters."""
    axes = tuple(name for name, size in plan.mesh.items() if size > 1 and name != tensor.axis)
    ignored = tuple(name for name, p in plan.parameters.items() if not p.shape) if axes else ()
    names = [name for name in plan.parameters if name not in ignored]
    modules = dict(_modules(plan, reading, axes, names)) if axes else {}
    units = tuple(Unit(module, *chosen, _is_gathered_again(plan, names_of, axes))
                  for module, (chosen, names_of) in modules.items())  # fmt: skip
    dims: dict[str, int] = {}
    placed = {}
    split_over = {name: unit.split for unit in units for name in modules[unit.module][1]}
    for name in plan.parameters:
        over = split_over.get(name, ())
        dim = _dim(plan, name, over, tensor.dims.get(name), tensor.axis) if over else 0
        if dim:
            dims[name] = dim
        placed[name] = _placed(plan, over, dim, tensor.dims.get(name), tensor.axis)
    return ShardUnits(axes, units, dims, ignored, placed)


def gathers_of(plan: Plan, name: str) -> tuple[Gathered, ...]:
    """The gathers of a parameter, or of what is cast from it, that its plan lists."""
    found = (_GATHERED.fullmatch(part) for part in plan.parameters[name].why.split("; "))
    return tuple(Gathered(m[1], tuple(m[2].split("+")), tuple(m[3].split(", ")) if m[3] else ()) for m in found if m)


Chosen = tuple[tuple[str, ...], tuple[str, ...]]
"""Axes that split a unit's parameters, axes that repeat them."""


def _modules(
    plan: Plan, reading: Reading, axes: tuple[str, ...], names: Sequence[str]
) -> Iterator[tuple[str, tuple[Chosen, list[str]]]]:
    """Module of a unit -> its axes and parameters, inner ones before outer ones, the model last."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layer = layer_of(name)
        layers.setdefault(f"{layer[0]}.{layer[1]}".lstrip(".") if layer else "", []).append(name)
    rest = layers.pop("", [])
    for module, inside in layers.items():
        if module in plan.parameters:  # an entry of a ParameterList: nothing calls it
            rest += inside
            continue
        chosen = _chosen(plan, axes, inside)
        left = list(inside)
        for block, of_block in _blocks(module, inside).items():
            if _matrices(plan, of_block) and _chosen(plan, axes, of_block) != chosen:
                yield block, (_chosen(plan, axes, of_block), of_block)
                left = [name for name in left if name not in of_block]
        yield module, (chosen, left)
    is_tied = any(used.weight is None for used in reading.modules.values())
    if layers and not is_tied:
        for name in _matrices(plan, rest):
            module = name.rpartition(".")[0]
            if module in reading.modules:
                inside = [other for other in rest if other.rpartition(".")[0] == module]
                rest = [other for other in rest if other not in inside]
                yield module, (_chosen(plan, axes, inside), inside)
    chosen = _chosen(plan, axes, rest or names)
    if not chosen[0]:  # where anything is split, so is the model: layers fetch ahead under one root
        chosen = _chosen(plan, axes, names)
    yield "", (chosen, rest)


def _blocks(layer: str, names: Sequence[str]) -> dict[str, list[str]]:
    """The children of a layer that hold several modules with parameters."""
    found: dict[str, list[str]] = {}
    for name in names:
        child, inside, deeper = name.removeprefix(f"{layer}.").partition(".")
        if inside and "." in deeper:
            found.setdefault(f"{layer}.{child}", []).append(name)
    return {block: inside for block, inside in found.items() if not block.rpartition(".")[2].isdigit()}


def _matrices(plan: Plan, names: Sequence[str]) -> list[str]:
    return [name for name in names if len(plan.parameters[name].shape) > 1]


def _chosen(plan: Plan, axes: tuple[str, ...], names: Sequence[str]) -> Chosen:
    """How most elements of the matrices (of all, where there are none) lie, among the meshes that FSDP2 takes."""
    found: Counter[tuple[str, ...]] = Counter()
    order = list(plan.mesh)
    for name in _matrices(plan, names) or names:
        placements = plan.parameters[name].placements
        found[tuple(axis for axis in axes if placements[order.index(axis)].startswith("S("))] += size_of(plan, name)
    split = max(found, key=lambda over: (found[over], len(over)))
    whole = tuple(axis for axis in axes if axis not in split)
    if split and whole and (len(split), len(whole), order.index(whole[0]) < order.index(split[0])) != (1, 1, True):
        return axes, ()  # replicate and shard are one axis each, in the order of the mesh
    return split, whole


def _is_gathered_again(plan: Plan, names: Sequence[str], axes: tuple[str, ...]) -> bool:
    """Whether more elements are gathered in backward too than in forward alone."""
    votes = Counter({True: 0, False: 0})
    for name in names:
        for gather in gathers_of(plan, name):
            if set(gather.axes) & set(axes):
                votes["bwd" in gather.phases] += size_of(plan, name)
    return votes[True] >= votes[False]


def _dim(plan: Plan, name: str, over: tuple[str, ...], taken: int | None, axis: str | None) -> int:
    """The dim that a unit splits of a parameter: the plan's where it says one and it divides, 0 otherwise."""
    parameter, order = plan.parameters[name], list(plan.mesh)
    texts = {parameter.placements[order.index(a)] for a in over} - {"R"}
    if len(texts) != 1:
        return 0
    dim = int(re.sub(r"\D", "", texts.pop()))
    size = parameter.shape[dim] // (plan.mesh[axis] if axis and taken == dim else 1)
    return dim if size % prod(plan.mesh[a] for a in over) == 0 else 0


def _placed(plan: Plan, over: tuple[str, ...], dim: int, taken: int | None, axis: str | None) -> Placed:
    found = dict.fromkeys(over, dim)
    if taken is not None and axis is not None and plan.mesh[axis] > 1:
        found[axis] = taken
    placements = tuple(f"S({found[a]})" if a in found else "R" for a in plan.mesh)
    split: dict[str, tuple[str, ...]] = {}
    for d in sorted(set(found.values())):
        tensor = (axis,) if axis is not None and found.get(axis) == d else ()
        split[str(d)] = (*tensor, *(a for a in over if found[a] == d))
    return Placed(placements, split)
