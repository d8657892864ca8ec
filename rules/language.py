"""The language rules are written in: an op's dims as named *atoms*, from which its rows follow.

A rule looks at one op (shapes, dtypes, attributes; no mesh, no cost) and returns a `Signature`: for every tensor read
and every tensor made, the atoms of each dim. `"m k, k n -> m n"` says by itself that splitting m splits the first
operand and the result, and that splitting k leaves a partial sum. `rows.py` turns a signature into `AxisRow`s, what one
mesh axis may do. `(h g)` is a dim made of two atoms; `_` a dim that must stay whole; a dim of size 1 has no atom.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

from ..errors import RuleError
from ..graph import TensorSpec
from ..layout import Placement

Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class OpCall:
    """One op as a rule sees it.

    Attributes:
        op: the overload.
        args, kwargs: as called, each tensor replaced by its `TensorSpec`; sequences are tuples.
        tensors: the tensors read, in order, repeats included.
        out: the tensors made.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    tensors: tuple[TensorSpec, ...]
    out: tuple[TensorSpec, ...]

    def arg(self, name: str) -> Any:
        """The argument of that name in the op's schema, its default where it was not passed."""
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                if not argument.kwarg_only and position < len(self.args):
                    return self.args[position]
                return dict(self.kwargs).get(name, argument.default_value)
        raise RuleError(f"{self.op} has no argument {name!r}")

    def operand_names(self) -> tuple[str, ...]:
        """The schema's name of each tensor read, `tensors[1]` for members of lists."""
        names: list[str] = []
        for argument, value in zip(self.op._schema.arguments, self.args, strict=False):
            names += _tensor_names(argument.name, value)
        for name, value in self.kwargs:
            names += _tensor_names(name, value)
        return tuple(names)


def _tensor_names(name: str, value: Any) -> list[str]:
    if isinstance(value, TensorSpec):
        return [name]
    if isinstance(value, tuple):
        return [f"{name}[{i}]" for i, item in enumerate(value) if isinstance(item, TensorSpec)]
    return []


class AxisRow(NamedTuple):
    """What one mesh axis may do to an op.

    Attributes:
        operands, results: a placement for each tensor read and made.
        note: in words, e.g. "split k".
        local: name of the program a rank runs instead of the plain op on its parts; "" for the plain op.
        atom: the atom that is split; "" where none is.
        is_finer: one of `Signature.finer`, for a split that is finer than the atom.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    note: str
    local: str = ""
    atom: str = ""
    is_finer: bool = False


@dataclass(frozen=True)
class Signature:
    """The dims of an op's tensors in atoms, and how sums, maxima and scales pass through it.

    Attributes:
        operands, results: for each tensor, the atoms of each dim, major to minor; () where a dim is not split.
        sizes: size of every atom, all above 1.
        reduced: atom that some result lacks -> what that result then is, "P" (adds up) or "M" (the largest counts).
        linear: groups of operands; when all of one group are P(sum), so are the results.
        monotone: operands whose P(max) passes to the results.
        whole: atoms that must not be split.
        local: atom -> name of the program that a rank runs where the atom is split.
        scaled: (data operand, scale operand) pairs of a scaled GEMM.
        passes_scales: the op works element by element or moves elements, so frozen splits and own scales pass.
        makes_own: a maximum that may stay each rank's own instead of P(max).
        finer: in the same atoms, how the op is run where a split is finer than an atom and runs on into the next one
            of its dim. It names a local program; what is whole here is whole there.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    reduced: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[tuple[int, ...], ...] = ()
    monotone: tuple[int, ...] = ()
    whole: frozenset[str] = frozenset()
    local: Mapping[str, str] = field(default_factory=dict)
    scaled: tuple[tuple[int, int], ...] = ()
    passes_scales: bool = False
    makes_own: bool = False
    finer: Signature | None = None


Rule = Callable[[OpCall], Signature]
_RULES: dict[Any, Rule] = {}
_LEFT_OUT: dict[Any, dict[str, str]] = {}
_NAMED: dict[str, tuple[Rule, dict[str, str]]] = {}
_BUILT_IN: dict[str, Rule] = {}  # the rules of this package, by the op's name
LEFT_OUT_OF_ALL = {
    r".*P\(max\).*": "a partial maximum is a scale's: only what stands between a maximum and a cast lets it pass"
}
"""Placements that hold for many ops and are rows of few: pattern -> reason."""


def rule(*ops: Any, left_out: Mapping[str, str] | None = None) -> Callable[[Rule], Rule]:
    """Decorator: the function says how each of these op overloads may be split.

    Args:
        ops: overloads.
        left_out: placements on one axis that would give the right result and are no row all the same: a regular
            expression over `R x S(0) -> S(0)` -> the reason. The tests list every such placement and hold it
            against these.

    >>> import torch
    >>> from autoparallel_fp8.rules import elementwise, options, rule
    >>> @rule(torch.ops.aten.logit.default)
    ... def logit(op):
    ...     return elementwise(op)
    >>> for option in options("aten.logit", torch.empty(8, 6, device="meta"), mesh="tp=4").options:
    ...     print(option["self"].placements, option["result"].placements)
    ('R',) ('R',)
    ('S(0)',) ('S(0)',)

    The function gets an `OpCall` and returns a `Signature`, best from `einsum`, `elementwise`, `reduction`, `moved` or
    `regrouped`. A package registers its rules by an entry point of the group `autoparallel_fp8.rules` (`plugins.py`).

    Raises:
        RuleError: no op is named, or one of them is no overload; the rule is no function; `left_out` has other things
            than patterns and reasons.
    """
    wrong = next((op for op in ops if not isinstance(op, torch._ops.OpOverload)), None)
    if wrong is not None or not ops:
        what = f"rule for {wrong!r}, which is no op overload" if ops else "rule for no op"
        raise RuleError(what, do="name overloads, such as @rule(torch.ops.aten.mm.default)")
    reasons = _reasons(left_out, ops)

    def register(function: Rule) -> Rule:
        _require_function(function, ops)
        for op in ops:
            _RULES[op] = function
            _LEFT_OUT[op] = dict(reasons)
        return function

    return register


def rule_by_name(*names: str, left_out: Mapping[str, str] | None = None) -> Callable[[Rule], Rule]:
    """Decorator: as `rule`, for ops of a package that need not be there and is not imported for it.

    Args:
        names: as `str` of the overload gives them, such as "torchao.triton_to_mxfp8_dim0.default". A rule that is
            registered for the overload itself comes first.
        left_out: as in `rule`.

    Raises:
        RuleError: as in `rule`.
    """
    reasons = _reasons(left_out, names)

    def register(function: Rule) -> Rule:
        _require_function(function, names)
        for name in names:
            _NAMED[name] = (function, dict(reasons))
        return function

    return register


def _reasons(left_out: Any, ops: Sequence[Any]) -> dict[str, str]:
    """`left_out` after a look at it."""
    at, do = f"rule of {', '.join(map(str, ops))}", "write {pattern: reason}, such as {r'P\\(sum\\) -> R': 'why'}"
    if left_out is None:
        return {}
    if not isinstance(left_out, Mapping):
        raise RuleError(f"left_out is a {type(left_out).__name__}", at=at, do=do)
    for like, reason in left_out.items():
        if not isinstance(like, str) or not isinstance(reason, str):
            raise RuleError(f"left_out has {like!r}: {reason!r}, which are not both text", at=at, do=do)
        try:
            re.compile(like)
        except re.error as error:
            raise RuleError(f"left_out has {like!r}, which is no pattern: {error}", at=at, do=do) from error
    return dict(left_out)


def _require_function(function: Any, ops: Sequence[Any]) -> None:
    if not callable(function):
        what = f"the rule is a {type(function).__name__}, not a function"
        raise RuleError(
            what, at=f"rule of {', '.join(map(str, ops))}", do="put @rule(...) above a function of the call"
        )


def seal_built_in() -> None:
    """All rules registered by now are this package's own, which its tests prove; see `is_built_in`."""
    _BUILT_IN.update({str(op): function for op, function in _RULES.items()})
    _BUILT_IN.update({name: function for name, (function, _) in _NAMED.items()})


def is_built_in(op: Any, function: Rule) -> bool:
    """Whether this is the rule that this package has for the op."""
    return _BUILT_IN.get(name_of(op)) is function


@cache
def name_of(op: Any) -> str:
    """`aten.mm.default`: torch puts it together anew each time, and every op of a graph is asked about many times."""
    return str(op)


def left_out(op: Any) -> dict[str, str]:
    """Why placements that hold are no rows of an op: pattern over `R x S(0) -> S(0)` -> reason."""
    named = _NAMED[name_of(op)][1] if op not in _RULES and name_of(op) in _NAMED else {}
    return {**_LEFT_OUT.get(op, {}), **named, **LEFT_OUT_OF_ALL}


def find_rule(op: Any) -> Rule | None:
    """The rule registered for an op overload or for its name, or None."""
    found = _RULES.get(op)
    return found if found is not None or name_of(op) not in _NAMED else _NAMED[name_of(op)][0]


def rule_ops() -> tuple[Any, ...]:
    """Every op overload that has a rule, by name."""
    return tuple(sorted(_RULES, key=str))


def named_rules() -> tuple[str, ...]:
    """Names of the ops that have a rule by name, whether their package is there or not."""
    return tuple(sorted(_NAMED))


def named_rule(name: str) -> Rule:
    """The rule of one of `named_rules`."""
    return _NAMED[name][0]


class Ops(set[Any]):
    """Op overloads, and names of such as need not be there: an overload is in it by itself or by its name."""

    def __contains__(self, op: object) -> bool:
        return super().__contains__(op) or (isinstance(op, torch._ops.OpOverload) and super().__contains__(name_of(op)))


HEAVY_OPS = Ops()
"""Ops long enough to hide a collective behind, and whose dims decide which factors are worth splitting."""


def heavy(*ops: Any) -> None:
    """Declare ops that take long: GEMMs, attention, table gradients."""
    HEAVY_OPS.update(ops)


# ---- writing signatures -------------------------------------------------------------------------------------------


def einsum(op: OpCall, text: str, *, sizes: Mapping[str, int] | None = None, **more: Any) -> Signature:
    """Signature from `"m k, k n -> m n"`: operands, an arrow, results.

    Args:
        op: gives the shapes.
        text: a word an atom, `(h g)` a dim of two, `_` a dim kept whole, `.` a tensor without dims.
        sizes: of atoms that the shapes do not tell.
        more: further fields of `Signature`. Atoms that a result lacks are summed in it unless `reduced` says else.

    Raises:
        RuleError: the text does not fit the shapes.
    """
    left, right = _sides(text, op)
    operands = [_parse_dims(part, text, op) for part in left.split(",")] if left.strip() else []
    results = [_parse_dims(part, text, op) for part in right.split(",")]
    known = dict(sizes or {})
    specs = [*op.tensors, *op.out]
    if len(operands) != len(op.tensors) or len(results) != len(op.out):
        raise RuleError(
            f"rule text {text!r} does not have the tensors of {op.op}: it has {len(operands)} read and "
            f"{len(results)} made, the call {len(op.tensors)} and {len(op.out)}"
        )
    for dims, spec in zip([*operands, *results], specs, strict=True):
        _learn_sizes(dims, spec, known, text, op)
    big = {atom: size for atom, size in known.items() if size > 1}

    def prune(dims: Dims) -> Dims:
        return tuple(tuple(atom for atom in dim if atom in big) for dim in dims)

    made = [{atom for dim in dims for atom in dim} for dims in results]
    in_all = set.intersection(*made)
    read = {atom for dims in operands for dim in dims for atom in dim}
    summed = {atom: "P" for atom in known if atom in read - in_all and atom in big}
    whole, given = more.pop("whole", ()), more.pop("reduced", {})
    written = f"rule text {text!r}"
    require_atoms(whole, "whole", known, written)
    require_atoms(more.get("local", ()), "local", known, written)
    require_atoms(given, "reduced", known, written)
    everywhere = sorted(in_all & set(given))
    if everywhere:
        raise RuleError(
            f"reduced names {', '.join(everywhere)}, which every result of {written} has: nothing is reduced"
        )
    reduced = {**summed, **given}
    return Signature(
        tuple(map(prune, operands)),
        tuple(map(prune, results)),
        big,
        reduced={atom: kind for atom, kind in reduced.items() if atom in big},
        linear=groups_of(more.pop("linear", ())),
        whole=frozenset(whole),
        **more,
    )


def require_atoms(names: Any, field_name: str, known: Iterable[str], written: str) -> None:
    """Atoms that a field names must be there: a typing error would be a rule that says less than its author thinks.

    Raises:
        RuleError: one is not, or the field is a text, whose letters would be taken for names.
    """
    if isinstance(names, str):
        raise RuleError(f'{field_name} is the text {names!r}, not a collection: write ("{names}",)')
    unknown = [name for name in names if name not in known]
    if unknown:
        shown = ", ".join(known) or "none"
        raise RuleError(f"{field_name} names {', '.join(map(repr, unknown))}; the atoms of {written} are {shown}")


def groups_of(linear: Any) -> tuple[tuple[int, ...], ...]:
    """Groups of operands, as `Signature.linear` has them.

    Raises:
        RuleError: they are plain numbers.
    """
    try:
        return tuple(tuple(group) for group in linear)
    except TypeError:
        cure = "each operand alone: ((0,), (1,)); two that are partial sums together: ((0, 1),)"
        raise RuleError(f"linear is {linear!r}, and takes groups of operands ({cure})") from None


def _sides(text: str, op: OpCall) -> tuple[str, str]:
    """What stands left and right of the arrow."""
    sides = text.split("->")
    if len(sides) != 2:
        count = "no arrow" if len(sides) == 1 else f"{len(sides) - 1} arrows"
        raise RuleError(f"rule text {text!r} of {op.op} has {count}: write 'operands -> results', as 'm k, k n -> m n'")
    return sides[0], sides[1]


def _parse_dims(part: str, text: str, op: OpCall) -> Dims:
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    where = f"rule text {text!r} of {op.op}"
    for word in part.replace("(", " ( ").replace(")", " ) ").split():
        if word in "()":
            if (word == "(") != (group is None):
                break
            if group is not None:
                dims.append(tuple(group))
            group = [] if word == "(" else None
        elif group is not None:
            group.append(_atom(word, where))
        elif word != ".":
            dims.append(() if word in ("_", "1") else (_atom(word, where),))
    else:
        if group is None:
            return tuple(dims)
    raise RuleError(f"{where} has brackets that do not match in {part.strip()!r}")


def _atom(word: str, where: str) -> str:
    if not word.isidentifier() or word == "_":
        how = "atoms are words such as m or d0, (h g) is a dim of two, _ a dim kept whole; tensors stand without [ ]"
        raise RuleError(f"{where} has {word!r} for an atom: {how}")
    return word


def _learn_sizes(dims: Dims, spec: TensorSpec, known: dict[str, int], text: str, op: OpCall) -> None:
    if len(dims) != len(spec.shape):
        raise RuleError(f"rule text {text!r} does not fit shape {spec.shape} of {op.op}")
    for dim, size in zip(dims, spec.shape, strict=True):
        unknown = [atom for atom in dim if atom not in known]
        product = 1
        for atom in dim:
            product *= known.get(atom, 1)
        if len(unknown) == 1 and size % product == 0:
            known[unknown[0]] = size // product
        elif dim and (unknown or product != size):
            raise RuleError(f"rule text {text!r} does not fit shape {spec.shape} of {op.op}")


def pointwise(
    op: OpCall, *, linear: Iterable[Sequence[int]] = (), monotone: bool = False, whole: Iterable[str] = ()
) -> Signature:
    """Signature of an op that works element by element with broadcasting; all results have one shape.

    Args:
        op: gives the shapes.
        linear, monotone: as in `Signature`; `monotone` is of all operands.
        whole: dims of the result that must not be split, `("d1",)`.

    Raises:
        RuleError: `linear` has no groups, or `whole` names no dim.
    """
    shape = op.out[0].shape
    require_atoms(whole, "whole", [f"d{i}" for i in range(len(shape))], "the result")
    names = [(f"d{i}",) if size > 1 else () for i, size in enumerate(shape)]

    def dims(spec: TensorSpec) -> Dims:
        offset = len(shape) - len(spec.shape)
        return tuple(names[offset + i] if size > 1 else () for i, size in enumerate(spec.shape))

    return Signature(
        tuple(dims(spec) for spec in op.tensors),
        tuple(tuple(names) for _ in op.out),
        {f"d{i}": size for i, size in enumerate(shape) if size > 1},
        linear=groups_of(linear),
        monotone=tuple(range(len(op.tensors))) if monotone else (),
        whole=frozenset(whole),
        passes_scales=True,
    )


def reduction(op: OpCall, dims: Sequence[int] | None, *, kind: str = "P", **more: Any) -> Signature:
    """Signature of a reduction of the first operand over `dims` (None or empty: all), kept if the result has them."""
    spec = op.tensors[0]
    ndim = len(spec.shape)
    for name in ("whole", "local"):
        require_atoms(more.get(name, ()), name, [f"d{i}" for i in range(ndim)], "the operand")
    gone = {d % ndim for d in dims} if dims and ndim else set(range(ndim))
    names = tuple((f"d{i}",) if size > 1 else () for i, size in enumerate(spec.shape))
    kept = tuple(name for i, name in enumerate(names) if i not in gone)
    if len(op.out[0].shape) == ndim:
        kept = tuple(() if i in gone else name for i, name in enumerate(names))
    return Signature(
        (names,),
        tuple(kept for _ in op.out),
        {f"d{i}": size for i, size in enumerate(spec.shape) if size > 1},
        reduced={f"d{i}": kind for i in gone if spec.shape[i] > 1},
        linear=groups_of(more.pop("linear", ())),
        whole=frozenset(more.pop("whole", ())),
        **more,
    )


def moved(op: OpCall, source: Sequence[int | None]) -> Signature:
    """Signature of an op whose result dim i is dim `source[i]` of its operand, or new or rewritten (None)."""
    shape = op.tensors[0].shape
    names = [(f"d{i}",) if size > 1 else () for i, size in enumerate(shape)]
    used = {i for i in source if i is not None}
    return Signature(
        (tuple(name if i in used else () for i, name in enumerate(names)),),
        (tuple(() if i is None else names[i] for i in source),),
        {f"d{i}": size for i, size in enumerate(shape) if size > 1 and i in used},
        linear=((0,),),
        monotone=(0,),
        passes_scales=True,
    )
