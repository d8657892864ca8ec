"""From a signature to rows: everything one mesh axis may do to an op.

Own scales: a maximum over a split dim may stay each rank's own (`Own(1)`, of the part split at dim 1). It passes
through the arithmetic that makes a scale of it; what is multiplied by it, split at the *same* place, is frozen there; a
scaled GEMM takes both. `OwnScales` says where this may happen; `own_scales.py` works it out for a graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..graph import ABSENT, TensorSpec
from ..layout import M, P, Placement, Q, R, frozen, own, split
from .language import AxisRow, Dims, Signature

Place = tuple[int, int]
"""(dim, factor) of a tensor."""

Scaled = tuple[tuple[Place | None, Place], ...]
"""Of one operand: (place where it may be frozen, or None for a scale; the place that its scale was taken at)."""


@dataclass(frozen=True)
class OwnScales:
    """How one op may meet scales of each rank's own.

    Attributes:
        operands: what each operand may be.
        use: "" for what passes or applies a scale, and for a GEMM that undoes it; "product" for a scale times a scale;
            "unscaled" for a GEMM whose scaling is undone after it; "undo" for the multiplication that does so.
    """

    operands: tuple[Scaled, ...]
    use: str = ""


def rows(
    signature: Signature,
    out: tuple[TensorSpec, ...],
    *,
    own_scales: OwnScales | None = None,
    atoms: Iterable[str] | None = None,
    partials: Sequence[str] | None = None,
) -> tuple[AxisRow, ...]:
    """Every row of one op, all-replicated first, without repeats.

    Args:
        signature: with atoms refined to the factors of the tensors it touches.
        out: the results, whose dtypes forbid partial ones (`partial_kinds`).
        own_scales: where maxima may stay a rank's own and frozen splits may pass; None for nowhere.
        atoms: those that may be split; None for all.
        partials: for each operand, the partial kinds it can have ("PM"); None for any.
    """
    num_operands, num_results = len(signature.operands), len(signature.results)
    found = [AxisRow((R,) * num_operands, (R,) * num_results, "replicated")]
    for atom in signature.sizes:
        if atom not in signature.whole and (atoms is None or atom in atoms):
            found += _split_rows(signature, atom, own_scales)
    found += _finer_rows(signature, atoms)
    for group in signature.linear:
        if partials is None or all("P" in partials[i] for i in group):
            found.append(_partial_row(signature, group, P, "partial sums pass"))
    if signature.monotone and (partials is None or all("M" in partials[i] for i in signature.monotone)):
        found.append(_partial_row(signature, signature.monotone, M, "partial maxima pass"))
    if own_scales is not None and own_scales.use == "product":
        found += _product_rows(signature, own_scales)
    elif own_scales is not None and own_scales.use == "undo":
        found += _undo_rows(own_scales)
    elif own_scales is not None and signature.passes_scales:
        found += _own_rows(signature, own_scales)
    kept = [
        row
        for row in found
        if all(
            p.kind not in "PM" or spec is ABSENT or p.kind in partial_kinds(spec)
            for p, spec in zip(row.results, out, strict=True)
        )
    ]
    return tuple(dict.fromkeys(kept))


def partial_kinds(spec: TensorSpec) -> str:
    """What a tensor of this dtype can be: "P" for a partial sum, "M" for a partial maximum.

    Floats of two bytes or more are both. A one-byte float is neither: it is rounded to 8 bits, which does not add up.
    Complex numbers add up part by part, and collectives add them so, but have no order and so no maximum. Integers
    would add up too, exactly; they are no P(sum) because graphs have them as indices, counts and masks, which cost
    nothing to compute whole, and what reads them (a comparison, a gather) takes no part of a sum. So an integer matrix
    product is not split along k. Booleans are neither.
    """
    if spec.dtype.is_complex:
        return "P"
    if spec.dtype.is_floating_point:
        return "PM" if spec.dtype.itemsize > 1 else ""
    return "" if spec.dtype is torch.bool else "M"


def _place(dims: Dims, atom: str, make: Callable[[int, int], Placement], otherwise: Placement) -> Placement:
    """`make(dim, factor)` where the tensor has the atom, `otherwise` where it has not."""
    for d, dim in enumerate(dims):
        if atom in dim:
            return make(d, dim.index(atom))
    return otherwise


def _has(dims: Dims, atom: str) -> bool:
    return any(atom in dim for dim in dims)


def place_of(dims: Dims, atom: str) -> Place | None:
    """Where the tensor has the atom."""
    return next(((d, dim.index(atom)) for d, dim in enumerate(dims) if atom in dim), None)


def _split_rows(signature: Signature, atom: str, own_scales: OwnScales | None) -> list[AxisRow]:
    operands = tuple(_place(dims, atom, split, R) for dims in signature.operands)
    kind = signature.reduced.get(atom)
    absent = Placement(kind) if kind else R
    results = tuple(_place(dims, atom, split, absent) for dims in signature.results)
    note, local = f"split {atom}", signature.local.get(atom, "")
    if not any(_has(dims, atom) for dims in signature.results) and kind is None:
        return []
    found = [AxisRow(operands, results, note, local, atom)]
    if own_scales is None:
        return found
    if signature.makes_own and kind == "M":
        made = _place(signature.operands[0], atom, own, R)
        found.append(AxisRow(operands, (made,) * len(results), f"{note}, each rank its own maximum", local, atom))
    if own_scales.use == "unscaled":
        found += _unscaled_rows(signature, atom, found[0], own_scales) if kind == "P" else []
    elif signature.scaled:
        found += _scaled_rows(signature, atom, found[0], own_scales)
    elif signature.passes_scales and kind is None:
        found += _frozen_rows(signature, atom, note, own_scales)
    return found


def _finer_rows(signature: Signature, atoms: Iterable[str] | None) -> list[AxisRow]:
    """Rows for splits that are finer than their atom, where the op has another program for them."""
    finer = signature.finer
    if finer is None:
        return []
    found = []
    for atom in finer.local:
        if atom not in finer.whole and (atoms is None or atom in atoms):
            found += [row._replace(is_finer=True, note=f"{row.note}, finer") for row in _split_rows(finer, atom, None)]
    return found


def _frozen_rows(signature: Signature, atom: str, note: str, own_scales: OwnScales) -> list[AxisRow]:
    """x times the scale of its own parts freezes the split; a frozen tensor alone stays frozen."""
    data = [i for i, dims in enumerate(signature.operands) if _has(dims, atom)]
    results = tuple(_place(dims, atom, frozen, R) for dims in signature.results)
    if len(data) != 1:
        return []
    x = data[0]
    place = place_of(signature.operands[x], atom)
    others = [i for i in range(len(signature.operands)) if i != x]
    if not others and any(where == place for where, _ in own_scales.operands[x]):
        return [AxisRow((_place(signature.operands[x], atom, frozen, R),), results, f"{note}, frozen", atom=atom)]
    taken = dict(own_scales.operands[x]).get(place)
    if len(others) == 1 and taken is not None and (None, taken) in own_scales.operands[others[0]]:
        placed = [own(*taken)] * 2
        placed[x] = _place(signature.operands[x], atom, split, R)
        return [AxisRow(tuple(placed), results, f"{note}, scaled by each rank's own", atom=atom)]
    return []


def _own_rows(signature: Signature, own_scales: OwnScales) -> list[AxisRow]:
    """A scale that is each rank's own stays so through element-wise ops with constants or replicated scales."""
    count = len(signature.operands)
    found = []
    for i in range(count):
        atoms = {atom for dim in signature.operands[i] for atom in dim}
        scales = [own(*taken) for where, taken in own_scales.operands[i] if where is None]
        for scale in scales if atoms == set(signature.sizes) else ():
            placed = tuple(scale if j == i else R for j in range(count))
            found.append(AxisRow(placed, (scale,) * len(signature.results), "own scales pass"))
    return found


def _product_rows(signature: Signature, own_scales: OwnScales) -> list[AxisRow]:
    """A product of scales is each rank's own where one of them is, or both at one place."""
    places = dict.fromkeys(taken for operand in own_scales.operands for _, taken in operand)
    found = []
    for place in places:
        choices = [(R, own(*place)) if (None, place) in operand else (R,) for operand in own_scales.operands]
        for placed in itertools.product(*choices):
            if any(p.kind == "V" for p in placed):
                found.append(AxisRow(placed, (own(*place),) * len(signature.results), "own scales multiply"))
    return found


def _unscaled_rows(signature: Signature, atom: str, plain: AxisRow, own_scales: OwnScales) -> list[AxisRow]:
    """Frozen operands over a split k: a part of the sum that is still to be multiplied by each rank's own scales."""
    choices = []
    for data, _ in signature.scaled:
        place = place_of(signature.operands[data], atom)
        can_freeze = any(where == place for where, _ in own_scales.operands[data])
        choices.append((split(*place), frozen(*place)) if can_freeze and place else (plain.operands[data],))
    found = []
    for placed in itertools.product(*choices):
        if any(p.kind == "F" for p in placed):
            operands = list(plain.operands)
            for (data, _), placement in zip(signature.scaled, placed, strict=True):
                operands[data] = placement
            found.append(AxisRow(tuple(operands), (Q,), f"{plain.note}, scales undone after", plain.local, atom))
    return found


def _undo_rows(own_scales: OwnScales) -> list[AxisRow]:
    """Own scales times a part that they are to be undone in: a plain part of the sum."""
    scale = next(k for k, operand in enumerate(own_scales.operands) if operand)
    found = []
    for _, taken in own_scales.operands[scale]:
        placed = [Q, Q]
        placed[scale] = own(*taken)
        found.append(AxisRow(tuple(placed), (P,), "own scales undone"))
    return found


def _scaled_rows(signature: Signature, atom: str, plain: AxisRow, own_scales: OwnScales) -> list[AxisRow]:
    """A scaled GEMM takes frozen operands with their own scales, one or both where both hold the atom."""
    options: list[list[tuple[Placement, Placement]]] = []
    for data, scale in signature.scaled:
        pair = [(plain.operands[data], plain.operands[scale])]
        place = place_of(signature.operands[data], atom)
        taken = dict(own_scales.operands[data]).get(place)
        if (
            place is not None
            and taken is not None
            and not _has(signature.operands[scale], atom)
            and (None, taken) in own_scales.operands[scale]
        ):
            pair.append((_place(signature.operands[data], atom, frozen, R), own(*taken)))
        options.append(pair)
    found = []
    for choice in [[a, b] for a in options[0] for b in options[1]][1:]:
        operands = list(plain.operands)
        for (data, scale), (on_data, on_scale) in zip(signature.scaled, choice, strict=True):
            operands[data], operands[scale] = on_data, on_scale
        found.append(AxisRow(tuple(operands), plain.results, f"{plain.note}, own scales", plain.local, atom))
    return found


def _partial_row(signature: Signature, group: Sequence[int], placement: Placement, note: str) -> AxisRow:
    operands = tuple(placement if i in group else R for i in range(len(signature.operands)))
    return AxisRow(operands, (placement,) * len(signature.results), note)
