"""A sharded tensor in one process: a list with the local tensor of every rank, and collectives among them.

`shard` cuts a tensor up as a layout says, `unshard` puts it together again, and `run_step` does what one collective of
`redistribute.py` does: each rank gives what it holds, and each gets what the others of its group gave. Ranks are
row-major over the mesh axes. Local tensors have the exact strides of `layout.local_stride`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from math import prod

import torch
from torch import Tensor

from .graph import TensorSpec
from .layout import Factors, Layout, format_layout, local_factors, local_shape, local_stride
from .parts import Part, coordinates, cut, index_along, parts
from .redistribute import Step


def shard(
    tensor: Tensor,
    factors: Factors,
    layout: Layout,
    sizes: tuple[int, ...],
    own: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """The local tensor of every rank; ranks with the same part share it.

    P(sum) is shared out in uneven parts of both signs, P(max) in parts of which a different rank has the largest
    element by element.

    >>> from autoparallel_fp8.layout import split
    >>> shard(torch.arange(4), ((4,),), (split(0),), (2,))
    [tensor([0, 1]), tensor([2, 3])]

    Args:
        tensor: the whole.
        factors: of its dims.
        layout: how it lies on the mesh.
        sizes: of the mesh axes.
        own: one tensor a rank, for a layout with each rank's own values (V), which the whole does not tell.
    """
    if any(p.kind == "V" for p in layout):
        assert own is not None, f"layout {format_layout(layout)} needs every rank's own values"
        return list(own)
    stride = tuple(tensor.stride())
    partial = [a for a, p in enumerate(layout) if p.kind in "PM"]
    terms = [tensor]
    if partial:
        divide = _addends if layout[partial[0]].kind == "P" else _candidates
        terms = divide(tensor, prod(sizes[a] for a in partial))
    known: dict[object, Tensor] = {}
    found = []
    for coordinate in coordinates(sizes):
        term, where = index_along(partial, sizes, coordinate), parts(factors, layout, sizes, coordinate)
        if (term, where) not in known:
            local = _take(terms[term], where)
            known[term, where] = laid_out(local, local_stride(tuple(tensor.shape), stride, tuple(local.shape)))
        found.append(known[term, where])
    return found


def unshard(
    shards: Sequence[Tensor], factors: Factors, layout: Layout, sizes: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    """The whole tensor: partial sums added, partial maxima compared, replicas held against each other.

    Raises:
        AssertionError: replicas differ, or the layout has each rank's own values.
    """
    assert all(p.kind != "V" for p in layout), f"layout {format_layout(layout)} has each rank's own values"
    partial = [a for a, p in enumerate(layout) if p.kind in "PM"]
    combine = _reduction("max" if partial and layout[partial[0]].kind == "M" else "sum")
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for coordinate, local in zip(coordinates(sizes), shards, strict=True):
        key = tuple(0 if a in partial else c for a, c in enumerate(coordinate))
        groups.setdefault(key, []).append(local)
    whole = torch.empty(shape, dtype=shards[0].dtype, device=shards[0].device)
    written: dict[tuple[Part, ...], Tensor] = {}
    for coordinate, members in groups.items():
        where = parts(factors, layout, sizes, coordinate)
        local = reduce(combine, members)
        assert same_bits(written.setdefault(where, local), local), f"replicas under {format_layout(layout)} differ"
        _put(whole, where, local)
    return whole


def run_step(
    shards: Sequence[Tensor], step: Step, spec: TensorSpec, factors: Factors, sizes: tuple[int, ...]
) -> list[Tensor]:
    """What every rank holds after the step, given what it held before.

    A rank sees nothing but its own shard and what the members of its group send. One-byte floats travel as bytes.

    Args:
        shards: in `step.source`.
        step: one of `redistribute.steps`.
        spec: the global tensor, whose memory order is kept.
        factors: of its dims.
        sizes: of the mesh axes.
    """
    run = {"slice": _slice, "all_gather": _all_gather, "all_to_all": _all_to_all}.get(step.kind, _take_reduced)
    before, after = (local_factors(factors, layout, sizes) for layout in (step.source, step.target))
    assert before is not None and after is not None, f"{step} does not fit factors {factors}"
    places = coordinates(sizes)
    ranks = {coordinate: rank for rank, coordinate in enumerate(places)}
    stride = local_stride(spec.shape, spec.stride, local_shape(spec.shape, factors, step.target, sizes))
    sent = [as_bytes(local) for local in shards]
    found: list[Tensor] = [sent[0]] * len(places)
    for members in _groups(step.axes, sizes):
        group = [sent[ranks[c]] for c in members]
        if step.reduction:
            group = [_reduced(group, step.reduction)] * len(members)
        for number, coordinate in enumerate(members):
            made = run(group, number, step, before, after)
            found[ranks[coordinate]] = laid_out(made, stride).view(spec.dtype)
    return found


@cache
def _groups(axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Coordinates of the ranks that differ along these axes only, in the order of their pieces."""
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for coordinate in coordinates(sizes):
        found.setdefault(tuple(c for a, c in enumerate(coordinate) if a not in axes), []).append(coordinate)
    return tuple(tuple(sorted(group, key=lambda c: index_along(axes, sizes, c))) for group in found.values())


def _slice(group: list[Tensor], me: int, step: Step, before: Factors, after: Factors) -> Tensor:
    return _piece(group[me], before, step.target, step, len(group), me)


def _all_gather(group: list[Tensor], me: int, step: Step, before: Factors, after: Factors) -> Tensor:
    """Each member's shard is a piece of the gathered tensor."""
    whole = group[0].new_empty(_shape(after, group[0]))
    for k, local in enumerate(group):
        _put(whole, _piece_parts(after, step.source, step, len(group), k), local)
    return whole


def _all_to_all(group: list[Tensor], me: int, step: Step, before: Factors, after: Factors) -> Tensor:
    """Each member cuts its shard the new way and sends one piece to each; what arrives is put together the old way."""
    made = group[0].new_empty(_shape(after, group[0]))
    for k, local in enumerate(group):
        piece = _piece(local, before, step.target, step, len(group), me)
        _put(made, _piece_parts(after, step.source, step, len(group), k), piece)
    return made


def _reduced(group: list[Tensor], reduction: str) -> Tensor:
    """Sum or maximum of the group's tensors."""
    assert group[0].dtype != torch.uint8, "one-byte values are never summed"
    return reduce(_reduction(reduction), group)


def _take_reduced(group: list[Tensor], me: int, step: Step, before: Factors, after: Factors) -> Tensor:
    """What a rank keeps of the reduced tensor: the whole (all_reduce) or its piece (reduce_scatter)."""
    if step.kind == "all_reduce":
        return group[me]
    return _piece(group[me], before, step.target, step, len(group), me)


def _piece_parts(local: Factors, layout: Layout, step: Step, ways: int, index: int) -> tuple[Part, ...]:
    """Where piece `index` lies in a tensor with these factors, cut as `layout` cuts it along the step's axes."""
    placement = layout[step.axes[0]]
    found = []
    for d, dim in enumerate(local):
        starts, counts = [0] * len(dim), list(dim)
        if d == placement.dim:
            starts, counts = cut(dim, placement.factor, ways, index)
        found.append(Part(dim, tuple(starts), tuple(counts)))
    return tuple(found)


def _piece(local: Tensor, factors: Factors, layout: Layout, step: Step, ways: int, index: int) -> Tensor:
    return _take(local, _piece_parts(factors, layout, step, ways, index))


def _shape(factors: Factors, like: Tensor) -> tuple[int, ...]:
    """Sizes of the dims; a dim without factors keeps the size it has on every rank."""
    return tuple(prod(dim) if dim else size for dim, size in zip(factors, like.shape, strict=True))


def _window(whole: Tensor, where: Sequence[Part]) -> Tensor:
    """The part as a view with a dim for every factor."""
    view = whole.reshape(
        [size for part, dim in zip(where, whole.shape, strict=True) for size in part.factors or (dim,)]
    )
    position = 0
    for part in where:
        for start, count in zip(part.starts, part.counts, strict=True):
            view = view.narrow(position, start, count)
            position += 1
        position += not part.factors
    return view


def _take(whole: Tensor, where: Sequence[Part]) -> Tensor:
    shape = [part.size if part.factors else dim for part, dim in zip(where, whole.shape, strict=True)]
    return _window(as_bytes(whole), where).reshape(shape).view(whole.dtype)


def _put(whole: Tensor, where: Sequence[Part], local: Tensor) -> None:
    """Write a part into a contiguous tensor."""
    window = _window(as_bytes(whole), where)
    window.copy_(as_bytes(local).reshape(window.shape))


def as_bytes(tensor: Tensor) -> Tensor:
    """One-byte floats as uint8; anything else as it is."""
    is_small = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if is_small else tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and dtype and equal elements; NaN equals NaN."""
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = as_bytes(a), as_bytes(b)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def laid_out(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The same values with these strides in memory; a stride of 0 repeats, so equal values are stored once."""
    stored = [1 if step == 0 else size for size, step in zip(values.shape, stride, strict=True)]
    made = torch.empty_strided(stored, stride, dtype=values.dtype, device=values.device)
    once = values
    for d, (size, kept) in enumerate(zip(values.shape, stored, strict=True)):
        if kept < size:
            once = once.narrow(d, 0, 1)
    as_bytes(made).copy_(as_bytes(once))
    return made.as_strided(values.shape, stride)


def _reduction(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.maximum if name == "max" else torch.add


def _addends(tensor: Tensor, count: int) -> list[Tensor]:
    """Tensors that add up to this one: halves and whole numbers of both signs, and what is left."""
    generator = _generator(tensor, count)
    found = [_whole_numbers(tensor, -3, 3, generator) for _ in range(count - 1)]
    if tensor.is_floating_point():
        found = [x / 2 for x in found]
    elif tensor.is_complex():
        found = [x * (1 - 0.5j) for x in found]
    return [*found, reduce(torch.sub, found, tensor)]


def _candidates(tensor: Tensor, count: int) -> list[Tensor]:
    """Tensors of which this is the largest, element by element, each the largest somewhere.

    Nothing is lower than the least number of a dtype, from which a subtraction would wrap round to the greatest.
    """
    generator = _generator(tensor, count)
    owner = _whole_numbers(tensor, 0, count - 1, generator)
    lower = [torch.minimum(tensor, tensor - _whole_numbers(tensor, 1, 3, generator)) for _ in range(count)]
    return [torch.where(owner == k, tensor, low) for k, low in enumerate(lower)]


def _generator(tensor: Tensor, count: int) -> torch.Generator:
    """The same for the same tensor, so that two operands of an op are not shared out alike.

    Elements weigh by their position: two tensors with the same total differ too.
    """
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = tensor.to(torch.float64).nan_to_num(0.0, 0.0, 0.0).reshape(-1)
    total = float((flat * torch.arange(1, flat.numel() + 1, dtype=torch.float64)).sum())
    return torch.Generator().manual_seed(int(abs(total) * 8) % 2**31 + count)


def _whole_numbers(like: Tensor, low: int, high: int, generator: torch.Generator) -> Tensor:
    """Random numbers from low to high, equal along dims that repeat in memory."""
    stored = [1 if step == 0 else size for size, step in zip(like.shape, like.stride(), strict=True)]
    return torch.randint(low, high + 1, stored, generator=generator).to(like.dtype).expand(like.shape)


def spec_of(tensor: Tensor) -> TensorSpec:
    """Shape, stride and dtype."""
    return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
