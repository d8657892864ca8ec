"""What a rank sends and makes of what it receives is what `shards.run_step` says, in bits and memory order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor

from autoparallel_fp8.graph import TensorSpec
from autoparallel_fp8.in_memory import exchange, groups
from autoparallel_fp8.layout import Factors, universe
from autoparallel_fp8.parts import coordinates
from autoparallel_fp8.rank_steps import RankStep, dry, rank_step, receive, send, sliced
from autoparallel_fp8.redistribute import Step, steps
from autoparallel_fp8.shards import run_step, same_bits, shard

TENSORS = [
    ((12, 8), ((12,), (8,))),
    ((24, 4), ((2, 3, 4), (4,))),
    ((4, 1, 12), ((4,), (), (3, 4))),
    ((12, 6), ((2, 2, 3), (6,))),
]
MESHES = [(2,), (3,), (2, 2), (2, 3), (2, 2, 2)]


def run_ranks(shards: list[Tensor], step: Step, ranks: list[RankStep], sizes: tuple[int, ...]) -> list[Tensor]:
    """Every rank's result, collectives in memory; members of a group stand in the order of their global ranks."""
    if step.kind == "slice":
        return [sliced(x, own) for x, own in zip(shards, ranks, strict=True)]
    sent = [send(x, own) for x, own in zip(shards, ranks, strict=True)]
    found: list[Tensor] = [sent[0]] * len(sent)
    for members in groups(step.axes, sizes):
        assert all(sent[rank].is_contiguous() and sent[rank].ndim == 1 for rank in members)
        for rank, flat in zip(members, exchange(step.kind, step.reduction, [sent[r] for r in members]), strict=True):
            assert dry(sent[rank], ranks[rank]).shape == flat.shape
            found[rank] = receive(flat, ranks[rank])
    return found


def tensors() -> Iterator[tuple[Tensor, Factors]]:
    """Each in every memory order, in float32 and float8."""
    for shape, factors in TENSORS:
        for order in itertools.permutations(range(len(shape))):
            values = torch.arange(prod(shape)).reshape([shape[d] for d in order]) % 64
            for dtype in (torch.float32, torch.float8_e4m3fn):
                stored = values.to(torch.float32).to(dtype)
                yield stored.permute([order.index(d) for d in range(len(shape))]), factors


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_rank_ends_with_what_the_step_says(sizes: tuple[int, ...]) -> None:
    """Gathers, scatters, exchanges and slices of any dim and factor, over one axis and several, in any memory order."""
    draw, kinds = np.random.default_rng(0), set()
    for x, factors in tensors():
        spec = TensorSpec(tuple(x.shape), tuple(x.stride()), x.dtype)
        splits = tuple((d, f) for d, dim in enumerate(factors) for f in range(len(dim)))
        layouts = universe(factors, sizes, splits, "PM" if x.dtype == torch.float32 else "").layouts
        for number in draw.permutation(len(layouts))[:12]:
            possible = list(steps(spec, factors, layouts[number], sizes, splits))
            for k in draw.permutation(len(possible))[:6]:
                step, shards = possible[k], shard(x, factors, layouts[number], sizes)
                wanted = run_step(shards, step, spec, factors, sizes)
                kinds.add((step.kind, len(step.axes)))
                ranks = [rank_step(step, spec, factors, sizes, place) for place in coordinates(sizes)]
                for a, b in zip(run_ranks(shards, step, ranks, sizes), wanted, strict=True):
                    assert same_bits(a, b), f"{spec} {factors} {step}"
                    strides = [s for n, s in zip(a.shape, a.stride(), strict=True) if n > 1]
                    assert strides == [s for n, s in zip(b.shape, b.stride(), strict=True) if n > 1], f"{spec} {step}"
    assert {kind for kind, _ in kinds} == {"slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"}
    assert len(sizes) == 1 or max(count for _, count in kinds) > 1


def test_a_value_that_repeats_in_memory_still_does() -> None:
    """A bias seen as rows: stride 0 before and after a gather."""
    x = torch.arange(8.0).expand(4, 8)
    spec, factors, sizes = TensorSpec((4, 8), (0, 1), x.dtype), ((4,), (8,)), (2,)
    layout = universe(factors, sizes, ((1, 0),), "").layouts[1]
    (step,) = [s for s in steps(spec, factors, layout, sizes, ()) if s.kind == "all_gather"]
    ranks = [rank_step(step, spec, factors, sizes, place) for place in coordinates(sizes)]
    for made in run_ranks(shard(x, factors, layout, sizes), step, ranks, sizes):
        assert torch.equal(made, x) and made.stride() == (0, 1)
