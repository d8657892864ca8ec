"""DTensor's placements for a layout cut a tensor as the layout does, and where it can, DTensor joins it again."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from dtensor_ranks import failures_on_ranks
from test_rank_steps import TENSORS
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard  # what FSDP2 over TP makes; see placements.py

from autoparallel_fp8 import placements as module
from autoparallel_fp8.errors import ApplyError
from autoparallel_fp8.layout import Factors, Layout, M, P, R, frozen, own, split, universe
from autoparallel_fp8.parts import coordinates, parts
from autoparallel_fp8.placements import dtensor_placements, is_block, obstacle
from autoparallel_fp8.shards import same_bits, shard

EXAMPLES = [*TENSORS, ((16,), ((4, 4),)), ((16, 2), ((2, 2, 2, 2), (2,)))]


def layouts(factors: Factors, sizes: tuple[int, ...], is_leading: bool = False) -> tuple[Layout, ...]:
    """All without partial placements; only those of parameters, which split the leading factor of each dim."""
    splits = tuple((d, f) for d, dim in enumerate(factors) for f in range(len(dim)) if f == 0 or not is_leading)
    return universe(factors, sizes, splits, "").layouts


def cases(sizes: tuple[int, ...]) -> Iterator[tuple[Tensor, Factors, Layout]]:
    for shape, factors in EXAMPLES:
        for layout in layouts(factors, sizes):
            yield torch.arange(prod(shape)).reshape(shape), factors, layout


def all_placements(layout: Layout, factors: Factors, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Those of a refused layout too."""
    with mock.patch.object(module, "obstacle", return_value=None):
        return dtensor_placements(layout, factors, sizes)


def cut_by(placements: tuple[Any, ...], whole: Tensor, sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> Tensor:
    """A rank's part as torch documents the placements: axis by axis, each block of what is left into equal pieces."""
    for placement, size, here in zip(placements, sizes, coordinate, strict=True):
        if not isinstance(placement, Replicate):
            blocks = whole.chunk(getattr(placement, "split_factor", 1), placement.dim)
            whole = torch.cat([block.chunk(size, placement.dim)[here] for block in blocks], placement.dim)
    return whole


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (4, 2), (2, 2, 2), (3, 2, 2), (1, 2, 2)], ids=str)
def test_the_placements_cut_as_the_layout_does(sizes: tuple[int, ...]) -> None:
    """Any mix of axes on a dim, on one factor and several, and splits that run on into the next factors."""
    count = 0
    for whole, factors, layout in cases(sizes):
        placements = all_placements(layout, factors, sizes)
        count += any(isinstance(p, _StridedShard) for p in placements)
        for coordinate, want in zip(coordinates(sizes), shard(whole, factors, layout, sizes), strict=True):
            assert torch.equal(cut_by(placements, whole, sizes, coordinate), want), f"{factors} {layout}"
    assert count


def check_joins(meshes: list[tuple[int, ...]]) -> list[str]:
    """Cutting and joining by DTensor itself; what is refused is what it joins wrongly."""
    failures = []
    for sizes in meshes:
        mesh = DeviceMesh("cpu", torch.arange(prod(sizes)).view(sizes))
        if mesh.get_coordinate() is None:
            continue  # a smaller mesh, without this rank
        rank = coordinates(sizes).index(tuple(mesh.get_coordinate() or ()))
        for whole, factors, layout in cases(sizes):
            local, sentence = shard(whole, factors, layout, sizes)[rank], obstacle(layout, factors, sizes)
            placements = all_placements(layout, factors, sizes)
            made = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
            where = f"{sizes} {factors} {placements}"
            failures += [] if torch.equal(made, local) else [f"{where}: cut wrongly"]
            if is_joined(local, mesh, placements, whole) != (sentence is None):
                failures.append(f"{where}: joined {'rightly' if sentence else 'wrongly'}")
    return failures


def is_joined(local: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...], whole: Tensor) -> bool:
    """Whether DTensor makes the whole of its parts; where it does not, it mostly says nothing."""
    shape, stride = whole.shape, whole.stride()
    try:
        made = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()
    except (RuntimeError, ValueError):
        return False
    return same_bits(made, whole)


def test_dtensor_joins_what_is_not_refused(tmp_path: Path) -> None:
    """On gloo ranks, every layout of the examples; nothing is refused that torch would join."""
    assert not failures_on_ranks(check_joins, 4, tmp_path, [(2,), (1, 2), (4,), (2, 2)])


def test_fsdp_over_tensor_parallelism_is_written_as_fsdp_writes_it() -> None:
    """The later axis cuts first; a replicating axis in front, an axis of one device or another dim change nothing."""
    assert dtensor_placements((split(0), split(0)), ((16,), (4,)), (2, 4)) == (
        _StridedShard(0, split_factor=4),
        Shard(0),
    )
    hybrid = dtensor_placements((R, split(0), split(0)), ((16,), (4,)), (2, 2, 2))
    assert hybrid == (Replicate(), _StridedShard(0, split_factor=2), Shard(0))
    assert dtensor_placements((split(0), split(0)), ((16,), (4,)), (1, 2)) == (Shard(0), Shard(0))
    assert dtensor_placements((split(0), split(1)), ((16,), (4,)), (2, 2)) == (Shard(0), Shard(1))


def test_partial_sums_and_maxima() -> None:
    """They cut nothing, and say how DTensor is to join."""
    assert dtensor_placements((P, split(0)), ((4,),), (2, 2)) == (Partial("sum"), Shard(0))
    assert dtensor_placements((M,), ((4,),), (2,)) == (Partial("max"),)


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 2, 2), (4, 2), (3, 2, 2)], ids=str)
def test_every_layout_of_a_parameter_is_a_dtensor_of_one_block(sizes: tuple[int, ...]) -> None:
    """Split along leading factors: nothing in the way, one run of each dim, as checkpoints need it."""
    for _, factors in EXAMPLES:
        for layout in layouts(factors, sizes, is_leading=True):
            assert obstacle(layout, factors, sizes) is None and is_block(layout, factors, sizes)


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 3)], ids=str)
def test_a_block_is_one_run_of_positions(sizes: tuple[int, ...]) -> None:
    """Held against the positions themselves, on every rank."""
    found = set()
    for _, factors, layout in cases(sizes):
        held = [part.positions() for c in coordinates(sizes) for part in parts(factors, layout, sizes, c)]
        is_run = all(at == tuple(range(at[0], at[0] + len(at))) for at in held)
        assert is_block(layout, factors, sizes) == is_run, f"{factors} {layout}"
        found.add(is_run)
    assert found == {True, False}


def test_what_dtensor_cannot_hold_is_refused() -> None:
    """With the layout and the reason."""
    inside = r"DTensor cannot put a tensor under \[S\(0.1\), S\(0\)\] together: dim 0 is cut inside .*\n  do: take"
    with pytest.raises(ApplyError, match=inside):
        dtensor_placements((split(0, 1), split(0)), ((4, 4),), (2, 2))
    for placement, text in ((frozen(0), r"Frozen\(0\)"), (own(0), r"Own\(0\)")):
        with pytest.raises(ApplyError, match=rf"under \[{text}\] has parts with each rank's own scales, which DTensor"):
            dtensor_placements((placement,), ((4,),), (2,))


def test_the_examples_hold() -> None:
    """Those in the docstrings."""
    assert doctest.testmod(module).failed == 0
