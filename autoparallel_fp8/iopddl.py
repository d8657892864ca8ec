"""Problem files of the IOPDDL contest (intra-operator parallelism for distributed deep learning, ASPLOS 2025).

    {"problem": {"nodes": {"costs": [[...], ...], "usages": [[...], ...], "intervals": [[start, end], ...]},
                 "edges": {"nodes": [[u, w], ...], "costs": [[...], ...]}, "usage_limit": ..., "name": ...}}

One cost and one usage an option; `[]` is an interval that holds nothing. A table is row-major, u's options outermost;
costs of 1e18 and more forbid. Read into a `TimedProblem`; a file ending in .gz is decompressed.
Source: github.com/google/iopddl.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from .errors import ProblemError, UsageError
from .garbage import no_collection
from .problem import Array, Edge
from .timed import Index, TimedProblem

FORBIDDEN = 1e18  # costs from here on stand for "not allowed"
_FORMAT = "see docs/solver-iopddl.md for the format"


class _Tables:
    """Tables kept once, by their values and shape."""

    def __init__(self) -> None:
        self.tables: list[Array] = []
        self._numbers: dict[tuple[tuple[int, int], bytes], int] = {}

    def number(self, table: Array) -> int:
        key = (table.shape, table.tobytes())
        if key not in self._numbers:
            self._numbers[key] = len(self.tables)
            self.tables.append(np.where(table >= FORBIDDEN, math.inf, table))
        return self._numbers[key]


@no_collection()
def read_iopddl(path: str | Path) -> TimedProblem:
    """The problem in a file.

    Raises:
        UsageError: no such file, or it cannot be read.
        ProblemError: it is no problem: malformed, or with a number that may not be; the message says where.
    """
    return parse_iopddl(_read_json(Path(path)), str(path))


def parse_iopddl(data: Any, where: str) -> TimedProblem:
    """The problem in what the file's JSON holds; `where` names the file in errors."""
    problem = _member(data, "problem", dict, where, "")
    nodes, edges = (_member(problem, key, dict, where, "problem.") for key in ("nodes", "edges"))
    lists = {key: _member(nodes, key, list, where, "problem.nodes.") for key in ("costs", "usages", "intervals")}
    if len({len(one) for one in lists.values()}) > 1:
        counts = ", ".join(f"{len(one)} {key}" for key, one in lists.items())
        _refuse(f"the nodes have {counts}", where, "problem.nodes", "give one of each a node")
    costs = _vectors(lists["costs"], where, "problem.nodes.costs", FORBIDDEN)
    usages = _vectors(lists["usages"], where, "problem.nodes.usages", math.inf)
    for v, (cost, usage) in enumerate(zip(costs, usages, strict=True)):
        if len(cost) != len(usage):
            place = f"problem.nodes.usages[{v}]"
            _refuse(f"{len(usage)} usages for {len(cost)} costs", where, place, "give one usage an option")
        if not len(cost):
            _refuse("a node without options", where, f"problem.nodes.costs[{v}]", "give each node a cost an option")
        if not np.isfinite(usage).all():
            _refuse("an infinite usage", where, f"problem.nodes.usages[{v}]", "write numbers")
    starts, ends = _intervals(lists["intervals"], where)
    pairs = _member(edges, "nodes", list, where, "problem.edges.")
    values = _member(edges, "costs", list, where, "problem.edges.")
    if len(pairs) != len(values):
        counts = f"{len(pairs)} pairs of nodes and {len(values)} tables"
        _refuse(f"the edges have {counts}", where, "problem.edges", "give one table a pair")
    costs, joined, tables = _edges(pairs, values, costs, where)
    limit = _limit(problem, where)
    return TimedProblem(tuple(costs), joined, tables, tuple(usages), starts, ends, limit)


def _read_json(path: Path) -> Any:
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise UsageError(f"cannot read {path}: {reason}", at="FILE", do="name a problem file") from error
    try:
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        return json.loads(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ProblemError(f"not a gzip file: {error}", at=str(path), do="compress it again, or drop .gz") from error
    except (ValueError, RecursionError) as error:
        raise ProblemError(f"not JSON: {error}", at=str(path), do=_FORMAT) from error


def _member(data: Any, key: str, kind: type, where: str, path: str) -> Any:
    if not isinstance(data, dict) or not isinstance(data.get(key), kind):
        is_there = isinstance(data, dict) and key in data
        text = f"{path}{key} is no {'object' if kind is dict else 'list'}" if is_there else f"{path}{key} is missing"
        raise ProblemError(text, at=where, do=_FORMAT)
    return data[key]


def _refuse(message: str, where: str, place: str, do: str) -> NoReturn:
    raise ProblemError(message, at=f"{where}, {place}", do=do)


def _vectors(lists: Sequence[Any], where: str, place: str, forbidden: float) -> list[Array]:
    """One array a list, equal ones the same object; numbers from `forbidden` on are inf."""
    known: dict[bytes, Array] = {}
    found = []
    for v, values in enumerate(lists):
        array = _numbers(values, where, f"{place}[{v}]")
        key = array.tobytes()
        if key not in known:
            known[key] = np.where(array >= forbidden, math.inf, array)
        found.append(known[key])
    return found


def _numbers(values: Any, where: str, place: str) -> Array:
    """A list of numbers, none negative."""
    if not isinstance(values, list):
        _refuse(f"a {type(values).__name__} where a list of numbers belongs", where, place, _FORMAT)
    if not set(map(type, values)) <= {int, float}:
        _refuse("something that is not a number", where, place, "write numbers")
    try:
        array = np.asarray(values, dtype=np.float64)
    except OverflowError:
        _refuse("a number of more than 300 digits", where, place, "write 1e18 for what is forbidden")
    if np.isnan(array).any():
        _refuse("NaN among the numbers", where, place, "write 1e18 for what is forbidden")
    if (array < 0).any():
        _refuse(f"{array.min():g} is negative", where, place, "costs and usages are 0 or more")
    return array


def _intervals(intervals: Sequence[Any], where: str) -> tuple[Index, Index]:
    found = np.zeros((len(intervals), 2), dtype=np.int64)
    for v, interval in enumerate(intervals):
        if interval == []:
            continue
        is_pair = isinstance(interval, list) and len(interval) == 2 and all(type(t) is int for t in interval)
        if not is_pair or not 0 <= interval[0] <= interval[1] <= 2**40:
            shown = json.dumps(interval)[:40]
            do = "write [start, end], whole numbers with 0 <= start <= end, or []"
            _refuse(f"{shown} is no interval", where, f"problem.nodes.intervals[{v}]", do)
        found[v] = interval
    return found[:, 0].copy(), found[:, 1].copy()


def _edges(
    pairs: Sequence[Any], values: Sequence[Any], costs: list[Array], where: str
) -> tuple[list[Array], tuple[Edge, ...], tuple[Array, ...]]:
    """Edges, one a pair with u < w; the tables of several edges of a pair are added, an edge from a node to itself
    goes into the node's costs."""
    shared, known = _Tables(), dict[tuple[int, int], Array]()
    costs = list(costs)
    for e, (pair, numbers) in enumerate(zip(pairs, values, strict=True)):
        u, w = _pair(pair, len(costs), where, f"problem.edges.nodes[{e}]")
        shape = (len(costs[u]), len(costs[w]))
        table = _numbers(numbers, where, f"problem.edges.costs[{e}]")
        if table.size != shape[0] * shape[1]:
            size = f"{table.size} costs for {shape[0]} x {shape[1]} options"
            _refuse(size, where, f"problem.edges.costs[{e}]", "give one cost a pair of options")
        table = table.reshape(shape)
        if u == w:
            costs[u] = costs[u] + np.where(np.diag(table) >= FORBIDDEN, math.inf, np.diag(table))
            continue
        key, table = ((u, w), table) if u < w else ((w, u), table.T)
        known[key] = known[key] + table if key in known else table
    edges = tuple(Edge(u, w, shared.number(np.ascontiguousarray(table))) for (u, w), table in known.items())
    return costs, edges, tuple(shared.tables)


def _pair(pair: Any, num_nodes: int, where: str, place: str) -> tuple[int, int]:
    if not isinstance(pair, list) or len(pair) != 2 or not all(type(v) is int for v in pair):
        _refuse(f"{json.dumps(pair)[:40]} is no pair of nodes", where, place, "write [u, w], numbers of two nodes")
    for v in pair:
        if not 0 <= v < num_nodes:
            _refuse(f"there is no node {v}", where, place, f"nodes are 0 to {num_nodes - 1}")
    return pair[0], pair[1]


def _limit(problem: dict[str, Any], where: str) -> float:
    """The limit; inf where the file has none."""
    limit = problem.get("usage_limit")
    if limit is None:
        return math.inf
    if type(limit) not in (int, float) or not limit >= 0:
        text = json.dumps(limit)[:40]
        _refuse(f"{text} is no limit", where, "problem.usage_limit", "write a number of 0 or more, or leave it out")
    return float(limit)
