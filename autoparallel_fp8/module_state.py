"""What a model is besides its tensors: classes, hooks, attributes of every module; to see whether it was changed.

A graph is of the model as it was when it was captured. A snapshot taken then and one taken later are equal unless an
attribute, a hook, a submodule or a tie was changed in between; where they differ, capturing again tells whether it
matters. What is looked at goes in by value (numbers, texts, containers, configs) or by identity (functions, anything
else).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import nn

_TENSORS = {"_parameters", "_buffers", "_modules", "training"}
"""Attributes that are looked at elsewhere, or say nothing of what forward computes."""
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_DEPTH = 4
"""How far configs inside of configs are followed."""

State = dict[str, Any]


class _Same:
    """An object that equals itself alone; held, so that its id is nobody else's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def module_state(model: nn.Module) -> State:
    """Name of each module -> its class, forward and attributes; "" has which parameters are one tensor too."""
    known: dict[int, Any] = {}
    state: State = {}
    for name, module in model.named_modules(remove_duplicate=False):
        kept = {key: value for key, value in vars(module).items() if key not in _TENSORS}
        state[name] = (_Same(type(module)), _Same(type(module).forward), _seen(kept, _DEPTH, known))
    first: dict[int, str] = {}
    ties = [first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)]
    return {**state, "": (*state[""], tuple(ties))}


def _seen(value: Any, depth: int, known: dict[int, Any]) -> Any:
    if isinstance(value, _VALUES):
        return type(value), value
    if isinstance(value, (nn.Module, torch.Tensor, type)) or callable(value) or not depth:
        return _Same(value)
    if isinstance(value, Mapping):
        return tuple((_key(k), _seen(v, depth, known)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_seen(item, depth, known) for item in value)
    if isinstance(value, Set):
        return type(value), tuple(sorted(map(repr, value)))
    if not hasattr(value, "__dict__"):
        return _Same(value)
    if id(value) not in known:
        known[id(value)] = _Same(value)  # what it holds of itself is itself
        known[id(value)] = (_Same(value), _seen(dict(vars(value)), depth - 1, known))
    return known[id(value)]


def _key(key: Any) -> Any:
    return (type(key), key) if isinstance(key, _VALUES) else _Same(key)
