"""The signature of a view: which runs of old and new dims hold the same elements, and the atoms they are cut into."""

from __future__ import annotations

from itertools import pairwise

from .language import OpCall, Signature


def regrouped(op: OpCall) -> Signature:
    """Signature of a view: dims merge and split in memory order, `(2 3) 4 -> 2 (3 4)`."""
    before, after = op.tensors[0].shape, op.out[0].shape
    old: list[tuple[str, ...]] = [()] * len(before)
    new: list[tuple[str, ...]] = [()] * len(after)
    sizes: dict[str, int] = {}
    groups = [] if 0 in before else _view_groups(before, after)
    for number, (olds, news) in enumerate(groups):
        cuts = sorted(_suffix_products(before, olds) | _suffix_products(after, news))
        steps = list(pairwise(cuts))
        if any(high % low for low, high in steps):
            continue  # (6 4) -> (8 3): no common refinement, these dims stay whole
        atoms = {low: f"v{number}.{i}" for i, (low, _) in enumerate(steps)}
        sizes.update({atoms[low]: high // low for low, high in steps})
        _name_dims(olds, before, atoms, old)
        _name_dims(news, after, atoms, new)
    return Signature((tuple(old),), (tuple(new),), sizes, linear=((0,),), monotone=(0,), passes_scales=True)


def _name_dims(dims: list[int], shape: tuple[int, ...], atoms: dict[int, str], names: list[tuple[str, ...]]) -> None:
    """Write into `names` which atoms make up each of `dims`, given the atom that starts at each suffix product."""
    base = 1
    for d in reversed(dims):
        names[d] = tuple(atoms[low] for low in sorted(atoms, reverse=True) if base <= low < base * shape[d])
        base *= shape[d]


def _view_groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of old and new dims (sizes above 1) with equal products."""
    olds = [d for d, size in enumerate(before) if size != 1]
    news = [d for d, size in enumerate(after) if size != 1]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(olds) and j < len(news):
        left, right = [olds[i]], [news[j]]
        a, b = before[olds[i]], after[news[j]]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                left.append(olds[i])
                a *= before[olds[i]]
                i += 1
            else:
                right.append(news[j])
                b *= after[news[j]]
                j += 1
        groups.append((left, right))
    return groups


def _suffix_products(shape: tuple[int, ...], dims: list[int]) -> set[int]:
    found, product = {1}, 1
    for d in reversed(dims):
        product *= shape[d]
        found.add(product)
    return found
