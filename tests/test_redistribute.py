"""Redistribution by brute force: between every two layouts, the steps that are priced give the right shards."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel_fp8.graph import TensorSpec
from autoparallel_fp8.layout import M, P, R, format_layout, frozen, local_shape, local_stride, split, universe
from autoparallel_fp8.parts import coordinates, parts
from autoparallel_fp8.reach import Reach
from autoparallel_fp8.redistribute import Routes, steps
from autoparallel_fp8.shards import run_step, same_bits, shard, unshard

MESHES = [(2,), (3,), (2, 2), (2, 3), (2, 2, 2)]
FACTORS = [
    ((24,),),
    ((4, 6),),
    ((2, 12),),
    ((6, 2, 3),),
    ((4, 6), (12,)),
    ((2, 6), (), (6, 2)),
    ((12,), (2, 3, 2)),
]


def counted(factors, dtype=torch.float32, order=None):
    """A tensor of distinct small whole numbers, laid out in memory with its dims in this order, major to minor."""
    shape = [prod(dim) for dim in factors]
    order = order or range(len(shape))
    values = torch.arange(prod(shape)).sub(prod(shape) // 2).reshape([shape[d] for d in order])
    return values.to(dtype).permute([list(order).index(d) for d in range(len(shape))])


def spec_of(tensor):
    return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def all_splits(factors):
    return tuple((d, f) for d, dim in enumerate(factors) for f in range(len(dim)))


def routes_of(tensor, factors, sizes, partials, price=None):
    price = price or (lambda step, spec: 1.0 + step.num_bytes)
    return Routes(spec_of(tensor), factors, Reach(all_splits(factors), partials), sizes, price)


def check_step(before, after, step, spec, factors, sizes):
    """One step: the values and strides of the target, and the bytes that the step says."""
    found = run_step(before, step, spec, factors, sizes)
    whole = unshard(found, factors, step.target, sizes, spec.shape)
    assert same_bits(whole, unshard(after, factors, step.target, sizes, spec.shape)), step
    shape = local_shape(spec.shape, factors, step.target, sizes)
    assert all(t.shape == shape and t.stride() == local_stride(spec.shape, spec.stride, shape) for t in found), step
    one = found[0] if step.kind in ("all_gather", "slice") else before[0]
    ranks = prod(sizes[a] for a in step.axes) if step.kind == "all_to_all" else 1
    assert step.num_bytes == one.numel() * one.dtype.itemsize * ranks, step
    if "P" not in {p.kind for p in step.target} and "M" not in {p.kind for p in step.target}:
        assert all(same_bits(a, b) for a, b in zip(found, after, strict=True)), step
    return found


def test_where_a_rank_stands():
    """The later mesh axis is the major one on a shared factor, and a split runs on into the next factors."""
    x = torch.arange(8)
    assert [t.tolist() for t in shard(x, ((8,),), (split(0), split(0)), (2, 2))] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert [t.tolist() for t in shard(x, ((2, 4),), (split(0, 1),), (2,))] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [t.tolist() for t in shard(x, ((2, 4),), (split(0),), (4,))] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [t.tolist() for t in shard(x, ((2, 4),), (split(0), frozen(0, 1)), (2, 2))] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


def test_memory_order_of_a_part():
    """A column-major tensor stays column-major in parts, and a dim that repeats in memory repeats there too."""
    column_major = counted(((8,), (4,)), order=(1, 0))
    assert shard(column_major, ((8,), (4,)), (split(0),), (2,))[1].stride() == (1, 4)
    assert shard(column_major, ((8,), (4,)), (split(1),), (2,))[1].stride() == (1, 8)
    repeated = torch.arange(4.0).expand(6, 4)
    assert shard(repeated, ((6,), (4,)), (split(0),), (2,))[1].stride() == (0, 1)
    assert shard(repeated, ((6,), (4,)), (split(1),), (2,))[1].stride() == (0, 1)


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("factors", FACTORS)
def test_shards_are_the_tensor(factors, sizes):
    """Every element lies on as many ranks as the layout repeats it; partial shards are uneven and add up."""
    x = counted(factors)
    for layout in universe(factors, sizes, all_splits(factors), "PM").layouts:
        shards = shard(x, factors, layout, sizes)
        assert same_bits(unshard(shards, factors, layout, sizes, tuple(x.shape)), x)
        copies = prod(size for size, p in zip(sizes, layout, strict=True) if p.kind in "RPM")
        assert sum(t.numel() for t in shards) == x.numel() * copies
        assert all(
            t.numel() == prod(p.size for p in parts(factors, layout, sizes, c))
            for t, c in zip(shards, coordinates(sizes), strict=True)
        )
        if P in layout:
            assert not same_bits(shards[0], shards[-1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_the_least_number_of_a_dtype_is_the_largest_of_its_parts(dtype):
    """A part below it would wrap round to the greatest number, and the maximum would be that."""
    info = torch.iinfo(dtype) if not dtype.is_floating_point else torch.finfo(dtype)
    x = torch.tensor([info.min, info.min, info.max, 3], dtype=dtype)
    shards = shard(x, ((4,),), (M,), (3,))
    assert same_bits(unshard(shards, ((4,),), (M,), (3,), (4,)), x)


def test_partial_shards_are_uneven_and_of_both_signs():
    """An op that is not linear cannot pass by luck; of a maximum, every rank has the largest element somewhere."""
    x = counted(((24,),))
    first, second = shard(x, ((24,),), (P,), (2,))
    assert same_bits(first + second, x) and (first < 0).any() and (first > 0).any() and not same_bits(first, second)
    first, second = shard(x, ((24,),), (M,), (2,))
    assert same_bits(torch.maximum(first, second), x) and (first < second).any() and (first > second).any()


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("factors", FACTORS)
def test_every_step_gives_the_shards_of_its_target(factors, sizes):
    """Each collective from each layout: values, strides and bytes."""
    x = counted(factors)
    layouts = universe(factors, sizes, all_splits(factors), "PM").layouts
    shards = {layout: shard(x, factors, layout, sizes) for layout in layouts}
    for layout in layouts:
        for step in steps(spec_of(x), factors, layout, sizes, all_splits(factors)):
            assert step.target in shards, format_layout(step.target)
            check_step(shards[layout], shards[step.target], step, spec_of(x), factors, sizes)


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("factors", FACTORS[1:6:2])
def test_every_path_gives_the_shards_of_its_target(factors, sizes):
    """All pairs of layouts that a path joins, or some thousands of them; only into a partial one no path leads."""
    x = counted(factors, order=range(len(factors))[::-1])
    routes = routes_of(x, factors, sizes, "P")
    layouts = routes.layouts.layouts
    shards = {layout: shard(x, factors, layout, sizes) for layout in layouts}
    pairs = list(itertools.product(range(len(layouts)), repeat=2))
    for i, j in pairs[:: len(pairs) // 2500 + 1]:
        a, b = layouts[i], layouts[j]
        if routes.cost_us[i, j] == float("inf"):
            assert any(p == P and q != P for p, q in zip(b, a, strict=True)), (a, b)
        else:
            check_path(routes, shards[a], a, b, x, factors, sizes, shards[b])


def check_path(routes, held, a, b, x, factors, sizes, wanted):
    path = routes.path(a, b)
    assert [step.source for step in path] == [a, *[step.target for step in path]][: len(path)]
    for step in path:
        held = run_step(held, step, spec_of(x), factors, sizes)
    whole = unshard(held, factors, b, sizes, tuple(x.shape))
    assert same_bits(whole, x), path
    if P not in b and M not in b:
        assert all(same_bits(p, q) and p.stride() == q.stride() for p, q in zip(held, wanted, strict=True)), path


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_bytes_move_as_they_are(dtype, order):
    """float8 (NaN included), integers and booleans arrive bit for bit, and a column-major tensor stays column-major."""
    factors, sizes = ((2, 8), (12,)), (2, 2)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (16, 12), generator=torch.Generator().manual_seed(0))
    x = raw.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else raw.to(dtype)
    if order == (1, 0):
        x = x.t().contiguous().t()
    routes = routes_of(x, factors, sizes, "")
    for a in routes.layouts.layouts:
        for b in routes.layouts.layouts:
            held = shard(x, factors, a, sizes)
            for step in routes.path(a, b):
                held = run_step(held, step, spec_of(x), factors, sizes)
            wanted = shard(x, factors, b, sizes)
            assert all(same_bits(p, q) and p.stride() == q.stride() for p, q in zip(held, wanted, strict=True))


@st.composite
def tensors(draw):
    """(factors, sizes, order of dims in memory, number of a layout, number of another)."""
    dims = draw(st.lists(st.lists(st.sampled_from([2, 3, 4, 6]), min_size=0, max_size=3), min_size=1, max_size=3))
    factors = tuple(tuple(dim) for dim in dims)
    if prod(prod(dim) for dim in factors) > 4000:
        factors = factors[:1]
    sizes = draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (4, 2), (1, 2), (2, 2, 2), (2, 1, 3)]))
    order = draw(st.permutations(range(len(factors))))
    return factors, sizes, order, draw(st.integers(0)), draw(st.integers(0)), draw(st.randoms(use_true_random=False))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(tensors())
def test_random_paths(case):
    """Random shapes, memory orders, meshes and prices: a path leads to the shards of its target."""
    factors, sizes, order, first, second, random = case
    x = counted(factors, torch.float64, order)
    routes = routes_of(x, factors, sizes, random.choice(["", "P", "M", "PM"]), lambda step, spec: random.random())
    layouts = routes.layouts.layouts
    a, b = layouts[first % len(layouts)], layouts[second % len(layouts)]
    if routes.cost_us[routes.layouts.index[a], routes.layouts.index[b]] < float("inf"):
        check_path(routes, shard(x, factors, a, sizes), a, b, x, factors, sizes, shard(x, factors, b, sizes))


def test_what_never_moves():
    """Frozen splits and own scales have no place among the layouts that collectives join."""
    assert all(p.kind in "RSPM" for layout in universe(((4,),), (2, 2), ((0, 0),), "PM").layouts for p in layout)
    assert not list(steps(TensorSpec((4,), (1,), torch.float32), ((4,),), (R,), (2,), ()))
