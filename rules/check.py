"""Asks a rule about a call and holds what it returns against the call: a rule may be anybody's code.

What is wrong is a `RuleError` that names the op and the rule's place, before any option is made of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from math import prod
from typing import Any

from ..errors import AutoParallelError, RuleError
from ..graph import ABSENT, TensorSpec
from .language import Dims, OpCall, Rule, Signature
from .local import find_program


def apply_rule(function: Rule, call: OpCall) -> Signature:
    """The signature that the rule gives of the call.

    Raises:
        RuleError: the rule raises, returns no signature, or one that does not fit the call's tensors.
    """
    shapes = " x ".join(str(list(spec.shape)) for spec in call.tensors)
    at = f"rule {rule_name(function)} of {call.op}({shapes})"
    try:
        made: Any = function(call)
    except AutoParallelError as error:
        do = error.do or "check the shapes of the call, or mend the rule"
        raise RuleError(error.message, at=at, do=do) from error
    # A rule is code of anybody and may raise anything.
    except Exception as error:
        lines = str(error).splitlines()
        what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise RuleError(f"the rule raises {what}", at=at, do="mend the rule") from error
    wrong = next(wrongs(made, call), None)
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


def wrongs(made: Any, call: OpCall) -> Iterator[str]:
    """What does not fit in a rule's answer about a call, in sentences."""
    if not isinstance(made, Signature):
        yield f"it is a {type(made).__name__}, not a Signature (einsum, elementwise, reduction, ... return one)"
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
    unknown = sorted(set(made.reduced) - set(made.sizes))
    if unknown:
        yield f"reduced names {', '.join(unknown)}, which no tensor has"
    if not set(made.reduced.values()) <= {"P", "M"}:
        yield 'reduced says "P" or "M" of an atom'
    for field, groups in (("linear", made.linear), ("monotone", (made.monotone,)), ("scaled", made.scaled)):
        if not all(0 <= number < count for group in groups for number in group):
            yield f"{field} names an operand beyond the {count} of the op"
    for program in sorted(set(made.local.values())):
        if find_program(program, call.op) is None:
            yield f"it runs {program!r}, and there is no such program for the op (autoparallel_fp8.rules.local.program)"
