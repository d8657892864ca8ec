"""Every rule by brute force: split as its rows say, run on each rank, join, and compare with the unsplit op.

The same runs list placements that would hold and have no row; a rule says which of them it leaves out, and why.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from autoparallel_fp8.rules import Signature, find_rule, left_out, rows, rule_ops
from autoparallel_fp8.rules.language import LEFT_OUT_OF_ALL
from autoparallel_fp8.rules.local import find_program
from graph_samples import GRAPHS, captured, sample_of
from missing_rows import missing_rows, reasons_for
from op_samples import all_samples
from split_ops import Sample, kind_of, problems, ways_of

from autoparallel_fp8.expansion import expand
from autoparallel_fp8.graph import TensorSpec
from autoparallel_fp8.layout import R, split
from autoparallel_fp8.lower import Operand, local_call
from autoparallel_fp8.mesh import parse_mesh
from autoparallel_fp8.products import Option, products

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
        plain, halved = ways_of(sample), ways_of(sample, halved=True)
        for sizes in ONE_AXIS:
            wrong += problems(sample, plain.kind(sizes), sizes)
        wrong += problems(sample, halved.kind((2,)), (2,))
        for ways in (plain, halved):
            wrong += problems(sample, ways.kind((2, 2)), (2, 2), MOST)
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
        for sample in samples[:5]:
            for ways in (2, 3):
                for text in missing_rows(sample, ways):
                    reasons = reasons_for(op, text)
                    used |= {(op, like) for like in reasons}
                    unexplained += [] if reasons else [f"{op} over {ways}: {text}"]
    assert not unexplained, "\n".join(unexplained)
    given = {(op, like) for op in rule_ops() for like in left_out(op) if like not in LEFT_OUT_OF_ALL}
    unused = sorted(f"{op}: {like}" for op, like in given - used if not shared(op, like, used))
    assert not unused, "reasons for nothing\n" + "\n".join(unused)


def shared(op: object, like: str, used: set[tuple[object, str]]) -> bool:
    """Whether another op of the same rule needs the reason."""
    return any(find_rule(other) is find_rule(op) and like == pattern for other, pattern in used)


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
