"""Our rows for plain DTensor: ops that it lacks or gets wrong in low precision, through torch's `register_sharding`.

In: the ops to take over. Out: DTensor asks the same rules as the planner how such an op may be split. Of their rows
DTensor can express those that run the plain op on even or harmlessly uneven parts: no local programs, no scales of one
rank's own, no splits inside a dim. A row is offered only where no combination of offered rows over the mesh breaks a
constraint of the kernel: `register_sharding` multiplies rows out over the mesh itself and cannot leave one out.
Source: torch/distributed/tensor/experimental/_register_sharding.py, torch 2.13.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..errors import RuleError, UsageError
from ..graph import ABSENT, TensorSpec
from ..layout import Placement, R, local_spec
from ..rules import AxisRow, OpCall, Signature, broken_constraints, find_rule, partial_kinds, rows, rule_ops

TAKEN_OVER = {
    "aten::_scaled_mm": "rowwise scales over a split k gather both operands; a bias is refused; scale blocks are cut; "
    "a P(sum) of float8 comes out halved",
    "aten::_scaled_mm_v2": "no strategy",
    "aten::_scaled_grouped_mm": "no strategy",
    "aten::_scaled_grouped_mm_v2": "no strategy",
    "aten::_to_copy": "P(sum) passes a cast to float8, which rounds: the parts no longer add up",
    "aten::view.dtype": "P(sum) passes a view as another dtype: bits do not add up",
}
"""Op -> what DTensor does with it (torch 2.13). Ops of ours have no strategy there and are always taken over."""

Sharding = tuple[list[Any], list[Any]]
"""DTensor placements on one mesh axis: of the results, of the operands."""


def register(ops: Iterable[Any] | None = None) -> list[Any]:
    """Give DTensor our rows for these ops, in this process; returns the ops registered, by name.

    Call it before the first such op runs on a DTensor. Calling it again changes nothing. Two things cost more than
    they must: a row that a kernel refuses where all axes split the same dim is offered on no axis, and a dim shorter
    than an axis is gathered, by casts too.

    >>> import torch
    >>> from autoparallel_fp8.integrations import dtensor
    >>> dtensor.register([torch.ops.aten._scaled_mm.default])
    [<OpOverload(op='aten._scaled_mm', overload='default')>]

    Args:
        ops: op overloads that have a rule; None for all of `TAKEN_OVER` that this torch has and our own ops.

    Raises:
        UsageError: this torch cannot register shardings, or an op cannot be registered: no overload, no rule, writes
            its arguments, or its tensors cannot be told to DTensor.
    """
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError as error:
        raise UsageError(
            "this torch cannot register shardings for DTensor",
            at=f"torch {torch.__version__}, torch.distributed.tensor.experimental.register_sharding",
            do="use torch 2.11 or later, built with torch.distributed",
        ) from error
    named = default_ops() if ops is None else _listed(ops)
    for op in named:
        _refuse(op)
    chosen = sorted(dict.fromkeys(named), key=str)
    propagator = _propagator()
    for op in chosen:
        register_sharding(op)(sharding_function(op))
        _finish_registration(op, propagator)
    return chosen


def default_ops() -> list[Any]:
    """What `register()` takes over: of `TAKEN_OVER`, the ops with a rule; and every op of ours."""
    return [op for op in rule_ops() if op.name() in TAKEN_OVER or op.namespace == "autoparallel_fp8"]


def shardings(call: OpCall, sizes: Sequence[int], architecture: str) -> list[Sharding]:
    """What one mesh axis may do to a call, as DTensor takes it, all-replicated first.

    Args:
        call: the op on global tensors.
        sizes: of the mesh axes.
        architecture: of the devices, for the kernels' constraints (`sm90`, `cpu`).

    Raises:
        RuleError: the rule does not fit the call.
    """
    return [
        (_translate(row.results, call.out), _translate(row.operands)) for row in _offered(call, sizes, architecture)
    ]


# ---- which rows --------------------------------------------------------------------------------------------------


def _offered(call: OpCall, sizes: Sequence[int], architecture: str) -> list[AxisRow]:
    """Rows of which every combination over the mesh fits; where two do not go together, the first in row order."""
    rule = find_rule(call.op)
    assert rule is not None, f"{call.op} was registered without a rule"
    signature = rule(call)
    whole, *others = (row for row in rows(signature, call.out) if _is_plain(row, call))
    kept = [whole]  # never refused: where the kernel takes no whole operands, its own error says so
    for row in others:
        combinations = (c for c in itertools.product([*kept, row], repeat=len(sizes)) if row in c)
        if not any(_is_broken(call, signature, chosen, sizes, architecture) for chosen in combinations):
            kept.append(row)
    return kept


def _is_plain(row: AxisRow, call: OpCall) -> bool:
    """Whether DTensor can express the row: the plain op on whole and partial tensors, or on parts of whole dims."""
    placements = (*row.operands, *row.results)
    can_be_partial = all(
        p.kind not in "PM" or p.kind in partial_kinds(spec) for p, spec in zip(row.operands, call.tensors, strict=True)
    )
    is_expressible = all(p.kind in "RPMS" and p.factor <= 0 for p in placements)
    return not row.local and not row.is_finer and is_expressible and can_be_partial


def _is_broken(
    call: OpCall, signature: Signature, chosen: Sequence[AxisRow], sizes: Sequence[int], architecture: str
) -> bool:
    """Whether some rank's part of this combination is cut through a block or is one that the kernel does not take."""
    ways: dict[str, list[int]] = {}
    for row, size in zip(chosen, sizes, strict=True):
        if row.atom and size > 1:
            ways.setdefault(row.atom, []).append(size)
    found = {atom: part_sizes(signature.sizes[atom], counts) for atom, counts in ways.items()}
    if any(len(parts) > 1 and not _is_alone(signature, atom) for atom, parts in found.items()):
        return True
    is_emulated = call.op.namespace == "autoparallel_fp8"  # ours run without a kernel too
    return any(
        broken_constraints(
            call.op,
            _local_specs(call, signature, dict(zip(found, parts, strict=True))),
            architecture,
            call,
            emulate=is_emulated,
        )
        for parts in itertools.product(*found.values())
    )


def part_sizes(size: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Every size that a rank's part may have where DTensor splits a dim over axes of these sizes, largest first.

    >>> part_sizes(10, [4]), part_sizes(8, [2, 2])
    ((3, 1), (2,))
    """
    found = {size}
    for count in counts:
        chunks = {s: -(-s // count) for s in found}  # torch.chunk: all as long as the first, the last ones shorter
        found = {max(0, min(c, s - c * i)) for s, c in chunks.items() for i in range(count)}
    return tuple(sorted(found, reverse=True))


def _is_alone(signature: Signature, atom: str) -> bool:
    """Whether every dim that has the atom has no other: uneven parts of it then match in all tensors."""
    tensors = (*signature.operands, *signature.results)
    return all(dim == (atom,) for dims in tensors for dim in dims if atom in dim)


def _local_specs(call: OpCall, signature: Signature, parts: dict[str, int]) -> list[TensorSpec]:
    """What a rank holds of each operand, given the size of its part of each split atom."""
    found = []
    for spec, dims in zip(call.tensors, signature.operands, strict=True):
        shape = []
        for size, dim in zip(spec.shape, dims, strict=True):
            for atom in dim:
                if atom in parts:
                    size = size // signature.sizes[atom] * parts[atom]
            shape.append(size)
        found.append(local_spec(spec, tuple(shape)))
    return found


# ---- from and to DTensor's terms -----------------------------------------------------------------------------------


def _translate(placements: Sequence[Placement], specs: Sequence[TensorSpec] | None = None) -> list[Any]:
    """The placements in DTensor's classes; None for a result that the op leaves out."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    make: dict[str, Callable[[Placement], Any]] = {
        "R": lambda p: Replicate(),
        "S": lambda p: Shard(p.dim),
        "P": lambda p: Partial("sum"),
        "M": lambda p: Partial("max"),
    }
    absent = [spec is ABSENT for spec in specs] if specs else [False] * len(placements)
    return [None if gone else make[p.kind](p) for p, gone in zip(placements, absent, strict=True)]


def sharding_function(op: Any) -> Callable[..., list[Sharding]]:
    """The function that DTensor asks about each new combination of shapes, placements and arguments of the op."""

    def acceptable(*args: Any, **kwargs: Any) -> list[Sharding]:
        specs = list(_specs_in((*args, *kwargs.values())))
        names = _call(op, args, kwargs, ()).operand_names()
        for name, spec in zip(names, specs, strict=True):
            _refuse_sum_of_bytes(op, name, spec)
        mesh = specs[0].mesh
        call = _call(op, args, kwargs, _results(op, args, kwargs, mesh.device_type))
        try:
            found = shardings(call, tuple(mesh.shape), _architecture(mesh.device_type))
        except RuleError as error:
            warnings.warn(f"{op} runs replicated: {error}", stacklevel=2)
            found = [(_translate([R] * len(call.out), call.out), _translate([R] * len(specs)))]
        return [*found, *_like_operands(found, specs, call)]

    return acceptable


def _like_operands(found: Sequence[Sharding], specs: Sequence[Any], call: OpCall) -> list[Sharding]:
    """The rows again, in the operands' own terms: P(avg) where P(sum) passes, strided shards where a dim splits.

    Only where all operands and results have the one placement, of a dim of one size: whichever elements of it a rank
    has, it has them of every tensor.
    """
    from torch.distributed.tensor import Partial, Shard

    more = []
    for placement in dict.fromkeys(p for spec in specs for p in spec.placements):
        plain: Any = None
        if placement.is_partial("avg"):
            plain = Partial("sum")
        elif not isinstance(placement, Shard) and hasattr(placement, "dim"):  # FSDP2 over TP: _StridedShard
            sizes = {spec.shape[placement.dim : placement.dim + 1] for spec in (*call.tensors, *call.out)}
            plain = Shard(placement.dim) if len(sizes) == 1 else None
        for results, operands in found if plain is not None else ():
            if all(p == plain for p in (*results, *operands)):
                more.append(([placement] * len(results), [placement] * len(operands)))
    return more


def _is_spec(value: Any) -> bool:
    """Whether the value is what DTensor hands over in a tensor's place."""
    return hasattr(value, "placements") and hasattr(value, "tensor_meta")


def _specs_in(value: Any) -> Iterator[Any]:
    """Every DTensor spec in nested sequences, in order."""
    if _is_spec(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _specs_in(item)


def _map_specs(value: Any, function: Callable[[Any], Any]) -> Any:
    if _is_spec(value):
        return function(value)
    if isinstance(value, (list, tuple)):
        return tuple(_map_specs(item, function) for item in value)
    return value


def _to_spec(spec: Any) -> TensorSpec:
    meta = spec.tensor_meta
    return TensorSpec(tuple(meta.shape), tuple(meta.stride), meta.dtype)


def _call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: tuple[TensorSpec, ...]) -> OpCall:
    """The call as rules see it; devices are left out."""
    plain = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    return OpCall(
        op,
        _map_specs(args, _to_spec),
        tuple((name, _map_specs(value, _to_spec)) for name, value in plain.items()),
        tuple(map(_to_spec, _specs_in((*args, *kwargs.values())))),
        out,
    )


def _results(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> tuple[TensorSpec, ...]:
    """The results of the op on global tensors, found out as DTensor does: on fake tensors of the mesh's device type.

    FakeTensorMode has no public name (torch 2.14). The meta device would not do: there, `_scaled_mm` demands what it
    does on CUDA.
    """
    from torch._subclasses import FakeTensorMode

    def empty(spec: Any) -> torch.Tensor:
        meta = spec.tensor_meta
        return torch.empty_strided(tuple(meta.shape), tuple(meta.stride), dtype=meta.dtype, device=device_type)

    def lists(value: Any) -> Any:
        return [lists(item) for item in value] if isinstance(value, (list, tuple)) else value

    placed = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    with FakeTensorMode():
        made = op(
            *(lists(_map_specs(value, empty)) for value in args),
            **{name: lists(_map_specs(value, empty)) for name, value in placed.items()},
        )
    results = made if isinstance(made, (list, tuple)) else (made,)
    return tuple(ABSENT if t is None else TensorSpec(tuple(t.shape), tuple(t.stride()), t.dtype) for t in results)


def _architecture(device_type: str) -> str:
    """Of the devices of a mesh: `sm90`, `gfx942`; the device type itself where it is not CUDA or none is here."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return device_type
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm{properties.major}{properties.minor}"


# ---- what cannot be registered, and what `register_sharding` leaves undone ----------------------------------------


def _refuse_sum_of_bytes(op: Any, name: str, spec: Any) -> None:
    """A sum of float8 parts is rounded by whatever adds it up: nothing right can be made of it."""
    dtype = spec.tensor_meta.dtype
    is_sum = any(p.is_partial("sum") or p.is_partial("avg") for p in spec.placements)
    if is_sum and dtype.is_floating_point and dtype.itemsize == 1:
        raise RuleError(
            f"{name} is a partial sum of {dtype} parts, which do not add up",
            at=f"{op}, placements {list(spec.placements)}",
            do="redistribute before the cast to 8 bits; a cast of a partial DTensor then reduces first",
        )


def _listed(ops: Any) -> list[Any]:
    """The ops that were passed, as a list."""
    if isinstance(ops, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket)) or not isinstance(ops, Iterable):
        raise UsageError(
            f"ops is {ops!r}, not a list of overloads",
            at="autoparallel_fp8.integrations.dtensor.register",
            do="write register([torch.ops.aten._scaled_mm.default]), or register() for all that DTensor lacks",
        )
    return list(ops)


def _refuse(op: Any) -> None:
    if not isinstance(op, torch._ops.OpOverload):
        raise UsageError(f"{op!r} is no op overload", do="name one, such as torch.ops.aten._scaled_mm.default")
    arguments = op._schema.arguments
    only_by_name = [a for a in arguments if a.kwarg_only]
    reason = ""
    if find_rule(op) is None:
        reason = "has no rule"
    elif op._schema.is_mutable:
        reason = "writes its arguments"
    elif not all(isinstance(r.type, torch.TensorType) for r in op._schema.returns):
        reason = "returns something else than tensors"
    elif any("Tensor" in str(a.type) for a in only_by_name):
        reason = "takes a tensor by name only, which DTensor does not redistribute"
    elif any("List[" in str(a.type) for a in only_by_name):
        reason = "takes a list by name only, which DTensor cannot keep in its cache key"
    if reason:
        raise UsageError(
            f"{op} cannot be registered with DTensor: it {reason}",
            at="autoparallel_fp8.integrations.dtensor.register",
            do="give the op a rule with autoparallel_fp8.rules.rule" if reason == "has no rule" else "leave it out",
        )


def _propagator() -> Any:
    """Where DTensor keeps its shardings; private names of torch 2.11 to 2.14, needed by `_finish_registration`."""
    from torch.distributed.tensor import DTensor

    propagator = getattr(getattr(DTensor, "_op_dispatcher", None), "sharding_propagator", None)
    for name in ("op_to_schema_info", "propagate_op_sharding"):
        if not hasattr(propagator, name):
            raise UsageError(
                "shardings cannot be registered: this torch keeps those of DTensor in a place unknown here",
                at=f"torch {torch.__version__}: no {name}",
                do="use a torch that this version of autoparallel-fp8 supports: 2.11 to 2.14",
            )
    return propagator


def _finish_registration(op: Any, propagator: Any) -> None:
    """What the public function leaves undone; without each of these, ops were seen to run on as before, or wrong.

    - A strategy that torch registered per axis (`_scaled_mm`, `_to_copy` in 2.13) is asked before ours: it goes.
    - The key of DTensor's cache has integers only: amax over dim 1 got the shape of amax over dim 0. It gets every
      argument.
    - What was decided before stays in the caches: they are emptied (the one in Python in this thread only).
    """
    getattr(propagator, "op_single_dim_strategy_funcs", {}).pop(op, None)
    key = propagator.op_to_schema_info[op]
    key.static_argnum = 0
    key.static_kwargkey = [a.name for a in op._schema.arguments if a.kwarg_only] or None
    propagator.propagate_op_sharding.cache_clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
