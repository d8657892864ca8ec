"""Models by name: presets, config files and factories, all built on the meta device.

    build("llama3-8b", num_layers=2)     a preset: a Hugging Face config beside this file
    build("path/to/config.json")         any causal language model that transformers knows
    build("package.module:factory")      a function without arguments that returns an nn.Module

The presets hold the published hyper-parameters of each model; `llama3-debug` is torchtitan's debug model.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.integrations.hugging_face import build_from_config

_FOLDER = Path(__file__).parent


def preset_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def preset_config(name: str) -> dict[str, Any]:
    """The Hugging Face config of a preset.

    Raises:
        UsageError: no preset has this name; the closest one and the list are in the message.
    """
    if name not in preset_names():
        close = difflib.get_close_matches(name, preset_names(), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(
            f"no preset is called {name!r}",
            at="model",
            do=f"{hint}presets: {', '.join(preset_names())}; or pass a config.json or package.module:factory",
        )
    config: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text())
    return config


def build(
    model: str | Path | Callable[[], nn.Module], *, num_layers: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """A model on the meta device, by name.

    >>> build("llama3-debug").config.num_hidden_layers
    6

    Args:
        model: a preset; path of a config.json; "package.module:factory"; or the factory itself.
        num_layers: blocks instead of the config's; a factory gets it as `num_layers=` if it takes that.
        dtype: of the parameters of presets and config files; a factory decides for itself.

    Raises:
        UsageError: nothing is called so, or it does not build.
    """
    if callable(model):
        return _from_factory(model, getattr(model, "__qualname__", "factory"), num_layers)
    text = str(model)
    if isinstance(model, Path) or text.endswith(".json") or Path(text).is_dir():
        return build_from_config(model, num_layers, dtype)
    if ":" in text:
        return _from_factory(_import(text), text, num_layers)
    return build_from_config(preset_config(text), num_layers, dtype)


def _import(text: str) -> Callable[..., Any]:
    module_name, _, name = text.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"cannot import {module_name!r}: {error}", at=f"model {text!r}", do="run where the package can be imported"
        ) from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UsageError(
            f"{module_name} has no function {name!r}",
            at=f"model {text!r}",
            do="name a function of that module that returns the model",
        )
    factory: Callable[..., Any] = found
    return factory


def _from_factory(factory: Callable[..., Any], name: str, num_layers: int | None) -> nn.Module:
    options: dict[str, Any] = {}
    if num_layers is not None:
        if "num_layers" not in inspect.signature(factory).parameters:
            raise UsageError(
                "the factory takes no num_layers", at=f"model {name!r}", do="drop num_layers, or add the argument"
            )
        options["num_layers"] = num_layers
    with torch.device("meta"):
        model = factory(**options)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the factory returned a {type(model).__name__}, not an nn.Module",
            at=f"model {name!r}",
            do="return the model itself",
        )
    return model
