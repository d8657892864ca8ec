"""Many choices near known ones: led back through an `Undo` and added up, for no more work than what differs.

A *change* is variable -> option; trial k makes the changes `changes[k]` to the base. What a trial changes in a
variable of the big problem is kept as two arrays, trials and options, so that one numpy operation serves all trials
that touch a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..problem import Array, Problem
from .network import Joined, Kept, Removed, Undo

Index = npt.NDArray[np.int64]
Changed = dict[int, tuple[Index, Index]]
"""Variable -> trials that change it, ascending, and the option that each takes there."""

NONE: Index = np.zeros(0, dtype=np.int64)


def lead_back(undo: Undo, base: Sequence[int], changes: Sequence[Mapping[int, int]]) -> tuple[list[int], Changed]:
    """`undo(base)`, and what each trial changes of it.

    Args:
        undo: from the smaller problem to the bigger one.
        base: choices of the smaller problem.
        changes: of the smaller problem, one a trial.
    """
    full = [0] * undo.num_variables
    for variable, choice in zip(undo.kept, base, strict=True):
        full[variable] = int(choice)
    changed = _by_variable(undo.kept, changes)
    for record in reversed(undo.records):
        if isinstance(record, Kept):
            _restore_kept(record, changed)
        elif isinstance(record, Removed):
            _restore_removed(record, full, changed)
        else:
            _restore_joined(record, changed)
        record.restore(full)
    for v, (trials, options) in list(changed.items()):
        differs = options != full[v]
        changed[v] = trials[differs], options[differs]
    return full, changed


def _by_variable(kept: Sequence[int], changes: Sequence[Mapping[int, int]]) -> Changed:
    pairs: dict[int, list[tuple[int, int]]] = {}
    for k, change in enumerate(changes):
        for v, option in change.items():
            pairs.setdefault(kept[v], []).append((k, option))
    return {v: (np.array([k for k, _ in p]), np.array([x for _, x in p])) for v, p in pairs.items()}


def _restore_kept(record: Kept, changed: Changed) -> None:
    if record.variable in changed:
        trials, options = changed[record.variable]
        changed[record.variable] = trials, record.options[options]


def _restore_joined(record: Joined, changed: Changed) -> None:
    if record.kept in changed:
        trials, options = changed[record.kept]
        changed[record.kept] = trials, record.pairs[options, 0]
        changed[record.gone] = trials, record.pairs[options, 1]


def _restore_removed(record: Removed, full: Sequence[int], changed: Changed) -> None:
    trials = _touched(changed, record.neighbours)
    if not len(trials):
        return
    total = np.broadcast_to(record.cost[:, None], (len(record.cost), len(trials)))
    for neighbour, table in zip(record.neighbours, record.tables, strict=True):
        total = total + table[:, _taken(changed, neighbour, full[neighbour], trials)]
    changed[record.variable] = trials, total.argmin(axis=0)


def _touched(changed: Changed, variables: Sequence[int]) -> Index:
    """Trials that change one of the variables."""
    found = [changed[v][0] for v in variables if v in changed]
    if len(found) < 2:
        return found[0] if found else NONE
    return np.unique(np.concatenate(found))


def _taken(changed: Changed, variable: int, option: int, trials: Index) -> Index:
    """The option of a variable in each of these trials; `option` where a trial leaves it. All its trials are there."""
    taken = np.full(len(trials), option, dtype=np.int64)
    if variable in changed:
        own, options = changed[variable]
        taken[np.searchsorted(trials, own)] = options
    return taken


def added_costs(problem: Problem, base: Sequence[int], changed: Changed, count: int) -> Array:
    """What each trial costs more than the base; inf where an option or a pair is forbidden. Rows are not looked at."""
    more = np.zeros(count)
    for v, (trials, options) in changed.items():
        more[trials] += problem.costs[v][options] - problem.costs[v][base[v]]
    for edge in problem.edges:
        if edge.u in changed or edge.w in changed:
            trials = _touched(changed, (edge.u, edge.w))
            taken = (_taken(changed, v, base[v], trials) for v in (edge.u, edge.w))
            table = problem.tables[edge.table]
            more[trials] += table[tuple(taken)] - table[base[edge.u], base[edge.w]]
    return more


def added_terms(terms: Mapping[int, Array], base: Sequence[int], changed: Changed, count: int) -> Array:
    """What each trial adds to the left side of a row."""
    more = np.zeros(count)
    for v, coefficients in terms.items():
        if v in changed:
            trials, options = changed[v]
            more[trials] += coefficients[options] - coefficients[base[v]]
    return more


def back_to(undo: Undo, choices: Sequence[int], choose: Callable[[int], int]) -> list[int]:
    """Choices of the smaller problem as near to these of the bigger one as its options are.

    Args:
        undo: from the smaller problem to the bigger one.
        choices: of the bigger problem.
        choose: number in the smaller problem of a variable whose option is gone -> the option to take instead.
    """
    now = list(choices)
    for record in undo.records:
        if isinstance(record, Kept):
            now[record.variable] = _position(record.options, now[record.variable])
        elif isinstance(record, Joined):
            pair = np.array([now[record.kept], now[record.gone]])
            found = np.flatnonzero((record.pairs == pair).all(axis=1))
            now[record.kept] = int(found[0]) if len(found) else -1
    return [now[v] if now[v] >= 0 else choose(k) for k, v in enumerate(undo.kept)]


def _position(options: npt.NDArray[np.intp], option: int) -> int:
    found = np.flatnonzero(options == option)
    return int(found[0]) if len(found) else -1


def options_left(undo: Undo, counts: Mapping[int, int]) -> dict[int, dict[int, int]]:
    """Option -> its number in the smaller problem, of those that are left, for variables that were held.

    Args:
        undo: from the smaller problem to the bigger one.
        counts: variable -> its number of options in the bigger problem.
    """
    left = {v: {x: x for x in range(count)} for v, count in counts.items()}
    for record in undo.records:
        if isinstance(record, Kept) and record.variable in left:
            position = {int(x): k for k, x in enumerate(record.options)}
            before = left[record.variable]
            left[record.variable] = {x: position[k] for x, k in before.items() if k in position}
    return left
