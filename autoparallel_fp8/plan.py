"""The plan as plain data: what was asked, what was chosen, what it costs, how good it is proven to be.

Made by `assemble.py`, written and read here as JSON (same plan, same bytes), shown by `report/`. A plan that was just
made also answers `explain` (see `explain.py`); one read from a file is data alone.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from .errors import PlanError, UsageError

if TYPE_CHECKING:
    from .explain import Explanation
    from .verify import Verification

PLAN_VERSION = 1
_LIVE = {"explain_with", "verify_with"}
"""Fields that no file has: what a plan that was just made can still be asked."""

_STEP_TIMES = ("compute", "exposed_comm", "hidden_comm", "optimizer", "total")
_MEMORY = ("parameters", "gradients", "optimizer", "activations", "total", "limit")


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter: where it lies and why.

    Attributes:
        shape, dtype: of the whole parameter.
        placements: one a mesh axis, as text (`S(0)`).
        split: dim -> axes that split it, major to minor.
        local_shape: on one rank.
        bytes: on one rank, without gradient and optimizer state.
        why: what happens to it in a step, in words.
    """

    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    split: Mapping[str, tuple[str, ...]]
    local_shape: tuple[int, ...]
    bytes: int
    why: str


@dataclass(frozen=True)
class NodePlan:
    """One op: the layouts it reads and makes, local shapes of its results, its time."""

    name: str
    op: str
    inputs: tuple[str, ...]
    output: tuple[str, ...]
    local_shapes: tuple[tuple[int, ...], ...]
    compute_us: float


@dataclass(frozen=True)
class CollectivePlan:
    """One collective of a step, in the order of the program.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all".
        axis: mesh axes, joined by "+".
        tensor: the value that moves.
        reader: the op, copy, parameter or output that it moves for.
        dtype: of the elements on the wire.
        bytes: the gathered or unreduced tensor on one device.
        us: its time, hidden or not.
        hidden: may overlap with compute.
        source, target: layouts.
    """

    kind: str
    axis: str
    tensor: str
    reader: str
    dtype: str
    bytes: int
    us: float
    hidden: bool
    source: str
    target: str


@dataclass(frozen=True)
class Plan:
    """A sharding plan. `print(plan)` shows it; `save` and `load` keep it.

    Attributes: as in `plan.json`, see docs. Times are microseconds, memory is bytes on one device, sizes are global.
    """

    version: int
    torch: str
    graph: str
    model: str
    mesh: Mapping[str, int]
    device: str
    recipe: str | None
    inputs: Mapping[str, str]
    settings: Mapping[str, Any]
    status: str
    objective_us: float
    lower_bound_us: float
    gap: float
    step_time_us: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    parameters: Mapping[str, ParameterPlan]
    nodes: tuple[NodePlan, ...]
    collectives: tuple[CollectivePlan, ...]
    replicated_ops: tuple[str, ...]
    skipped: Mapping[str, str]
    notes: tuple[str, ...]
    explain_with: Callable[[str], Explanation] | None = field(default=None, repr=False, compare=False)
    verify_with: Callable[[], Verification] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        from .report.text import format_plan

        return format_plan(self)

    def to_json(self) -> str:
        """The plan as JSON text: stable order, no times or dates of its making."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _LIVE}
        data["parameters"] = {name: asdict(p) for name, p in self.parameters.items()}
        data["nodes"] = [asdict(node) for node in self.nodes]
        data["collectives"] = [asdict(c) for c in self.collectives]
        return json.dumps(_rounded(data), indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `plan.json`, whole or not at all.

        Raises:
            UsageError: the file cannot be written.
        """
        _check_path(path)
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Raises:
            PlanError: no such file, no plan, or of a version this library does not read.
            UsageError: this is no path.
        """
        _check_path(path)
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read the plan: {error}", at=str(path)) from error
        except json.JSONDecodeError as error:
            raise PlanError(f"the file is no JSON: {error}", at=str(path)) from error
        return cls.from_data(data, str(path))

    @classmethod
    def from_data(cls, data: Any, where: str = "plan") -> Plan:
        """The plan in parsed JSON; raises PlanError as `load` does."""
        if not isinstance(data, dict) or "version" not in data:
            raise PlanError(
                "the file holds no plan", at=where, do="make one with `autoparallel-fp8 plan MODEL --json FILE`"
            )
        if data["version"] != PLAN_VERSION:
            raise PlanError(
                f"plan version {data['version']}, but this library reads version {PLAN_VERSION}",
                at=where,
                do="plan again",
            )
        missing = sorted({f.name for f in fields(cls)} - _LIVE - set(data))
        if missing:
            raise PlanError(f"the plan lacks {', '.join(missing)}", at=where, do="plan again")
        known = {f.name: _tuples(data[f.name]) for f in fields(cls) if f.name not in _LIVE}
        try:
            known["parameters"] = {name: ParameterPlan(**p) for name, p in known["parameters"].items()}
            known["nodes"] = tuple(NodePlan(**node) for node in known["nodes"])
            known["collectives"] = tuple(CollectivePlan(**c) for c in known["collectives"])
        except (TypeError, AttributeError) as error:
            raise PlanError(
                f"the plan does not have the fields of version {PLAN_VERSION}: {error}", at=where
            ) from error
        plan = cls(**known)
        _check_types(plan, "", where)
        for name, parameter in plan.parameters.items():
            _check_types(parameter, f"parameters[{name!r}].", where)
        for kind, items in (("nodes", plan.nodes), ("collectives", plan.collectives)):
            for i, item in enumerate(items):
                _check_types(item, f"{kind}[{i}].", where)
        for name, keys in (("step_time_us", _STEP_TIMES), ("memory_bytes", _MEMORY)):
            lacking = [key for key in keys if key not in getattr(plan, name)]
            if lacking:
                raise PlanError(f"{name} of the plan lacks {', '.join(lacking)}", at=where, do="plan again")
        return plan

    def explain(self, name: str) -> Explanation:
        """Every alternative of a parameter: what it would cost, or the sentence that forbids it.

        Raises:
            PlanError: the plan was read from a file, or has no such parameter.
        """
        if self.explain_with is None:
            raise PlanError(
                "a plan read from a file knows the choice, not the alternatives",
                do="run `autoparallel-fp8 explain` with the model, or AutoParallel(...).optimize() again",
            )
        return self.explain_with(name)

    def verify(self) -> Verification:
        """The plan run on every rank of its mesh in this process, on smaller tensors, held against the unsharded model.

        Raises:
            PlanError: the plan was read from a file.
        """
        if self.verify_with is None:
            raise PlanError(
                "a plan read from a file holds no graph to run",
                do="run `autoparallel-fp8 verify` with the model, or AutoParallel(...).optimize() again",
            )
        return self.verify_with()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent or Path(), prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UsageError(
            f"cannot write {target}: {error.strerror}", do="name a file in a folder that can be written"
        ) from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Fail now rather than after the work: the folder exists, takes files, and the path is no folder.

    Raises:
        UsageError: as `write_text` would.
    """
    target = Path(path)
    folder = target.parent
    reason = None
    if target.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"there is no folder {folder}"
    elif not os.access(folder, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        reason = "it may not be written"
    if reason:
        raise UsageError(f"cannot write {target}: {reason}", do="name a file in a folder that can be written")


def _check_path(path: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"the path is a {type(path).__name__}", at="path", do='name a file, such as "plan.json"')


@cache
def _types(record: type) -> dict[str, Any]:
    """Field -> type, without the ones that no file has."""
    hints = get_type_hints(record, localns={"Explanation": object, "Verification": object})
    return {name: hint for name, hint in hints.items() if name not in _LIVE}


def _check_types(record: Any, prefix: str, where: str) -> None:
    for name, hint in _types(type(record)).items():  # type: ignore[arg-type]  # a class is hashable
        value = getattr(record, name)
        if not _fits(value, hint):
            shown = str(hint).replace("collections.abc.", "") if get_origin(hint) else hint.__name__
            raise PlanError(
                f"{prefix}{name} of the plan is a {type(value).__name__} that does not read as {shown}",
                at=where,
                do="plan again",
            )


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type as the fields here are declared."""
    kind, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind is Mapping:
        return isinstance(value, Mapping) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if kind is tuple:
        return isinstance(value, tuple) and all(_fits(item, inner[0]) for item in value)
    if kind is not None:  # X | None
        return any(_fits(value, choice) for choice in inner)
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint)


def _rounded(value: Any) -> Any:
    """Floats to 9 significant digits, mappings and sequences as JSON has them."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value
