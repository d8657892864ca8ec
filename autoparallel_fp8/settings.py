"""What the user asked of a planner, checked where it is handed over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from .cost_models import DeviceProfile, Optimizer, Topology
from .errors import PlanError, UsageError
from .graph import dtype_name


@dataclass
class Settings:
    """How to plan; every field is an argument of `AutoParallel` of the same name."""

    recipe: str | None
    device: DeviceProfile
    mixed_precision: Any
    recompute: str
    scale_scope: str
    memory_limit: int
    optimizer: Optimizer
    strict: bool
    emulate: bool
    loss: str | None
    topology: Topology
    time_limit: float | None
    notes: list[str] = field(default_factory=list)

    def recorded(self) -> dict[str, Any]:
        """What a plan file says of them."""
        policy = self.mixed_precision
        names = ("param_dtype", "reduce_dtype", "output_dtype")
        dtypes = {name: getattr(policy, name) for name in names if policy is not None and getattr(policy, name, None)}
        found: dict[str, Any] = {name: dtype_name(dtype) for name, dtype in dtypes.items()}
        if found and not getattr(policy, "cast_forward_inputs", True):
            found["cast_forward_inputs"] = False
        return {
            "mixed_precision": found or None,
            "recompute": self.recompute,
            "scale_scope": self.scale_scope,
            "emulate": self.emulate,
            "loss": self.loss,
            "optimizer_state_bytes": self.optimizer.state_bytes,
            "hidden_share": self.device.hidden_share,
            "topology": asdict(self.topology) if self.topology != Topology() else None,
            "strict": self.strict,
        }


def recall(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `AutoParallel` that `Settings.recorded` tells; what an older file lacks is left to its default.

    Raises:
        PlanError: something that no plan file says.
    """
    names = ("recompute", "scale_scope", "emulate", "loss", "strict")
    found = {name: recorded[name] for name in names if name in recorded}
    found["optimizer"] = recorded.get("optimizer_state_bytes")
    policy, topology = recorded.get("mixed_precision"), recorded.get("topology")
    try:
        if topology is not None:
            found["topology"] = Topology(**topology)
        if policy is not None:
            found["mixed_precision"] = _policy(policy)
    except (TypeError, AttributeError) as error:
        raise PlanError(f"settings of the plan do not read: {error}", do="plan again") from error
    return found


def _policy(recorded: Mapping[str, Any]) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        **{name: getattr(torch, value) if isinstance(value, str) else value for name, value in recorded.items()}
    )


def parse_bytes(value: float | str | None, default: int) -> int:
    """Bytes from a number, or from text such as "64 GiB", "80GB", "1.5e10"; the default for None.

    Raises:
        UsageError: no number above 0.
    """
    if value is None:
        return default
    units = {
        "": 1,
        "B": 1,
        "KB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
        "TB": 1e12,
        "KIB": 2**10,
        "MIB": 2**20,
        "GIB": 2**30,
        "TIB": 2**40,
    }
    text = str(value).strip()
    number = text.rstrip("BKMGTIbkmgti ")
    try:
        count = float(number) * units[text[len(number) :].strip().upper()]
    except (ValueError, KeyError):
        count = -1.0
    if not 0 < count < 2**60:
        raise UsageError(
            f"memory limit {value!r} is no size above 0", at="memory_limit", do='write bytes, "64 GiB" or "80 GB"'
        )
    return int(count)


def check_kinds(model: Any, topology: Any, mixed_precision: Any, progress: Any) -> None:
    """Arguments of a planner that must be of one kind.

    Raises:
        UsageError: one is not; the message names it.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}, not an nn.Module", at="model")
    if topology is not None and not isinstance(topology, Topology):
        raise UsageError(f"topology is a {type(topology).__name__}", at="topology", do="pass a Topology(...)")
    if mixed_precision is not None and not hasattr(mixed_precision, "param_dtype"):
        raise UsageError(
            f"mixed_precision is {mixed_precision!r}",
            at="mixed_precision",
            do="pass torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)",
        )
    if progress is not None and not callable(progress):
        raise UsageError(f"progress is a {type(progress).__name__}", at="progress", do="pass a function of a text")


def check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        words = ", ".join(str(choice) for choice in known)
        raise UsageError(f"{name} is {value!r}", at=name, do=f"use one of {words}")


def check_number(name: str, value: float | None, least: float | None = None) -> float | None:
    """The number, if it is finite and above 0 (or at least `least`)."""
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not (value > 0 if least is None else value >= least):
        wanted = "above 0" if least is None else f"of {least:g} or more"
        raise UsageError(f"{name} is {value!r}", at=name, do=f"give a number {wanted}")
    return value
