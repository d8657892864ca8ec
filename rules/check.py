"""Asks a rule about a call and holds what it returns against the call: a rule may be anybody's code.

What is wrong is a `RuleError` that names the op and the rule's place, before any option is made of it. The rules of
this package are proven by its tests; of any other rule each row is tried, too: the op is run on a rank's parts, without
data, and must return what the row says.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ..errors import AutoParallelError, RuleError, UsageError
from ..graph import ABSENT, TensorSpec, map_items
from ..layout import Placement, local_spec
from .constraints import constraints_of
from .language import AxisRow, Dims, OpCall, Rule, Signature, is_built_in
from .local import find_program
from .rows import rows
from .sized_ops import sized_by_arguments


def apply_rule(function: Rule, call: OpCall, *, is_tried: bool = True) -> Signature:
    """The signature that the rule gives of the call.

    Args:
        function: the rule.
        call: the op on global tensors.
        is_tried: whether the rows of a rule that is not built in are tried on parts.

    Raises:
        UsageError: the rule raises it, because the call is wrong.
        RuleError: the rule raises anything else, returns no signature, or one that does not fit the call's tensors;
            or the op's result on parts is not what a row says.
    """
    shapes = " x ".join(str(list(spec.shape)) for spec in call.tensors)
    at = f"rule {rule_name(function)} of {call.op}({shapes})"
    try:
        made: Any = function(call)
    except UsageError as error:  # the rule finds that the call is wrong
        raise UsageError(error.message, at=error.at or f"{call.op}({shapes})", do=error.do) from error
    except AutoParallelError as error:
        do = error.do or "check the shapes of the call, or mend the rule"
        raise RuleError(error.message, at=at, do=do) from error
    # A rule is code of anybody and may raise anything.
    except Exception as error:
        lines = str(error).splitlines()
        what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise RuleError(f"the rule raises {what}", at=at, do="mend the rule") from error
    wrong = next(wrongs(made, call), None)
    if wrong is None and is_tried and not is_built_in(call.op, function):
        wrong = next(wrong_rows(made, call), None)
    if wrong:
        do = "mend the rule; see autoparallel_fp8.rules.rule"
        raise RuleError(f"the rule's answer is wrong: {wrong}", at=at, do=do)
    signature: Signature = made
    return signature


def rule_name(function: Rule) -> str:
    """`my_package.rules.my_rule (rules.py, line 12)`."""
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return name
    return f"{name} ({code.co_filename.replace(chr(92), '/').rpartition('/')[2]}, line {code.co_firstlineno})"


# ---- the answer itself -----------------------------------------------------------------------------------------------


def wrongs(made: Any, call: OpCall) -> Iterator[str]:
    """What does not fit in a rule's answer about a call, in sentences."""
    if not isinstance(made, Signature):
        yield f"it is a {type(made).__name__}, not a Signature (einsum, elementwise, reduction, ... return one)"
        return
    bad_type = next(_wrong_types(made), None)
    if bad_type:
        yield bad_type
        return
    for what, tensors, specs in (("read", made.operands, call.tensors), ("made", made.results, call.out)):
        if len(tensors) != len(specs):
            yield f"it has {len(tensors)} tensors {what} where the op has {len(specs)}"
            return
    bad = [f"{atom!r} of size {size!r}" for atom, size in made.sizes.items() if not _is_size(size)]
    if bad:
        yield f"atoms have sizes above 1, not {', '.join(bad)}"
        return
    names = (*call.operand_names(), *(f"result {k}" for k in range(len(call.out))))
    for name, dims, spec in zip(names, (*made.operands, *made.results), (*call.tensors, *call.out), strict=True):
        yield from _wrong_dims(name, dims, spec, made)
    yield from _wrong_marks(made, call)
    if made.finer is not None:
        yield from (f"for finer splits: {wrong}" for wrong in wrongs(made.finer, call))
    elif not sized_by_arguments(call.op):
        yield from _unread(made, call)


def _wrong_types(made: Signature) -> Iterator[str]:
    """Fields that are not what `Signature` says they are: nothing else could be said of them."""
    for field in ("sizes", "reduced", "local"):
        if not isinstance(getattr(made, field), Mapping):
            yield f"{field} is a {type(getattr(made, field)).__name__}, not a mapping of atoms"
    for field, how in (("linear", "((0,), (1,))"), ("scaled", "((0, 2), (1, 3))")):
        if not _is_groups(getattr(made, field)):
            yield f"{field} is {getattr(made, field)!r}, not groups of operands such as {how}"
    if not _is_groups((made.monotone,)):
        yield f"monotone is {made.monotone!r}, not numbers of operands such as (0,)"
    if isinstance(made.whole, str) or not all(isinstance(atom, str) for atom in made.whole):
        yield f"whole is {made.whole!r}, not a set of atoms"
    for field in ("operands", "results"):
        if not _is_dims(getattr(made, field)):
            yield f"{field} is {getattr(made, field)!r}, not the atoms of each dim of each tensor: ((('m',), ('k',)),)"
    if made.finer is not None and not isinstance(made.finer, Signature):
        yield f"finer is a {type(made.finer).__name__}, not a Signature"


def _is_groups(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(
        isinstance(group, (tuple, list)) and all(type(number) is int for number in group) for group in value
    )


def _is_dims(value: Any) -> bool:
    """Whether it is texts three tuples deep."""
    return isinstance(value, (tuple, list)) and all(
        isinstance(tensor, (tuple, list))
        and all(isinstance(dim, (tuple, list)) and all(isinstance(atom, str) for atom in dim) for dim in tensor)
        for tensor in value
    )


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 1


def _wrong_dims(name: str, dims: Dims, spec: TensorSpec, made: Signature) -> Iterator[str]:
    if spec is ABSENT:
        return
    if len(dims) != len(spec.shape):
        yield f"{name} of shape {list(spec.shape)} has {len(dims)} dims in it"
        return
    atoms = [atom for dim in dims for atom in dim]
    for atom in dict.fromkeys(atoms):
        if atom not in made.sizes:
            yield f"{name} has an atom {atom!r} without a size"
            return
        if atoms.count(atom) > 1:
            yield f"{name} has the atom {atom!r} twice"
    for d, (dim, size) in enumerate(zip(dims, spec.shape, strict=True)):
        if dim and prod(made.sizes[atom] for atom in dim) != size:
            sizes = " x ".join(f"{atom}={made.sizes[atom]}" for atom in dim)
            yield f"dim {d} of {name} has size {size}, not {sizes}"


def _wrong_marks(made: Signature, call: OpCall) -> Iterator[str]:
    count = len(call.tensors)
    read = {atom for dims in made.operands for dim in dims for atom in dim}
    unknown = sorted(set(made.reduced) - read)
    if unknown:
        yield f"reduced names {', '.join(unknown)}, which no tensor has"
    if not set(made.reduced.values()) <= {"P", "M"}:
        yield 'reduced says "P" or "M" of an atom'
    results = [{atom for dim in dims for atom in dim} for dims in made.results]
    everywhere = sorted(set(made.reduced).intersection(*results)) if results else []
    if everywhere:
        yield f"reduced names {', '.join(everywhere)}, which every result has: nothing is reduced"
    for field, groups in (("linear", made.linear), ("monotone", (made.monotone,)), ("scaled", made.scaled)):
        if not all(0 <= number < count for group in groups for number in group):
            yield f"{field} names an operand beyond the {count} of the op"
    if not all(made.linear):
        yield "linear has a group without operands"
    for program in sorted(set(made.local.values())):
        if find_program(program, call.op) is None:
            yield f"it runs {program!r}, and there is no such program for the op (autoparallel_fp8.rules.local.program)"


def _unread(made: Signature, call: OpCall) -> Iterator[str]:
    """Atoms of results that no tensor read has: every rank would make all of such a dim, not its part."""
    read = {atom for dims in made.operands for dim in dims for atom in dim}
    for k, (dims, spec) in enumerate(zip(made.results, call.out, strict=True)):
        for atom in (atom for dim in dims for atom in dim):
            if spec is not ABSENT and atom not in read and atom not in made.whole and atom not in made.local:
                yield (
                    f"result {k} has an atom {atom!r} that no tensor read has, so every rank would make all of it: "
                    f"write _ for a dim that stays whole, or give {atom} a local program"
                )


# ---- its rows, tried -------------------------------------------------------------------------------------------------


def wrong_rows(signature: Signature, call: OpCall) -> Iterator[str]:
    """Rows after which the op on a rank's parts returns other shapes than the row says, in sentences.

    Each is tried over as many ranks as the smallest prime factor of its atom. Left alone: what runs a local program,
    ops whose size arguments are rewritten, and what the op refuses where its constraints may have said so before.
    """
    if sized_by_arguments(call.op):
        return
    for row in rows(signature, call.out):
        if row.atom and not row.local and not row.is_finer:
            ways = _smallest_factor(signature.sizes[row.atom])
            wrong = _wrong_parts(row, call, ways)
            if wrong:
                left, right = " x ".join(map(str, row.operands)), ", ".join(map(str, row.results))
                yield f"row {left} -> {right} ({row.note}): over {ways} ranks {wrong}"


def _wrong_parts(row: AxisRow, call: OpCall, ways: int) -> str:
    """What is wrong with the op on one rank's parts; "" where nothing is."""
    from ..capture.one_op import results_on  # traces: imported for rules of other packages alone

    parts = [_part(spec, placed, ways) for spec, placed in zip(call.tensors, row.operands, strict=True)]
    wanted = [_part(spec, placed, ways) for spec, placed in zip(call.out, row.results, strict=True)]
    left = iter(parts)
    args, kwargs = (map_items(value, TensorSpec, lambda _: next(left)) for value in (call.args, call.kwargs))
    try:
        made = results_on(call.op, args, dict(kwargs))
    except AutoParallelError as error:
        return "" if constraints_of(call.op) else f"the op refuses its parts: {error.message}"
    if len(made) != len(wanted):
        return f"the op returns {len(made)} tensors, not {len(wanted)}"
    for k, (found, said, whole) in enumerate(zip(made, wanted, call.out, strict=True)):
        if whole is not ABSENT and found.shape != said.shape:
            return f"result {k} is {list(found.shape)}, not {list(said.shape)}"
    return ""


def _part(spec: TensorSpec, placed: Placement, ways: int) -> TensorSpec:
    if placed.kind != "S" or spec is ABSENT:
        return spec
    shape = tuple(size // ways if d == placed.dim else size for d, size in enumerate(spec.shape))
    return local_spec(spec, shape)


def _smallest_factor(size: int) -> int:
    return next((n for n in range(2, int(size**0.5) + 1) if size % n == 0), size)
