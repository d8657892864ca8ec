"""The collectives of a schedule over torch's process groups, one for each set of mesh axes that they run over.

Functional collectives (torch.ops._c10d_functional) rather than torch.distributed's public ones, which write into a
buffer: they start without waiting, Inductor knows them, and several tensors go in one call. They are the same in torch
2.11 to 2.14, and gloo and NCCL have all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ApplyError
from .in_memory import groups
from .items import Begin, Item
from .program import RunStep
from .rank_steps import RankStep
from .same_ranks import lost

_c10d = torch.ops._c10d_functional


class ProcessGroups:
    """Collectives of this rank.

    Args:
        device_mesh: torch's `DeviceMesh` with the plan's axes; its ranks number row by row.
        wanted: numbers of the axes that collectives run over, each in mesh order; the same on every rank.
        names: of the axes.

    Raises:
        ApplyError: the ranks of a group do not ascend.
    """

    def __init__(self, device_mesh: Any, wanted: Iterable[tuple[int, ...]], names: Sequence[str]) -> None:
        self.axis_names = names
        self.group_names: dict[tuple[int, ...], str] = {}
        sizes = tuple(device_mesh.mesh.shape)
        ranks = device_mesh.mesh.flatten().tolist()
        for axes in sorted(set(wanted)):
            lists = [[ranks[i] for i in members] for members in groups(axes, sizes)]
            self._require_order(axes, lists)
            if len(axes) == 1:
                group = device_mesh.get_group(axes[0])
            elif len(ranks) == dist.get_world_size():
                group, _ = dist.new_subgroups_by_enumeration(lists)
            else:  # ranks that are not on the mesh do not come here
                (own,) = (members for members in lists if dist.get_rank() in members)
                group = dist.new_group(own, use_local_synchronization=True)
            self.group_names[axes] = group.group_name

    def begin(self, steps: Sequence[RankStep], axes: tuple[int, ...], flats: list[Tensor]) -> list[Tensor]:
        """Starts collectives of one kind and dtype as one call."""
        name, step = self.group_names[axes], steps[0]
        try:
            return _started(step, name, flats)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._lost(step.kind, axes, error) from error

    def end(self, started: list[Tensor], moves: Sequence[RunStep]) -> list[Tensor]:
        """Waits for them."""
        try:
            return [_c10d.wait_tensor(x) for x in started]
        except RuntimeError as error:
            raise self._lost(moves[0].step.kind, moves[0].step.axes, error) from error

    def _lost(self, kind: str, axes: tuple[int, ...], error: RuntimeError) -> ApplyError:
        return lost(f"{kind} over {self._name(axes)}", error)

    def _name(self, axes: tuple[int, ...]) -> str:
        return "+".join(self.axis_names[a] for a in axes)

    def _require_order(self, axes: tuple[int, ...], lists: Sequence[Sequence[int]]) -> None:
        """torch sorts the ranks of a group; pieces are in the mesh's order."""
        for members in lists:
            if list(members) != sorted(members):
                raise ApplyError(
                    f"the ranks of the mesh over {self._name(axes)} do not ascend: {', '.join(map(str, members))}",
                    at="mesh",
                    do="pass a DeviceMesh whose ranks ascend along each axis and row by row",
                )


def _started(step: RankStep, name: str, flats: list[Tensor]) -> list[Tensor]:
    if step.kind == "all_to_all":
        (flat,) = flats
        each = [flat.shape[0] // step.ways] * step.ways
        return [_c10d.all_to_all_single(flat, each, each, name)]
    if len(flats) == 1:
        (flat,) = flats
        if step.kind == "all_gather":
            return [_c10d.all_gather_into_tensor(flat, step.ways, name)]
        if step.kind == "all_reduce":
            return [_c10d.all_reduce(flat, step.reduction, name)]
        return [_c10d.reduce_scatter_tensor(flat, step.reduction, step.ways, name)]
    if step.kind == "all_gather":
        return list(_c10d.all_gather_into_tensor_coalesced(flats, step.ways, name))
    if step.kind == "all_reduce":
        return list(_c10d.all_reduce_coalesced(flats, step.reduction, name))
    return list(_c10d.reduce_scatter_tensor_coalesced(flats, step.reduction, step.ways, name))


def axes_of(items: Iterable[Item]) -> list[tuple[int, ...]]:
    """The axes that collectives run over, each set once."""
    return sorted({item.moves[0].step.axes for item in items if isinstance(item, Begin)})
