"""Collectives among ranks that all live in this process: what each member gets, given what each member gave.

The semantics are those of torch.distributed on flat tensors. Members of a group are in the order of their ranks. What
several members get alike is one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce

import torch
from torch import Tensor

from .parts import coordinates


def exchange(kind: str, reduction: str, given: Sequence[Tensor]) -> list[Tensor]:
    """What each member of one group gets.

    Args:
        kind: "all_gather", "all_reduce", "reduce_scatter" or "all_to_all".
        reduction: "sum", "max" or "".
        given: a flat tensor a member, all of one size.
    """
    count = len(given)
    if kind == "all_gather":
        return [torch.cat(list(given))] * count
    if kind == "all_to_all":
        pieces = [x.chunk(count) for x in given]
        return [torch.cat([piece[me] for piece in pieces]) for me in range(count)]
    assert given[0].dtype != torch.uint8, "one-byte values are never summed"
    total = reduce(torch.maximum if reduction == "max" else torch.add, given)
    return [total] * count if kind == "all_reduce" else list(total.chunk(count))


@cache
def groups(axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Ranks that differ along these axes only, a tuple a group, in rank order.

    >>> groups((0,), (2, 2))
    ((0, 2), (1, 3))
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in enumerate(coordinates(sizes)):
        found.setdefault(tuple(c for a, c in enumerate(coordinate) if a not in axes), []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())
