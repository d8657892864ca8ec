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
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoparallel_fp8.errors import AutoParallelError, UsageError
from autoparallel_fp8.integrations.hugging_face import build_from_config, one_line

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
    if isinstance(model, Path) or text.endswith(".json") or os.path.isdir(text):
        return build_from_config(model, num_layers, dtype)
    if ":" in text:
        return _from_factory(_import(text), text, num_layers)
    return build_from_config(preset_config(text), num_layers, dtype)


def _import(text: str) -> Callable[..., Any]:
    module_name, _, name = text.partition(":")
    if not name or not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(
            f"{text!r} names no function of a module",
            at="model",
            do="write package.module:factory, the module from its top package on",
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"cannot import {module_name!r}: {error}",
            at=_where(text, error),
            do="run in the folder that holds it, or where its package is installed",
        ) from error
    # The module is the user's and may raise anything while it runs; a script may exit.
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"importing {module_name!r} raises {one_line(error)}", at=_where(text, error), do="mend the module"
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
    if isinstance(factory, nn.Module):
        raise UsageError(
            f"this is a {type(factory).__name__}, not a function that returns a model",
            at=f"model {name!r}",
            do="name a function without arguments that returns the model",
        )
    options: dict[str, Any] = {}
    signature = _signature(factory)
    if num_layers is not None:
        if signature is not None and "num_layers" not in signature.parameters:
            raise UsageError(
                "the factory takes no num_layers", at=f"model {name!r}", do="drop num_layers, or add the argument"
            )
        options["num_layers"] = num_layers
    try:
        if signature is not None:
            signature.bind(**options)
    except TypeError as error:
        raise UsageError(
            f"the factory does not build without arguments: {error}",
            at=f"model {name!r}",
            do="name a function without arguments, or give them defaults",
        ) from error
    try:
        with torch.device("meta"):
            model = factory(**options)
    except AutoParallelError:
        raise
    # The factory is the user's code and may raise anything.
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"the factory raises {one_line(error)}",
            at=_where(name, error),
            do="mend the factory; it runs under torch.device('meta'), where tensors hold no numbers",
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the factory returned a {type(model).__name__}, not an nn.Module",
            at=f"model {name!r}",
            do="return the model itself",
        )
    return model


def _signature(factory: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(factory)
    except (TypeError, ValueError):  # some builtins have none
        return None


def _where(name: str, error: BaseException) -> str:
    """The model as the user wrote it, and the line of their code that raised, where it is known."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if os.path.isabs(f.filename) and not _is_ours(f)]
    if isinstance(error, SyntaxError) or not own:
        return f"model {name!r}"  # a syntax error's text has its own line
    return f"model {name!r}, {own[-1].filename}:{own[-1].lineno}"


def _is_ours(frame: traceback.FrameSummary) -> bool:
    places = (Path(torch.__file__).parent, _FOLDER.parent, Path(importlib.__file__).parent)
    return any(place in Path(frame.filename).parents for place in places)
