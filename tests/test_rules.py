"""Every rule by brute force: split as its rows say, run on each rank, join, and compare with the unsplit op.

The same runs list placements that would hold and have no row; a rule says which of them it leaves out, and why.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from autoparallel_fp8.rules import AxisRow, Signature, find_rule, left_out, partial_kinds, rows, rule_ops
from autoparallel_fp8.rules.language import LEFT_OUT_OF_ALL
from autoparallel_fp8.rules.local import find_program
from graph_samples import GRAPHS, captured, sample_of
from op_samples import all_samples
from split_ops import OnRanks, Sample, kind_of, problems, spec_of
from torch import Tensor

from autoparallel_fp8.expansion import Option, expand, products
from autoparallel_fp8.graph import TensorSpec
from autoparallel_fp8.layout import Placement, R, split
from autoparallel_fp8.lower import Operand, local_call, sized_by_arguments
from autoparallel_fp8.mesh import parse_mesh
from autoparallel_fp8.shards import same_bits

aten = torch.ops.aten
ONE_AXIS = [(2,), (3,), (4,)]
MOST = 16  # options tried of one call on two axes, spread over all


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("op", rule_ops(), ids=str)
def test_every_row_gives_the_unsplit_result(op):
    """Every row on one axis of 2, 3 and 4; pairs of rows on two axes; splits that start inside a dim."""
    assert all_samples()[op], f"no sample of {op}"
    wrong = []
    for sample in all_samples()[op]:
        for sizes in ONE_AXIS:
            wrong += problems(sample, kind_of(sample, sizes), sizes)
        wrong += problems(sample, kind_of(sample, (2,), halved=True), (2,))
        for halved in (False, True):
            wrong += problems(sample, kind_of(sample, (2, 2), halved=halved), (2, 2), MOST)
    assert not wrong, "\n".join(wrong[:5])


@pytest.fixture(scope="module")
def tried() -> set[object]:
    """Calls with their options that were tried already: models share most of them."""
    return set()


@pytest.mark.parametrize(("model", "recipe"), GRAPHS)
def test_every_op_of_a_model_as_it_is_called_there(model, recipe, tried):
    """All options that the graph's own factors allow, with its shapes, dtypes and memory orders."""
    wrong = []
    for mesh in ("tp=2", "dp=2,tp=2"):
        space = expand(captured(model, recipe), parse_mesh(mesh), architecture="cpu")
        assert space.replicated_ops == ()
        for kind in space.kinds:
            key = kind.call, kind.options
            if kind.call.op is not None and key not in tried:
                tried.add(key)
                wrong += problems(sample_of(kind.call), kind, space.mesh.sizes, MOST)
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:5])


# ---- the tables ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", rule_ops(), ids=str)
def test_a_rule_names_the_tensors_of_its_op(op):
    """A signature has the dims of every tensor, in atoms of the right size, and a program where it says so."""
    assert isinstance(op, torch._ops.OpOverload)
    for sample in all_samples()[op]:
        kind = kind_of(sample, (2,))
        signature = find_rule(op)(kind.call)
        for dims, spec in zip(
            (*signature.operands, *signature.results), (*kind.call.tensors, *kind.call.out), strict=True
        ):
            assert len(dims) == len(spec.shape)
            for dim, size in zip(dims, spec.shape, strict=True):
                assert not dim or torch.tensor([signature.sizes[atom] for atom in dim]).prod() == size
        assert all(size > 1 for size in signature.sizes.values())
        assert {*signature.reduced, *signature.local} <= set(signature.sizes)
        assert all(find_program(name, op) for name in signature.local.values())


def test_a_split_runs_on_into_the_same_factor_everywhere():
    """Four ways over a factor of two go on into the next one; where two tensors have another next one, they may not."""
    signature = Signature(
        ((("a", "b"),), (("a", "c"),)), ((("a", "b"),),), {"a": 2, "b": 2, "c": 2}, reduced={"c": "P"}
    )
    alike = replace(signature, operands=((("a", "b"),), (("a", "b"),)), sizes={"a": 2, "b": 2}, reduced={})
    factors = (((2, 2),), ((2, 2),))
    out = (TensorSpec((4,), (1,), torch.float32),)

    def four_ways(made: Signature) -> list[Option]:
        found = products(made, rows(made, out), factors, factors[:1], (2, 2))
        return [option for option in found if option.operands[0] == (split(0), split(0))]

    assert four_ways(alike) and not four_ways(signature)


# ---- completeness --------------------------------------------------------------------------------------------------


def test_no_placement_that_holds_is_missing():
    """Of all placements of an op's tensors on one axis, those that give the right result have a row or a reason."""
    used = set()
    unexplained = []
    for op, samples in all_samples().items():
        for sample in samples[:4]:
            for text in missing_rows(sample):
                reasons = [like for like in left_out(op) if re.fullmatch(like, text)]
                used |= {(op, like) for like in reasons}
                unexplained += [] if reasons else [f"{op}: {text}"]
    assert not unexplained, "\n".join(unexplained)
    given = {(op, like) for op in rule_ops() for like in left_out(op) if like not in LEFT_OUT_OF_ALL}
    unused = sorted(f"{op}: {like}" for op, like in given - used if not shared(op, like, used))
    assert not unused, "reasons for nothing\n" + "\n".join(unused)


def shared(op: object, like: str, used: set[tuple[object, str]]) -> bool:
    """Whether another op of the same rule needs the reason."""
    return any(find_rule(other) is find_rule(op) and like == pattern for other, pattern in used)


def missing_rows(sample: Sample) -> Iterator[str]:
    """Placements, written as `R x S(0) -> S(0)`, that hold for this call and have no row."""
    on_ranks = OnRanks(sample, kind_of(sample, (2,)), (2,))
    wholes, reference = on_ranks.wholes, on_ranks.reference
    same_twice = len({id(t) for t in wholes}) < len(wholes)
    if not sample.is_filled or same_twice or not any(r.double().any() for r in reference if r is not None):
        return
    known = {(option.operands, option.results) for option in on_ranks.kind.options}
    together = [tuple(t.shape[:-1]) if len(wholes) > 4 and t.ndim > 1 else k for k, t in enumerate(wholes)]
    for chosen in itertools.product(*(placements(wholes[together.index(key)]) for key in dict.fromkeys(together))):
        of_group = dict(zip(dict.fromkeys(together), chosen, strict=True))
        operands = tuple((of_group[key],) for key in together)
        if any(p not in placements(t) for (p,), t in zip(operands, wholes, strict=True)):
            continue
        for results in what_holds(on_ranks, operands):
            if not any(
                o == operands and all(r in (None, k) for r, k in zip(results, rs, strict=True)) for o, rs in known
            ):
                left, right = (
                    " x ".join(str(p[0]) for p in operands),
                    ",".join(str(r[0] if r else R) for r in results),
                )
                yield f"{left} -> {right}"


def placements(tensor: Tensor) -> list[Placement]:
    """All that one axis of two ranks may do to it."""
    splits = [split(d) for d, size in enumerate(tensor.shape) if size > 1 and size % 2 == 0]
    kinds = partial_kinds(spec_of(tensor)) if tensor.is_floating_point() else ""
    return [R, *splits, *(Placement(kind) for kind in kinds)]


def what_holds(on_ranks: OnRanks, operands: tuple[tuple[Placement], ...]) -> list[tuple[tuple[Placement] | None, ...]]:
    """Layouts of the results that the plain op gives from these; None for a result that is left out."""
    op = on_ranks.sample.op
    shards = [on_ranks.shards(k, layout) for k, layout in enumerate(operands)]
    if not is_safe(op, [local[0] for local in shards]):
        return []
    candidates = [[None] if r is None else [(p,) for p in placements(r)] for r in on_ranks.reference]
    tried = [[c] for c in candidates[0]] if sized_by_arguments(op) else [candidates[0]]
    found = []
    for first in tried:
        if op is aten.embedding_dense_backward.default and first == [(split(0),)]:
            continue  # would write outside of memory
        option = Option(operands, tuple(c[0] or (R,) for c in (first, *candidates[1:])), (AxisRow((), (), ""),))
        try:
            made = on_ranks.run(option, shards)
        except (RuntimeError, IndexError, ValueError):
            continue
        if any(len(results) != len(on_ranks.reference) for results in made):
            continue
        good = [
            [
                c
                for c in choices
                if c is None or is_so([m[k] for m in made], on_ranks.reference[k], c[0], on_ranks.sample)
            ]
            for k, choices in enumerate((first, *candidates[1:]))
        ]
        found += itertools.product(*([(R,)] if (R,) in choices else choices for choices in good))
    return found


def is_safe(op: object, local: list[Tensor]) -> bool:
    """Kernels that do not check their arguments get none that do not fit."""
    if op is aten.embedding_dense_backward.default:
        return local[0].shape[:-1] == local[1].shape
    if op is aten.native_layer_norm_backward.default:
        grad, x, mean, _, weight, _ = local
        return grad.shape == x.shape and mean.shape[:-1] == x.shape[:-1] and weight.shape[-1] == x.shape[-1]
    return True


def is_so(local: list[Tensor], whole: Tensor, placement: Placement, sample: Sample) -> bool:
    """Whether two local results are the whole under this placement."""
    a, b = local
    pairs = {
        "R": lambda: [(a, whole), (b, whole)],
        "S": lambda: zip((a, b), whole.chunk(2, placement.dim), strict=True),
        "P": lambda: [(a + b, whole)],
        "M": lambda: [(torch.maximum(a, b), whole)],
    }
    if a.dtype != whole.dtype or (placement.kind in "PM" and not a.shape == b.shape == whole.shape):
        return False
    for x, y in pairs[placement.kind]():
        if x.shape != y.shape:
            return False
        if not (torch.allclose(x.double(), y.double(), 1e-4, 1e-4, equal_nan=True) if sample.rtol else same_bits(x, y)):
            return False
    return True


# ---- local calls ---------------------------------------------------------------------------------------------------


def test_a_local_call_says_what_a_rank_runs():
    """Shapes among the arguments are those of the rank's part; a program gets the part itself."""
    views = Sample(aten.view.default, (torch.zeros(4, 12), (4, 3, 4)))
    kind = kind_of(views, (2,))
    option = next(o for o in kind.options if o.operands == ((split(0),),))
    assert local_call(kind, option, (2,), (1,)).args == (Operand(0), (2, 3, 4))

    lookup = Sample(aten.embedding.default, (torch.arange(8.0).reshape(8, 1), torch.tensor([1, 6])))
    kind = kind_of(lookup, (2,))
    option = next(o for o in kind.options if o.operands == ((split(0),), (R,)))
    second = local_call(kind, option, (2,), (1,)).run([torch.arange(4.0, 8.0).reshape(4, 1), torch.tensor([1, 6])])
    assert second[0].tolist() == [[0.0], [6.0]]
