"""The rules against every call that PyTorch's own op tests make: all of them under the mark `proof`, else a spread.

`make test` runs the spread in some seconds, `make proof` tens of thousands of calls in some minutes. The proof leaves
what it tried in `build/proof/`, one file an op, of which `tools/rules_table.py` makes docs/rules.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from autoparallel_fp8.rules import rule_ops
from missing_rows import missing_rows, reasons_for, tells
from opinfo_samples import ENTRIES, NO_GAPS, NOT_RUN, Recorded, record, samples_of
from split_ops import Sample, problems, ways_of
from torch import Tensor

BUILD = Path(__file__).resolve().parent.parent / "build" / "proof"
SIZES = (2, 3, 4, 5)
SPREAD = 5  # every fifth entry of the database, and every fifth call on two axes
MOST = 12  # options tried of one call on two axes
FEW = 6  # calls of each op, spread over all
SMALL = (8, 400)  # elements, where all placements are tried: with fewer, too much holds by luck
DRAWS = 16  # of the numbers of one call

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def recorded() -> dict[Any, list[Recorded]]:
    """Every recorded call, by op."""
    return by_op(record(ENTRIES))


def by_op(calls: Iterable[Recorded]) -> dict[Any, list[Recorded]]:
    found: dict[Any, list[Recorded]] = {op: [] for op in rule_ops()}
    for call in calls:
        found[call.op].append(call)
    return found


def spread(items: list[Any], most: int) -> list[Any]:
    """At most so many, spread over all."""
    return items[:: max(1, -(-len(items) // most))]


def sizes_tried(sample: Sample, wrong: list[str]) -> set[int]:
    """Checks every row on each axis; what is wrong is added, and the sizes that split something come back."""
    ways = ways_of(sample)
    tried: set[int] = set()
    for size in SIZES:
        kind = ways.kind((size,))
        wrong += problems(sample, kind, (size,))
        if any(p.kind == "S" for o in kind.options for layout in (*o.operands, *o.results) for p in layout):
            tried.add(size)
    return tried


def check_two_axes(sample: Sample, wrong: list[str]) -> None:
    """Pairs of rows, and splits that start inside a dim."""
    halved = ways_of(sample, halved=True)
    wrong += problems(sample, halved.kind((2,)), (2,))
    wrong += problems(sample, halved.kind((2, 2)), (2, 2), MOST)


def test_a_spread_of_recorded_calls():
    """Every row on axes of 2 to 5, for a few calls of every op that a fifth of PyTorch's op tests makes."""
    calls = by_op(record(ENTRIES[::SPREAD], (torch.float32, torch.bool)))
    wrong: list[str] = []
    num_tried = 0
    for op in rule_ops():
        for sample in chain.from_iterable(map(samples_of, spread(calls[op], FEW))):
            sizes_tried(sample, wrong)
            num_tried += 1
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:5])
    assert num_tried > 300 and any(calls[op] for op in rule_ops() if "backward" in str(op))


def test_entries_that_are_not_run_exist():
    """A reason for an entry that is gone would hide nothing, and say something untrue."""
    assert {*NOT_RUN, *NO_GAPS} <= {info.name for info in ENTRIES}


@pytest.mark.proof
@pytest.mark.parametrize("op", rule_ops(), ids=str)
def test_every_recorded_call(op):
    """Every row on axes of 2 to 5 for all calls of the op, and a fifth of them on two axes; the table counts them."""
    wrong: list[str] = []
    tried: set[int] = set()
    samples = list(chain.from_iterable(map(samples_of, recorded()[op])))
    for number, sample in enumerate(samples):
        tried |= sizes_tried(sample, wrong)
        if number % SPREAD == 0:
            check_two_axes(sample, wrong)
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / f"{op}.json").write_text(json.dumps({"samples": len(samples), "sizes": sorted(tried)}))
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:5])


@pytest.mark.proof
@pytest.mark.parametrize("op", rule_ops(), ids=str)
def test_no_placement_of_a_recorded_call_is_missing(op):
    """Of all placements on axes of 2, 3 and 5, those that give the right result have a row or a reason."""
    small = [call for call in recorded()[op] if SMALL[0] <= call.num_elements <= SMALL[1] and not call.is_low]
    unexplained = [
        f"{op} over {ways}: {text}"
        for call in spread(small, 4 * FEW)
        for ways in (2, 3, 5)
        for text in always_missing(call, ways)
    ]
    assert not unexplained, "\n".join(dict.fromkeys(unexplained))


def is_constant(tensor: Tensor) -> bool:
    """Whether all elements are equal: parts of it may then stand for each other."""
    return tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all())


def always_missing(call: Recorded, ways: int) -> set[str]:
    """Placements that have neither row nor reason and hold whatever the numbers are."""
    found: set[str] | None = None
    results = set()
    for draw in range(DRAWS):
        sample = call.sample(draw=draw)
        if tells(sample) and not any(is_constant(t) for t in sample.tensors()):
            results.add(repr(sample.run()))
            missing = {text for text in missing_rows(sample, ways) if not reasons_for(call.op, text)}
            found = missing if found is None else found & missing
            if not found:
                return set()
    return set() if found is None or (len(results) < 2 and sample.tensors()) else found
