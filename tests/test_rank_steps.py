"""What a rank of a process group runs for a step is what `shards.run_step` says, in bits and memory order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor

from autoparallel_fp8 import rank_steps
from autoparallel_fp8.graph import TensorSpec
from autoparallel_fp8.layout import Factors, universe
from autoparallel_fp8.parts import coordinates
from autoparallel_fp8.rank_steps import rank_step, run_rank_step
from autoparallel_fp8.redistribute import Step, steps
from autoparallel_fp8.shards import run_step, same_bits, shard

TENSORS = [
    ((12, 8), ((12,), (8,))),
    ((24, 4), ((2, 3, 4), (4,))),
    ((4, 1, 12), ((4,), (), (3, 4))),
    ((12, 6), ((2, 2, 3), (6,))),
]
MESHES = [(2,), (3,), (2, 2), (2, 3), (2, 2, 2)]


class Groups:
    """Functional collectives among threads, one a rank, with the semantics of torch's."""

    def __init__(self, members: dict[str, list[int]]) -> None:
        self.members = members
        self.barriers = {name: threading.Barrier(len(ranks)) for name, ranks in members.items()}
        self.slots: dict[str, list[Tensor | None]] = {name: [None] * len(ranks) for name, ranks in members.items()}
        self.me = threading.local()

    def exchange(self, x: Tensor, group: str) -> list[Tensor]:
        assert x.is_contiguous()
        self.slots[group][self.me.number] = x
        self.barriers[group].wait(10)
        found = list(self.slots[group])
        self.barriers[group].wait(10)
        return found  # type: ignore[return-value]

    def wait_tensor(self, x: Tensor) -> Tensor:
        return x

    def all_reduce(self, x: Tensor, reduction: str, group: str) -> Tensor:
        return self.reduced(self.exchange(x, group), reduction)

    def all_gather_into_tensor(self, x: Tensor, count: int, group: str) -> Tensor:
        return torch.cat(self.exchange(x, group))

    def reduce_scatter_tensor(self, x: Tensor, reduction: str, count: int, group: str) -> Tensor:
        return self.reduced([y.chunk(count)[self.me.number] for y in self.exchange(x, group)], reduction)

    def all_to_all_single(self, x: Tensor, to: list[int], given: list[int], group: str) -> Tensor:
        return torch.cat([y.split(to)[self.me.number] for y in self.exchange(x, group)])

    def reduced(self, items: list[Tensor], reduction: str) -> Tensor:
        combine = torch.maximum if reduction == "max" else torch.add
        total = items[0].clone()
        for item in items[1:]:
            total = combine(total, item)
        return total


def run_threads(
    monkeypatch: pytest.MonkeyPatch,
    shards: list[Tensor],
    step: Step,
    spec: TensorSpec,
    factors: Factors,
    sizes: tuple[int, ...],
) -> list[Tensor]:
    """Every rank's result; members of a group stand in the order of their global ranks."""
    places = coordinates(sizes)
    members: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        members.setdefault(str([c for a, c in enumerate(place) if a not in step.axes]), []).append(rank)
    groups = Groups(members)
    monkeypatch.setattr(rank_steps, "_c10d", groups)
    found: list[Tensor] = [torch.empty(0)] * len(places)
    failed: list[BaseException] = []

    def work(group: str, number: int, rank: int) -> None:
        groups.me.number = number
        try:
            found[rank] = run_rank_step(shards[rank], rank_step(step, spec, factors, sizes, places[rank]), group)
        except BaseException as error:
            failed.append(error)
            groups.barriers[group].abort()

    threads = [
        threading.Thread(target=work, args=(group, number, rank))
        for group, ranks in members.items()
        for number, rank in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]
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
def test_a_rank_ends_with_what_the_step_says(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers, scatters, exchanges and slices of any dim and factor, over one axis and several, in any memory order."""
    draw, kinds = np.random.default_rng(0), set()
    for x, factors in tensors():
        spec = TensorSpec(tuple(x.shape), tuple(x.stride()), x.dtype)
        splits = tuple((d, f) for d, dim in enumerate(factors) for f in range(len(dim)))
        layouts = universe(factors, sizes, splits, "PM" if x.dtype == torch.float32 else "").layouts
        for number in draw.permutation(len(layouts))[:5]:
            possible = list(steps(spec, factors, layouts[number], sizes, splits))
            for k in draw.permutation(len(possible))[:3]:
                step, shards = possible[k], shard(x, factors, layouts[number], sizes)
                wanted = run_step(shards, step, spec, factors, sizes)
                kinds.add((step.kind, len(step.axes)))
                for a, b in zip(run_threads(monkeypatch, shards, step, spec, factors, sizes), wanted, strict=True):
                    assert same_bits(a, b), f"{spec} {factors} {step}"
                    strides = [s for n, s in zip(a.shape, a.stride(), strict=True) if n > 1]
                    assert strides == [s for n, s in zip(b.shape, b.stride(), strict=True) if n > 1], f"{spec} {step}"
    assert {kind for kind, _ in kinds} == {"slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"}
    assert len(sizes) == 1 or max(count for _, count in kinds) > 1
