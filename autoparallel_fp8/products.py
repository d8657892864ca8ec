"""Rows of one axis multiplied out over the mesh: an op's options, and what one rank holds under them.

In: a refined signature, its rows, the factors of the tensors. Out: every combination of rows that fits the factors and
fits together: splits are even, run on into the same factors everywhere, and own scales are of the same parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .graph import TensorSpec
from .layout import Factors, Layout, format_layout, local_factors, local_shape, local_spec
from .rules import AxisRow, Signature


@dataclass(frozen=True)
class Option:
    """One way to run an op on the mesh.

    Attributes:
        operands: layout of each tensor read, as the op wants it.
        results: layout of each tensor made.
        rows: the row taken on each mesh axis, its note and local program.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    rows: tuple[AxisRow, ...]


@dataclass(frozen=True)
class Refusal:
    """A combination that fits the mesh but not the kernel, and the sentence that says why."""

    results: tuple[Layout, ...]
    operands: tuple[Layout, ...]
    sentence: str


def products(
    signature: Signature,
    axis_rows: tuple[AxisRow, ...],
    reads: tuple[Factors, ...],
    makes: tuple[Factors, ...],
    sizes: tuple[int, ...],
) -> Iterator[Option]:
    """Rows of one axis multiplied out over the mesh: every combination that fits the factors."""
    plain = _successors(signature)
    finer = _successors(signature.finer) if signature.finer else {}
    for chosen in itertools.product(*(axis_rows[:1] if size == 1 else axis_rows for size in sizes)):
        is_fit = _finer_fit(chosen, signature, sizes) and _scales_alike(chosen)
        if not is_fit or not _spills_alike(chosen, signature, plain, finer, sizes):
            continue
        operands = tuple(tuple(row.operands[k] for row in chosen) for k in range(len(reads)))
        results = tuple(tuple(row.results[k] for row in chosen) for k in range(len(makes)))
        layouts = zip((*operands, *results), (*reads, *makes), strict=True)
        if all(_fits(layout, factors, sizes) for layout, factors in layouts):
            yield Option(operands, results, chosen)


def _fits(layout: Layout, factors: Factors, sizes: tuple[int, ...]) -> bool:
    kinds = {p.kind for p in layout}
    return not {"P", "M"} <= kinds and local_factors(factors, layout, sizes) is not None


def _successors(signature: Signature) -> dict[str, set[str]]:
    """Atom -> the atoms that follow it in a dim; "" where it is the last."""
    found: dict[str, set[str]] = {}
    for dims in (*signature.operands, *signature.results):
        for dim in dims:
            for atom, follower in zip(dim, (*dim[1:], ""), strict=False):
                found.setdefault(atom, set()).add(follower)
    return found


def _ways(chosen: tuple[AxisRow, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    """In how many parts each atom is split."""
    ways: dict[str, int] = {}
    for row, size in zip(chosen, sizes, strict=True):
        if row.atom:
            ways[row.atom] = ways.get(row.atom, 1) * size
    return ways


def _finer_fit(chosen: tuple[AxisRow, ...], signature: Signature, sizes: tuple[int, ...]) -> bool:
    """Rows for finer splits serve where the split is finer than the atom, on every axis that splits it."""
    finer = {row.atom for row in chosen if row.is_finer}
    if not finer:
        return True
    ways = _ways(chosen, sizes)
    return all(ways[atom] > signature.sizes[atom] for atom in finer) and all(
        row.is_finer for row in chosen if row.atom in finer
    )


def _spills_alike(
    chosen: tuple[AxisRow, ...],
    signature: Signature,
    plain: dict[str, set[str]],
    finer: dict[str, set[str]],
    sizes: tuple[int, ...],
) -> bool:
    """A split that runs on into the next atom must meet the same next atom in every tensor."""
    is_finer = {row.atom: row.is_finer for row in chosen}
    for atom, count in _ways(chosen, sizes).items():
        after = finer if is_finer[atom] else plain
        while count > signature.sizes[atom]:
            if len(after[atom]) != 1 or after[atom] == {""} or count % signature.sizes[atom]:
                return False
            count //= signature.sizes[atom]
            (atom,) = after[atom]
            if atom in signature.whole:
                return False
    return True


def _scales_alike(chosen: tuple[AxisRow, ...]) -> bool:
    """Axes that split one factor together have own scales together: the part of each rank depends on all of them."""
    has_own = [any(p.kind == "V" for p in (*row.operands, *row.results)) for row in chosen]
    if not any(has_own):
        return True
    for k in range(len(chosen[0].operands)):
        seen: dict[tuple[int, int], bool] = {}
        for row, is_own in zip(chosen, has_own, strict=True):
            placement = row.operands[k]
            if placement.kind in "SF" and seen.setdefault((placement.dim, placement.factor), is_own) != is_own:
                return False
    return True


def local_specs(
    specs: tuple[TensorSpec, ...], factors: tuple[Factors, ...], layouts: tuple[Layout, ...], sizes: tuple[int, ...]
) -> tuple[TensorSpec, ...]:
    """What one rank holds of each tensor: local shape, exact local strides, dtype."""
    return tuple(
        local_spec(spec, local_shape(spec.shape, dims, layout, sizes))
        for spec, dims, layout in zip(specs, factors, layouts, strict=True)
    )


def format_option(option: Option | Refusal) -> str:
    """`[R, S(0)] x [S(1), R] -> [P(sum), S(0)]`."""
    left = " x ".join(f"[{format_layout(layout)}]" for layout in option.operands)
    right = ", ".join(f"[{format_layout(layout)}]" for layout in option.results)
    return f"{left} -> {right}" if left else right
