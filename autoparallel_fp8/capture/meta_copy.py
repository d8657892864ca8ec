"""A copy of a model that holds no memory: same modules, every tensor on the meta device.

In goes any `nn.Module`, out comes a structural copy that may be converted, cast and traced while the user's model stays
untouched. Tensors keep shape, stride, dtype and `requires_grad`; a tensor shared by several modules (tied weights) is
shared in the copy too. Plain tensor attributes become non-persistent buffers, so that each has a name in the graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel_fp8.errors import CaptureError, UsageError
from autoparallel_fp8.integrations.torchao_mx import with_mx_linears


def meta_copy(model: nn.Module) -> nn.Module:
    """The same module tree with all tensors on the meta device; the model is only read.

    Raises:
        UsageError: a parameter is a DTensor: the model is sharded already; or torchao wrapped a weight whose products
            are not planned.
        CaptureError: a part of the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, tensor in _tensors(model):
        if id(tensor) not in memo:
            memo[id(tensor)] = meta_like(_plain(name, tensor))
    try:
        clone: nn.Module = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise CaptureError(
            f"the model holds something that cannot be copied: {error}",
            at=type(model).__name__,
            do="keep handles, locks and process groups out of module attributes",
        ) from error
    for module in clone.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)
    return with_mx_linears(clone, model)


def meta_like(tensor: Tensor) -> Tensor:
    """A meta tensor with the same shape, stride, dtype, `requires_grad`, and a Parameter if it was one."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def put_tensors(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replaces each parameter and buffer in place by what the function makes of it; shared ones stay shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = function(tensor)
                    held[name] = made[id(tensor)]  # type: ignore[assignment]


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Every parameter's and buffer's fqn -> the first fqn under which the same tensor is registered."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    for prefix, module in model.named_modules():
        held = [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]
        found += [(f"{prefix}.{name}".lstrip("."), value) for name, value in held if isinstance(value, Tensor)]
    return found


def _plain(name: str, tensor: Tensor) -> Tensor:
    """The tensor inside torchao's float8 all-gather wrapper; a DTensor is refused."""
    if hasattr(tensor, "device_mesh") and hasattr(tensor, "placements"):
        raise UsageError(
            f"{name} is a DTensor: the model is sharded already", at="model", do="pass the model before sharding it"
        )
    inner = getattr(tensor, "_tensor", None) if type(tensor) is not nn.Parameter else None
    if isinstance(inner, Tensor):
        plain: Tensor = nn.Parameter(inner.detach(), requires_grad=tensor.requires_grad)
        return plain
    return tensor
