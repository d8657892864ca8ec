"""The tree of modules that carries a parallel model's tensors: the names of the model, without its code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .capture.meta_copy import aliases_of
from .errors import UsageError
from .graph import dtype_name


class Holder(nn.Module):
    """A module of the model without its code: parameters and buffers, which the parallel model's one program reads."""

    def extra_repr(self) -> str:
        """A line a tensor: the whole, how it lies, and this rank's part."""
        return tensor_lines(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            UsageError: the parallel model runs as a whole.
        """
        raise UsageError(
            "a part of a parallel model does not run by itself", at="forward", do="call the parallel model as a whole"
        )

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            "a hook on a part of a parallel model would never run: the model is one program",
            at="hooks",
            do="hook the parallel model itself, or its parameters; or return the value from the model's forward",
        )

    register_forward_hook = _refuse_hook
    register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook
    register_backward_hook = _refuse_hook


class HolderList(Holder, nn.ModuleList):
    """Of an nn.ModuleList or nn.Sequential: it has a length, numbers and slices."""


class HolderDict(Holder, nn.ModuleDict):
    """Of an nn.ModuleDict: it has keys."""


def tensor_lines(module: nn.Module) -> str:
    """The module's own parameters and buffers as text, a line each.

    weight: float32 [64, 32] as [S(0), R], here [32, 32]
    """
    lines = []
    for name, x in [*module._parameters.items(), *module._buffers.items()]:
        if x is not None:
            text = f"{name}: {dtype_name(x.dtype)} {list(x.shape)}"
            if isinstance(x, DTensor):
                layout = ", ".join(map(str, x.placements))
                text += f" as [{layout}], here {list(x.to_local().shape)}"
            lines.append(text)
    return "\n".join(lines)


def hang(root: nn.Module, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Registers every parameter and buffer of the model below `root`, under all of its names.

    Args:
        root: without submodules.
        model: whose tree, names and persistence of buffers are taken over; None stays None.
        tensors: by the first name of each, as `aliases_of` has it.
    """
    kept = aliases_of(model)
    for prefix, module in model.named_modules(remove_duplicate=False):
        holder = _holder(root, model, prefix)
        for name, parameter in module._parameters.items():
            fqn = f"{prefix}.{name}" if prefix else name
            made = None if parameter is None else tensors[kept.get(fqn, fqn)]
            assert made is None or isinstance(made, nn.Parameter)
            holder.register_parameter(name, made)
        for name, buffer in {**module._buffers, **_plain_tensors(module)}.items():
            fqn = f"{prefix}.{name}" if prefix else name
            is_kept = name in module._buffers and name not in module._non_persistent_buffers_set
            holder.register_buffer(name, None if buffer is None else tensors[kept.get(fqn, fqn)], persistent=is_kept)


def _holder(root: nn.Module, model: nn.Module, path: str) -> nn.Module:
    holder, module = root, model
    for part in path.split(".") if path else []:
        module = module.get_submodule(part)
        if part not in holder._modules:
            is_list, is_dict = isinstance(module, (nn.ModuleList, nn.Sequential)), isinstance(module, nn.ModuleDict)
            holder.add_module(part, HolderList() if is_list else HolderDict() if is_dict else Holder())
        holder = holder._modules[part]  # type: ignore[assignment]
    return holder


def _plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensor attributes that are neither; the graph has them as buffers."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
