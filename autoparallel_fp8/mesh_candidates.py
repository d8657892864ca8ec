"""The meshes that a number of GPUs can form: every ordered factorisation into one to three axes.

The order counts, also inside a node: the last axis is contiguous in the ranks, and where two axes split one dim, the
earlier one is the minor one, which alone can be gathered by itself (`redistribute.py`). So 4 x 2 and 2 x 4 are both
tried. A mesh with an axis that no dim of the model divides by splits nothing along it and is left out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from .errors import UsageError
from .graph import Graph
from .mesh import MAX_DEVICES, Mesh, MeshAxis

AUTO = "auto"
NAMES = (("dp",), ("dp", "tp"), ("dp", "cp", "tp"))
"""Of the axes, outermost first, by their number."""


def check_gpus(mesh: Any, gpus: Any) -> int | None:
    """How many GPUs to search meshes of; None where the mesh is given.

    Raises:
        UsageError: a mesh and a number, neither of them, a number that makes no mesh, or a process of a running group.
    """
    is_auto = isinstance(mesh, str) and mesh.strip() == AUTO
    if not is_auto and gpus is None:
        return None
    if not is_auto:
        raise UsageError(
            f"a mesh and a number of GPUs are given: {mesh} and {gpus!r}", at="mesh and gpus", do="give one of them"
        )
    if gpus is None:
        raise UsageError('mesh "auto" needs the number of GPUs', at="gpus", do="give it, such as gpus=64")
    count = _whole(gpus)
    if count < 2:
        do = 'give 2 or more, or the mesh "dp=1"' if count == 1 else "give 2 or more"
        raise UsageError(f"{count} {'GPU forms' if count == 1 else 'GPUs form'} no mesh to choose", at="gpus", do=do)
    if count > MAX_DEVICES:
        raise UsageError(f"more than {MAX_DEVICES} GPUs", at="gpus", do=f"give at most {MAX_DEVICES}")
    _require_no_group()
    return count


def _whole(gpus: Any) -> int:
    try:
        if isinstance(gpus, bool):
            raise TypeError
        return operator.index(gpus)
    except TypeError:
        raise UsageError(f"gpus is {gpus!r}, not a whole number", at="gpus", do="give 2 or more, such as 64") from None


def _require_no_group() -> None:
    """Ranks that run already have their mesh."""
    from torch import distributed

    if not distributed.is_available():
        return
    if distributed.is_initialized() or distributed.is_torchelastic_launched():
        raise UsageError(
            "meshes are searched before a run, and this process is a rank of one",
            at=f'mesh "{AUTO}"',
            do="search in a process of its own, save the plan, and load it in the ranks; or pass the run's mesh",
        )


def check_whole(name: str, value: Any, most: int | None = None) -> int:
    """The number, if it is a whole one from 1 to `most`."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < 1 or (most is not None and value > most):
        wanted = "of 1 or more" if most is None else f"from 1 to {most}"
        raise UsageError(f"{name} is {value!r}", at=name, do=f"give a whole number {wanted}")
    return int(value)


def flat(gpus: int) -> Mesh:
    """All of them along one axis."""
    return Mesh((MeshAxis(NAMES[0][0], gpus),))


def candidates(gpus: int, max_axes: int = 2) -> tuple[Mesh, ...]:
    """All meshes of so many GPUs without axes of one device: fewer axes first, then small inner axes first.

    >>> [str(mesh) for mesh in candidates(8)]
    ['dp=8', 'dp=4,tp=2', 'dp=2,tp=4']

    Args:
        gpus: 2 or more.
        max_axes: 1 to 3.
    """
    found = []
    for names in NAMES[:max_axes]:
        for sizes in _factorisations(gpus, len(names)):
            found.append(Mesh(tuple(MeshAxis(name, size) for name, size in zip(names, sizes, strict=True))))
    return tuple(found)


def _factorisations(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ordered factors of 2 or more, the first one falling."""
    if parts == 1:
        if count > 1:
            yield (count,)
        return
    for first in range(count // 2, 1, -1):
        if count % first == 0:
            for rest in _factorisations(count // first, parts - 1):
                yield (first, *rest)


def useless_axis(mesh: Mesh, graph: Graph) -> MeshAxis | None:
    """The first axis whose size divides no dim of any tensor of the graph; None where each divides one."""
    sizes = {size for node in graph.nodes for spec in node.outputs for size in spec.shape}
    return next((axis for axis in mesh.axes if not any(size and size % axis.size == 0 for size in sizes)), None)
