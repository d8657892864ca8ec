"""The plan as plain data: what was asked, what was chosen, what it costs, how good it is proven to be.

Made by `assemble.py`, written and read here as JSON (same plan, same bytes), shown by `report/`. A plan that was just
made also runs and answers `explain` (`live.py`); one read from a file does so with the model (`restore.py`).
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from .errors import PlanError, UsageError
from .files import check_path, write_text
from .plan_checks import (
    CHANGED,
    LIVE,
    NESTED,
    check_agreement,
    check_data,
    check_regrets,
    check_types,
    digest,
    is_changed,
)

if TYPE_CHECKING:
    from .explain import Explanation, Overview
    from .live import Live
    from .parallel_module import ParallelModule
    from .plan_diff import PlanDiff
    from .verify import Verification

PLAN_VERSION = 1

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
class AlternativePlan:
    """A layout that a parameter could have instead.

    Attributes:
        placements: one a mesh axis, as text.
        regret_us: how much slower the best plan with it is, at least and at most, the second null where no plan with it
            was found; null altogether where no plan has it.
        why: what forbids it then.
    """

    placements: tuple[str, ...]
    regret_us: tuple[float | None, ...] | None
    why: str = ""


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
    bound_weight: float = 1.0
    alternatives: Mapping[str, tuple[AlternativePlan, ...]] = field(default_factory=dict)
    live: Live | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        from .report.text import format_plan

        return format_plan(self)

    def to_json(self) -> str:
        """The plan as JSON text: stable order, no times or dates of its making."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in LIVE | NESTED}
        data["parameters"] = {name: self._parameter_data(name) for name in self.parameters}
        data["nodes"] = [asdict(node) for node in self.nodes]
        data["collectives"] = [asdict(c) for c in self.collectives]
        data = _rounded(data)
        return json.dumps({**data, "digest": digest(data)}, indent=1) + "\n"

    def _parameter_data(self, name: str) -> dict[str, Any]:
        data = asdict(self.parameters[name])
        if name in self.alternatives:
            data["alternatives"] = [asdict(one) for one in self.alternatives[name]]
        return data

    def save(self, path: str | os.PathLike[str], *, regrets: bool = False) -> None:
        """Write `plan.json`, whole or not at all.

        Args:
            path: of the file.
            regrets: with every alternative of every parameter, `with_regrets`; takes some seconds.

        Raises:
            UsageError: the file cannot be written.
            PlanError: as `with_regrets` raises.
        """
        check_path(path)
        write_text(path, (self.with_regrets() if regrets else self).to_json())

    def with_regrets(self, model: Any = None) -> Plan:
        """The same plan with `alternatives`: of each parameter every other layout, and an interval of its regret.

        Args:
            model: the module that the plan was made for, where the plan was read from a file without them.

        Raises:
            PlanError: the plan was read from a file without them and no model is given.
        """
        if self.alternatives:
            return self
        from .explain import recorded

        return replace(self, alternatives=recorded(self.explain(model=model)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Raises:
            PlanError: no such file, no plan, or of a version this library does not read.
            UsageError: this is no path.
        """
        check_path(path)
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, UnicodeDecodeError) as error:
            do = "name a file that plan.save(path) or `autoparallel-fp8 plan MODEL --json FILE` wrote"
            raise PlanError(f"cannot read the plan: {error}", at=str(path), do=do) from error
        except json.JSONDecodeError as error:
            do = "copy the whole file again, or plan again"
            raise PlanError(f"the file is no JSON, or cut off: {error}", at=str(path), do=do) from error
        return cls.from_data(data, str(path))

    @classmethod
    def from_data(cls, data: Any, where: str = "plan") -> Plan:
        """The plan in parsed JSON; raises PlanError as `load` does."""
        check_data(data, cls, PLAN_VERSION, where)
        kept = [f.name for f in fields(cls) if f.name not in LIVE | NESTED and f.name in data]
        known = {name: _tuples(data[name]) for name in kept}
        try:
            others = {name: p.pop("alternatives") for name, p in known["parameters"].items() if "alternatives" in p}
            known["alternatives"] = {name: tuple(AlternativePlan(**a) for a in found) for name, found in others.items()}
            known["parameters"] = {name: ParameterPlan(**p) for name, p in known["parameters"].items()}
            known["nodes"] = tuple(NodePlan(**node) for node in known["nodes"])
            known["collectives"] = tuple(CollectivePlan(**c) for c in known["collectives"])
        except TypeError as error:
            raise PlanError(
                f"the plan does not have the fields of version {PLAN_VERSION}: {error}", at=where, do="plan again"
            ) from error
        plan = cls(**known)
        check_types(plan, "", where)
        for name, parameter in plan.parameters.items():
            check_types(parameter, f"parameters[{name!r}].", where)
        check_regrets(plan.alternatives, where)
        for kind, items in (("nodes", plan.nodes), ("collectives", plan.collectives)):
            for i, item in enumerate(items):
                check_types(item, f"{kind}[{i}].", where)
        for name, keys in (("step_time_us", _STEP_TIMES), ("memory_bytes", _MEMORY)):
            lacking = [key for key in keys if key not in getattr(plan, name)]
            if lacking:
                raise PlanError(f"{name} of the plan lacks {', '.join(lacking)}", at=where, do="plan again")
        check_agreement(plan.parameters, plan.nodes, where)
        if is_changed(data) and CHANGED not in plan.notes:
            warnings.warn(CHANGED, stacklevel=3)
            return replace(plan, notes=(*plan.notes, CHANGED))
        return plan

    @overload
    def explain(self, name: str, model: Any = None) -> Explanation: ...

    @overload
    def explain(self, name: None = None, model: Any = None) -> Overview: ...

    def explain(self, name: str | None = None, model: Any = None) -> Explanation | Overview:
        """Every alternative of a parameter: what it would cost, or the sentence that forbids it.

        Args:
            name: of the parameter, whose alternatives are solved for; without one, all parameters, each alternative
                with an interval; a plan that was saved with regrets tells these without its model.
            model: the module that the plan was made for, where the plan was read from a file.

        Raises:
            PlanError: the plan was read from a file and no model is given, or it has no such parameter.
        """
        if name is None and self.live is None and self.alternatives and model is None:
            from .explain import overview_of

            return overview_of(self)
        lacks = "a plan read from a file knows the choice, not the alternatives"
        return self._live(model, lacks, "plan.explain(name, model)").explain(name)

    def diff(self, other: Plan | str | os.PathLike[str]) -> PlanDiff:
        """What another plan, or a plan file, has different; false where that is nothing.

        Raises:
            PlanError: the file is no plan that this library reads.
            UsageError: this is neither a plan nor a path.
        """
        from .plan_diff import diff

        if isinstance(other, Plan):
            return diff(self, other)
        if not isinstance(other, (str, os.PathLike)):
            raise UsageError(f"the other plan is a {type(other).__name__}", at="diff", do="pass a plan, or its file")
        return diff(self, Plan.load(other))

    def apply(
        self,
        model: Any,
        *,
        mesh: Any = None,
        compile: bool = False,
        seed: int = 0,
        init: Callable[[Any], Any] | None = None,
        check_inputs: str = "first",
    ) -> ParallelModule:
        """The model as a module that this rank runs, under torchrun: parameters are DTensors in the plan's layouts.

        Args:
            model: that was planned; on the meta device its values are made shard by shard. It is only read. Another
                object than the planned one is captured, and must give the same graph.
            mesh: a DeviceMesh with the plan's axes, of all ranks or some of them (a slice of a larger one); by default
                one is made of all ranks that torchrun started.
            compile: let Inductor compile forward and backward.
            seed: of values made for a model on the meta device, and of dropout; the same on every rank.
            init: called on every module of a model on the meta device after its own initialisation.
            check_inputs: when ranks that must have the same part of an input compare it: "first", at the first call
                with its size; "always"; "never".

        Raises:
            ApplyError: the ranks are not as many as the mesh has, hold different plans, or the model has no values.
            PlanError, UsageError: an argument is wrong, or the plan does not fit the model or the mesh.
        """
        from .apply import apply

        return apply(self, model, mesh=mesh, compile=compile, seed=seed, init=init, check_inputs=check_inputs)

    def verify(self, model: Any = None, *, seed: int = 0, device: str = "cpu") -> Verification:
        """The plan run on every rank of its mesh in this process, on smaller tensors, held against the unsharded model.

        Args:
            model: the module that the plan was made for, where the plan was read from a file.
            seed: of the made-up values.
            device: "cpu", in float64; or "cuda", in the plan's own dtypes and with the GPU's own kernels.

        Raises:
            PlanError: the plan was read from a file and no model is given.
        """
        from .verify import verify

        live = self._live(model, "a plan read from a file holds no graph to run", "plan.verify(model)")
        return verify(live.space, live.shape, live.choices, live.pricing.routes, seed=seed, device=device)

    def to_parallelize(self) -> str:
        """The nearest form that is written by hand, a Python module with `parallelize(model, device_mesh)`.

        FSDP2, parallel styles and torchao; its head says what lies or runs otherwise than in the plan.
        """
        from .export import to_parallelize

        return to_parallelize(self)

    def _live(self, model: Any, lacks: str, call: str) -> Live:
        """The live part, restored from the model where the plan has none; warns where it is another plan then."""
        if self.live is not None:
            if model is not None:
                from .same_model import require_same_model

                require_same_model(self.live, model)
            return self.live
        if model is None:
            raise PlanError(lacks, do=f"pass the model it was made for, {call}; or plan again")
        from .restore import restore

        restored = restore(self, model)
        for note in restored.notes:
            if note not in self.notes:
                warnings.warn(note, stacklevel=3)
        assert restored.live is not None, "a restored plan is live"
        return restored.live


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
