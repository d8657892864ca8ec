"""Dropout of attention weights, which is not planned: 0 in a model built from a config, and how a user sets it to 0.

Every family of transformers has its own field for it, T5 one field for every dropout; torch's module has an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_NOTES = "_autoparallel_notes"  # attribute of a model that was built from a config


def attention_dropout_cure(model: nn.Module) -> str:
    """How to turn off the dropout of attention weights: names the config's fields for it, or torch's modules."""
    fields: dict[str, str] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "model_type"):
            found = attention_dropouts(config) or _shared_dropouts(config)
            fields |= {f"{name}=0": type(config).__name__ for name in found}
    if fields:
        return f"build the model with {', '.join(fields)} in its {next(iter(fields.values()))}, or plan model.eval()"
    torchs = [name for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention) and m.dropout]
    if not torchs:
        return "set it to 0, or plan model.eval()"
    more = f", and so for {len(torchs) - 1} more" if len(torchs) > 1 else ""
    where = f"model.{torchs[0]}" if torchs[0] else "model"
    return f"build the nn.MultiheadAttention with dropout=0 ({where}.dropout = 0{more}), or plan model.eval()"


def attention_dropouts(config: Any) -> dict[str, float]:
    """The config's fields for dropout of attention weights that are above 0."""
    return {name: p for name, p in _dropouts(config).items() if "att" in name}


def _shared_dropouts(config: Any) -> dict[str, float]:
    """Its fields that stand for every dropout of the blocks, as T5's dropout_rate, where attention has none."""
    ends = ("activation", "classif", "embd", "head", "hidden", "path", "pooler", "qa_", "resid", "summary")
    return {name: p for name, p in _dropouts(config).items() if not any(end in name for end in ends)}


def _dropouts(config: Any) -> dict[str, float]:
    fields = vars(config).items()
    return {n: p for n, p in fields if "drop" in n and "layer" not in n and isinstance(p, float) and p > 0}


def build_notes(model: nn.Module) -> tuple[str, ...]:
    """What `build_from_config` made otherwise than the config says."""
    return tuple(getattr(model, _NOTES, ()))


def without_attention_dropout(model: nn.Module, was: Mapping[str, float]) -> None:
    """Attention dropout as 0 in a model built from a config, and a note of what it was.

    Args:
        model: built with the config's own fields for it at 0 already. Where it has none, as T5's, attention modules
            hold one that is for every dropout as a number, and others as an `nn.Dropout`, which stays.
        was: field -> what the config has.
    """
    found = set(was.values())
    has_field = any("att" in name and "drop" in name for name in vars(model.config))
    for module in () if has_field else model.modules():
        p = getattr(module, "dropout", None)
        if "Attention" in type(module).__name__ and isinstance(p, float) and p > 0:
            module.dropout = 0.0  # type: ignore[assignment]
            found.add(p)
    if found:
        shown = ", ".join(f"{p:g}" for p in sorted(found))
        setattr(model, _NOTES, (f"attention dropout {shown} of the config is planned as 0",))
