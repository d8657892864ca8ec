"""Which placements of an op's tensors on one axis give the right result and have no row.

Every combination of placements of the operands is tried by brute force: the plain op runs on the parts, and whatever
layouts its results then have are held against the rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import reduce
from math import prod

import torch
from autoparallel_fp8.rules import AxisRow, left_out, partial_kinds
from autoparallel_fp8.rules.sized_ops import sized_by_arguments
from split_ops import OnRanks, Sample, kind_of, spec_of
from torch import Tensor

from autoparallel_fp8.layout import Placement, R, local_factors, split
from autoparallel_fp8.products import Option
from autoparallel_fp8.shards import same_bits

aten = torch.ops.aten
MOST = 2000
"""Combinations tried of one call; calls with more (joins of many tensors) are passed over."""


def reasons_for(op: object, text: str) -> list[str]:
    """The patterns of the op's rule that say why these placements are no row."""
    return [like for like in left_out(op) if re.fullmatch(like, text)]


def tells(sample: Sample) -> bool:
    """Whether the call's results say where they come from.

    They are neither all zero nor empty, and what is read is more than single numbers, with no tensor twice and none
    that repeats in memory.
    """
    wholes = sample.tensors()
    if wholes and all(t.numel() <= 1 for t in wholes):
        return False
    is_once = len({id(t) for t in wholes}) == len(wholes)
    is_varied = all(step or size == 1 for t in wholes for step, size in zip(t.stride(), t.shape, strict=True))
    if not sample.is_filled or not is_once or not is_varied:
        return False
    results = [r for r in sample.run() if r is not None]
    return all(t.numel() for t in (*wholes, *results)) and any(r.double().any() for r in results)


def missing_rows(sample: Sample, ways: int) -> Iterator[str]:
    """Placements over so many ranks, written as `R x S(0) -> S(0)`, that hold for this call and have no row."""
    if not tells(sample):
        return
    on_ranks = OnRanks(sample, kind_of(sample, (ways,)), (ways,))
    wholes = on_ranks.wholes
    known = {(option.operands, option.results) for option in on_ranks.kind.options}
    together = [tuple(t.shape[:-1]) if len(wholes) > 4 and t.ndim > 1 else k for k, t in enumerate(wholes)]
    choices = [placements(wholes[together.index(key)], ways) for key in dict.fromkeys(together)]
    if prod(map(len, choices)) > MOST:
        return
    for chosen in itertools.product(*choices):
        of_group = dict(zip(dict.fromkeys(together), chosen, strict=True))
        operands = tuple((of_group[key],) for key in together)
        if any(p not in placements(t, ways) for (p,), t in zip(operands, wholes, strict=True)):
            continue
        factors = on_ranks.kind.operand_factors
        if any(local_factors(f, o, (ways,)) is None for f, o in zip(factors, operands, strict=True)):
            continue  # 3 blocks over 2 ranks: no even split of these factors
        for results in what_holds(on_ranks, operands):
            if not any(
                o == operands and all(r in (None, k) for r, k in zip(results, rs, strict=True)) for o, rs in known
            ):
                left = " x ".join(str(p[0]) for p in operands)
                right = ",".join(str(r[0] if r else R) for r in results)
                yield f"{left} -> {right}"


def placements(tensor: Tensor, ways: int) -> list[Placement]:
    """All that one axis of so many ranks may do to it."""
    splits = [split(d) for d, size in enumerate(tensor.shape) if size > 1 and size % ways == 0]
    kinds = partial_kinds(spec_of(tensor)) if tensor.is_floating_point() else ""
    return [R, *splits, *(Placement(kind) for kind in kinds)]


def what_holds(on_ranks: OnRanks, operands: tuple[tuple[Placement], ...]) -> list[tuple[tuple[Placement] | None, ...]]:
    """Layouts of the results that the plain op gives from these; None for a result that is left out."""
    op, (ways,) = on_ranks.sample.op, on_ranks.sizes
    shards = [on_ranks.shards(k, layout) for k, layout in enumerate(operands)]
    if not is_safe(op, [local[0] for local in shards]):
        return []
    candidates = [
        [None] if r is None else [(p,) for p in placements(r, ways) if local_factors(dims, (p,), (ways,)) is not None]
        for r, dims in zip(on_ranks.reference, on_ranks.kind.result_factors, strict=True)
    ]
    tried = [[c] for c in candidates[0]] if sized_by_arguments(op) else [candidates[0]]
    found = []
    for first in tried:
        if op is aten.embedding_dense_backward.default and first == [(split(0),)]:
            continue  # would write outside of memory
        option = Option(operands, tuple(c[0] or (R,) for c in (first, *candidates[1:])), (AxisRow((), (), ""),))
        try:
            made = on_ranks.run(option, shards)
        except (RuntimeError, IndexError, ValueError):
            continue
        if any(len(results) != len(on_ranks.reference) for results in made):
            continue
        good = [
            [
                c
                for c in choices
                if c is None or is_so([m[k] for m in made], on_ranks.reference[k], c[0], on_ranks.sample)
            ]
            for k, choices in enumerate((first, *candidates[1:]))
        ]
        found += itertools.product(*([(R,)] if (R,) in choices else choices for choices in good))
    return found


def is_safe(op: object, local: list[Tensor]) -> bool:
    """Kernels that do not check their arguments get none that do not fit."""
    if op is aten.embedding_dense_backward.default:
        return local[0].shape[:-1] == local[1].shape
    if op is aten.native_layer_norm_backward.default:
        grad, x, mean, _, *weights = local
        fits = grad.shape == x.shape and mean.shape[: x.ndim - 1] == x.shape[:-1]
        return fits and all(weight.shape[-1] == x.shape[-1] for weight in weights)
    return True


def is_so(local: list[Tensor], whole: Tensor, placement: Placement, sample: Sample) -> bool:
    """Whether the local results are the whole under this placement."""
    if any(x.dtype != whole.dtype or (placement.kind in "PM" and x.shape != whole.shape) for x in local):
        return False
    wanted = list(whole.chunk(len(local), placement.dim)) if placement.kind == "S" else [whole] * len(local)
    if placement.kind in "PM":
        local, wanted = [reduce(torch.add if placement.kind == "P" else torch.maximum, local)], [whole]
    return all(is_alike(x, y, sample) for x, y in zip(local, wanted, strict=True))


def is_alike(x: Tensor, y: Tensor, sample: Sample) -> bool:
    if x.shape != y.shape:
        return False
    return torch.allclose(x.double(), y.double(), 1e-4, 1e-4, equal_nan=True) if sample.rtol else same_bits(x, y)
