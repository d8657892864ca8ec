"""The device mesh as plain data: named axes and their sizes, no devices and no process group.

Ranks are row-major: the last axis varies fastest, so on "dp=8,tp=8" with eight GPUs a node each tp group is one node.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import Any

from autoparallel_fp8.errors import UsageError

_HOW = 'write the mesh as "dp=8,tp=8", {"dp": 8, "tp": 8}, a tuple of sizes or a torch DeviceMesh'
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
MAX_DEVICES = 2**20
"""Of one mesh; more is a slip of the keyboard and would only run out of memory later."""


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh; prints as "dp=8"."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


@dataclass(frozen=True)
class Mesh:
    """Axes in order, the last one contiguous in the ranks; prints as "dp=8,tp=8".

    >>> mesh = parse_mesh("dp=8,tp=4")
    >>> mesh.num_devices, mesh.stride("dp"), mesh.stride("tp")
    (32, 4, 1)

    Raises:
        UsageError: no axis, a size below 1, two axes of one name, or more than `MAX_DEVICES` devices.
    """

    axes: tuple[MeshAxis, ...]

    def __post_init__(self) -> None:
        if not self.axes:
            raise UsageError("the mesh has no axis", at="mesh", do=_HOW)
        seen = set()
        for axis in self.axes:
            if axis.size < 1:
                size = axis.size if axis.size > -MAX_DEVICES else "below 0"
                raise UsageError(f'axis "{axis.name}" has size {size}', at="mesh", do="every size must be 1 or more")
            if axis.name in seen:
                raise UsageError(f'two axes are named "{axis.name}"', at="mesh", do="give each axis a name of its own")
            seen.add(axis.name)
        if self.num_devices > MAX_DEVICES:  # the sizes are not printed: they may have thousands of digits
            raise UsageError(
                f"the mesh has more than {MAX_DEVICES} devices",
                at=f"mesh axes {', '.join(self.names)}",
                do=f"the product of the sizes must be at most {MAX_DEVICES}",
            )

    def __str__(self) -> str:
        return ",".join(str(axis) for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def num_devices(self) -> int:
        return prod(self.sizes)

    def index(self, name: str) -> int:
        """Position of the axis.

        Raises:
            UsageError: the mesh has no such axis.
        """
        for position, axis in enumerate(self.axes):
            if axis.name == name:
                return position
        close = get_close_matches(str(name), self.names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f'no axis is named "{name}"', at=f"mesh {self}", do=f"{hint}axes: {', '.join(self.names)}")

    def axis(self, name: str) -> MeshAxis:
        """The axis of that name; raises as `index`."""
        return self.axes[self.index(name)]

    def stride(self, axis: str | MeshAxis) -> int:
        """How far apart in rank two neighbours along the axis are; raises as `index`."""
        position = self.index(axis.name if isinstance(axis, MeshAxis) else axis)
        return prod(self.sizes[position + 1 :])


def parse_mesh(value: Any) -> Mesh:
    """The mesh that the user wrote down.

    >>> str(parse_mesh({"dp": 2, "tp": 4}))
    'dp=2,tp=4'
    >>> str(parse_mesh((2, 4)))
    'axis0=2,axis1=4'

    Args:
        value: text "dp=8,tp=8", a mapping name -> size, a torch `DeviceMesh`, a tuple or list of sizes, or a `Mesh`.
            Axes without a name are called axis0, axis1, ...

    Raises:
        UsageError: none of these; no axis, a size that is no whole number of 1 or more, a bad or repeated name; a
            `DeviceMesh` whose ranks are not consecutive.
    """
    if isinstance(value, Mesh):
        return value
    if isinstance(value, str):
        pairs = _pairs_of_text(value)
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    elif hasattr(value, "mesh_dim_names"):
        pairs = _pairs_of_device_mesh(value)
    elif isinstance(value, (tuple, list)):
        pairs = _numbered(value)
    else:
        raise UsageError(f"a mesh cannot be made of {type(value).__name__}", at="mesh", do=_HOW)
    return Mesh(tuple(MeshAxis(_name(name), _size(name, size)) for name, size in pairs))


def _pairs_of_text(text: str) -> list[tuple[Any, Any]]:
    pairs: list[tuple[Any, Any]] = []
    for part in text.split(",") if text.strip() else []:
        name, equals, size = part.partition("=")
        if not equals or not re.fullmatch(r"[+-]?\d+", size.strip()):
            raise UsageError(f'"{part.strip()}" is not name=size', at=f'mesh "{text}"', do=_HOW)
        digits = size.strip()
        # more digits than int takes are a number above every limit all the same
        pairs.append((name.strip(), int(digits) if len(digits) < 1000 else MAX_DEVICES + 1))
    return pairs


def _pairs_of_device_mesh(device_mesh: Any) -> list[tuple[Any, Any]]:
    ranks = device_mesh.mesh.flatten().tolist()
    if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        raise UsageError(
            "the DeviceMesh does not number its ranks row by row",
            at=f"mesh {device_mesh}",
            do="pass the whole mesh as init_device_mesh makes it, or its names and sizes as a dict",
        )
    sizes = tuple(device_mesh.mesh.shape)
    names = device_mesh.mesh_dim_names
    return list(zip(names, sizes, strict=True)) if names else _numbered(sizes)


def _numbered(sizes: Iterable[Any]) -> list[tuple[Any, Any]]:
    return [(f"axis{position}", size) for position, size in enumerate(sizes)]


def _name(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        do = "begin with a letter; then letters, digits, _ . -"
        raise UsageError(f"{name!r} is no name for a mesh axis", at="mesh", do=do)
    return name


def _size(name: Any, size: Any) -> int:
    try:
        if isinstance(size, bool):
            raise TypeError
        return operator.index(size)
    except TypeError:
        raise UsageError(f'axis "{name}" has size {size!r}, not a whole number', at="mesh", do=_HOW) from None
