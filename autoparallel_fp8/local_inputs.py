"""The arguments of a parallel model: held against what was planned, and this rank's part of each.

An argument may be a global tensor, the same on every rank; the rank's own part; or a DTensor, as `sharded` makes it.
Only a DTensor says of itself how large the whole is, so only these may have another batch than the planned one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree  # what capture flattens arguments with; no public name in 2.11

from .capture.arguments import CALLED, argument_names, bound, defaults, named_arguments, positional_names
from .errors import UsageError
from .expansion import Space
from .graph import TensorSpec, dtype_name
from .layout import Factors, Layout, format_layout, local_factors
from .materialize import local_part
from .parts import coordinates
from .placements import as_dtensor, dtensor_placements
from .rank_steps import in_order

_MISSING = object()
"""In place of a value that is not there."""


class LocalInputs:
    """Inputs of one model on one rank.

    Args:
        model: whose signature names them.
        planned: name -> what was planned for it: a tensor, real or meta, with its global shape, or a plain value.
        layouts: of the tensors among them.
        space: that was planned.
        device_mesh: torch's, with the plan's axes.
        rank: of this process on the mesh.
    """

    def __init__(
        self,
        model: nn.Module,
        planned: Mapping[str, Any],
        layouts: Mapping[str, Layout],
        space: Space,
        device_mesh: Any,
        rank: int,
    ) -> None:
        self.model, self.planned, self.layouts = model, planned, layouts
        self.mesh, self.device_mesh = space.mesh, device_mesh
        self.place = coordinates(space.mesh.sizes)[rank]
        self.defaults = defaults(model)

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every leaf of the arguments by name.

        Raises:
            UsageError: forward does not take them, or they are not what was planned for.
        """
        bound(self.model, args, kwargs, None, CALLED)
        found = dict(zip(argument_names(self.model, args, kwargs), pytree.tree_leaves((args, kwargs)), strict=True))
        nests = dict(named_arguments(self.model, args, kwargs))
        for name in dict.fromkeys([*self.planned, *found]):
            new = found.get(name, _MISSING)
            if new is _MISSING and isinstance(self.planned[name], Tensor) and nests.get(name) is not None:
                kind = type(nests[name]).__name__
                raise self._unlike(name, self.planned[name], f"a {kind}", "pass a tensor")
            self._check(name, self.planned.get(name, _MISSING), new)
        return found

    def _check(self, name: str, old: Any, new: Any) -> None:
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            fits = old.dtype == new.dtype and old.ndim == new.ndim
            do = "cast it to the planned dtype, or plan with these inputs"
            if old.ndim != new.ndim:
                do = "pass as many dims as planned, or plan with these inputs"
        else:
            fits = self._same_value(name, old, new)
            do = "pass what was planned, or plan with these inputs"
        if not fits:
            raise self._unlike(name, old, _shown(new), do)
        if isinstance(new, DTensor) and new.device_mesh != self.device_mesh:
            raise UsageError(
                f"{name} is a DTensor on another DeviceMesh than the parameters",
                at=f"{type(self.model).__name__}.forward",
                do="pass what shard_inputs(batch) gives, or plain tensors",
            )
        if isinstance(new, Tensor) and new.is_meta:
            do = "pass a tensor with values; a meta tensor will do for planning"
            raise UsageError(f"{name} is on the meta device and has no values", at=name, do=do)
        if isinstance(new, Tensor) and new.requires_grad:
            raise UsageError(
                f"{name} requires a gradient, and gradients of inputs are not planned", at=name, do="pass x.detach()"
            )

    def _same_value(self, name: str, old: Any, new: Any) -> bool:
        """Of what is no tensor; leaving an argument out means its default, and None where it has none."""
        default = self.defaults.get(name)
        old, new = (default if value is _MISSING else value for value in (old, new))
        return not isinstance(old, Tensor) and not isinstance(new, Tensor) and bool(old == new)

    def _unlike(self, name: str, old: Any, new: str, do: str) -> UsageError:
        planned = "not planned" if old is _MISSING else f"planned as {_shown(old)}"
        return UsageError(f"{name} is {new}, and was {planned}", at=f"{type(self.model).__name__}.forward", do=do)

    def changed(self, leaves: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Global shapes of DTensors that were planned with other ones."""
        return {
            name: tuple(x.shape)
            for name, x in leaves.items()
            if isinstance(x, DTensor) and tuple(x.shape) != tuple(self.planned[name].shape)
        }

    def local(self, name: str, value: Tensor, spec: TensorSpec, local: TensorSpec, device: torch.device) -> Tensor:
        """The rank's part of an argument.

        Args:
            name: of the argument.
            value: what was passed.
            spec: of the whole.
            local: of the part.
            device: where it is wanted.
        """
        layout = self.layouts[name]
        if isinstance(value, DTensor):
            wanted = dtensor_placements(layout, plain_factors(tuple(value.shape)), self.mesh.sizes)
            moved = value if tuple(value.placements) == wanted else value.redistribute(self.device_mesh, wanted)
            part: Tensor = moved.to_local()
        elif tuple(value.shape) == local.shape:
            part = value
        elif tuple(value.shape) == spec.shape:
            part = self._part(value, layout)
        else:
            raise UsageError(
                f"{name} is {list(value.shape)}: neither the planned {list(spec.shape)} of all ranks together "
                f"nor one rank's {list(local.shape)}",
                at=f"{type(self.model).__name__}.forward",
                do="pass one of the two; for another batch what shard_inputs(batch) gives",
            )
        return in_order(part.detach().to(device), local.stride)

    def sharded(self, batch: Any) -> Any:
        """The same batch with every planned tensor as a DTensor of which the rank holds its part.

        Args:
            batch: one argument, a tuple or list of them, or a mapping of keyword arguments.

        Raises:
            UsageError: a tensor is none that was planned, or does not divide; or there is none.
        """
        args: tuple[Any, ...] = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        kwargs: dict[str, Any] = {}
        if isinstance(batch, Mapping):
            args, kwargs = (), dict(batch)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self._check_batch(batch, args, leaves)
        names = argument_names(self.model, args, kwargs)
        made = [self._sharded(name, x) for name, x in zip(names, leaves, strict=True)]
        if isinstance(batch, Mapping):
            return pytree.tree_unflatten(made, spec)[1]
        return pytree.tree_unflatten(made, pytree.tree_structure(batch))

    def _check_batch(self, batch: Any, args: tuple[Any, ...], leaves: list[Any]) -> None:
        """There are tensors in it, and no more positional arguments than forward takes."""
        if not any(isinstance(x, Tensor) for x in leaves):
            raise UsageError(
                f"the batch is a {type(batch).__name__} without a tensor in it",
                at="shard_inputs",
                do="pass a tensor, a tuple of positional arguments, or a mapping of keyword arguments",
            )
        names, rest = positional_names(self.model)
        if len(args) > len(names) and not rest:
            raise UsageError(
                f"the batch is {len(args)} positional arguments, and forward takes {len(names)}: {', '.join(names)}",
                at="shard_inputs",
                do="pass these, or a mapping of keyword arguments",
            )

    def _sharded(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        planned = self.planned.get(name)
        if not isinstance(planned, Tensor):
            known = ", ".join(key for key, x in self.planned.items() if isinstance(x, Tensor))
            raise UsageError(
                f"{name} is no tensor that was planned; those are {known}",
                at="shard_inputs",
                do="pass those, by position or by these names; or plan with this one among the inputs",
            )
        self._check(name, planned, value)
        if name not in self.layouts:
            return value  # nothing reads it
        layout, factors = self.layouts[name], plain_factors(tuple(value.shape))
        if not value.numel() or local_factors(factors, layout, self.mesh.sizes) is None:
            how = f"does not divide as [{format_layout(layout)}]" if value.numel() else "is empty"
            raise UsageError(
                f"{name} {list(value.shape)} {how}",
                at=f"mesh {self.mesh}",
                do="pass a batch that the mesh axes divide",
            )
        whole = value.contiguous()
        part = self._part(whole, layout).to(self.device_mesh.device_type)
        return as_dtensor(part, self.device_mesh, layout, factors, whole.shape, whole.stride())

    def _part(self, whole: Tensor, layout: Layout) -> Tensor:
        factors = plain_factors(tuple(whole.shape))
        return local_part(whole, factors, layout, self.mesh.sizes, self.place, tuple(whole.stride()))


def plain_factors(shape: tuple[int, ...]) -> Factors:
    """Each dim as one factor: enough for inputs, whose layouts split leading factors only."""
    return tuple((size,) if size > 1 else () for size in shape)


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    return f"{dtype_name(value.dtype)} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
