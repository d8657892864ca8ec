"""Modules put in the place of others: under every name that those have, with all that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, TypeVar

from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)


def with_submodules(model: nn.Module, made: Mapping[str, nn.Module]) -> nn.Module:
    """The model, changed in place, with these modules under their names; the one named "", where it is the model."""
    for name, module in made.items():
        if not name:
            return module
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    return model


def with_state_of(linear: nn.Module, made: Layer, **settings: Any) -> Layer:
    """The new layer with everything that the old one holds - parameters, buffers, hooks - and settings of its own."""
    held = {name: copy(value) if isinstance(value, dict) else value for name, value in vars(linear).items()}
    vars(made).update({**held, **settings})
    return made
