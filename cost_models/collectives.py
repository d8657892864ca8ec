"""Time of one collective of a compiled program: latency plus bytes over rate, for the cheapest way to run it.

Every way (ring, tree or switch, in NCCL's LL, LL128 or Simple protocol, or nodes and network one after the other) is a
line: so many us, and so many us a byte. The price is the lowest line, so it is continuous in the bytes, strictly
increasing and concave. `num_bytes` is always the size of the gathered, or unreduced, tensor on one device; of an
all-to-all, that of the whole tensor whose split dim moves.

Sources: constants of the protocols, NCCL src/tuning/cost_model.cc at commit 1fc949c; their hop latencies are kept as
ratios to the Simple ring's, which the profile states for its links (3.4 us NVLink, 14 us network). Checked against an
all-reduce on 4 GB200 (Azure AI-benchmarking-guide, ND_GB200_v6_results.md): 1 kB to 8 GB within 12 %.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from math import ceil, log2

from autoparallel_fp8.errors import UsageError

from .device import COLLECTIVE_KINDS
from .links import GroupLink

Line = tuple[float, float]  # us, us per byte


@dataclass(frozen=True)
class Protocol:
    """How an algorithm sends: `base_us` once, hops as ratios to the Simple ring's, its share of the link's rate."""

    base_us: float
    node_hop: float
    net_hop: float
    rate: float
    net_cap_bytes_per_s: float = float("inf")


_LL_CAP = 40e9  # across nodes; NCCL's caps are 19 to 22 (Ampere), 35 to 45 (Hopper) and 70 to 90 GB/s (Blackwell)
# LL: NCCL's one-node caps of 87.7, 141 and 282 GB/s are 0.38 to 0.41 of what rings reach on A100, H100 and GB200
RING = (
    Protocol(6.6, 0.6 / 3.4, 2.7 / 14, 0.38, _LL_CAP),
    Protocol(14.0, 1.9 / 3.4, 4.0 / 14, 0.9375),
    Protocol(8.4, 1.0, 1.0, 1.0),
)
TREE = (  # 0.92 of the ring's bandwidth: NCCL src/graph/tuning.cc
    Protocol(6.8, 0.6 / 3.4, 5.0 / 14, 0.38 * 0.92, _LL_CAP),
    Protocol(14.0, 1.25 / 3.4, 8.5 / 14, 0.9375 * 0.92),
    Protocol(8.4, 4.0 / 3.4, 1.0, 0.92),
)
PAT = Protocol(8.0, 4.0 / 3.4, 1.0, 1.0)  # gathers and scatters in log2 steps, where each node has one rank
# what an all-to-all takes above an all-gather of few bytes: two H200, torch 2.11, CUDA 13.0, 2026-11-30
ALL_TO_ALL_EXTRA_US = 10.0


def collective_us(kind: str, num_bytes: float, link: GroupLink) -> float:
    """Time of one collective in microseconds; 0.0 for one device.

    >>> from autoparallel_fp8.cost_models import group_link, load_device
    >>> from autoparallel_fp8.mesh import parse_mesh
    >>> link = group_link(parse_mesh("tp=8"), "tp", load_device("h100"))
    >>> round(collective_us("all_gather", 2**30, link))
    2576

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        num_bytes: of the gathered or unreduced tensor on one device. An all-to-all over n ranks moves a split: each
            holds 1/n of `num_bytes` and sends (n - 1) / n of that.
        link: how the ranks are joined, from `group_link`.

    Raises:
        UsageError: unknown kind or negative size.
    """
    if num_bytes < 0:
        raise UsageError(
            f"num_bytes is {num_bytes}", at=f"price of {kind}", do="give the size of the whole tensor in bytes"
        )
    return min([us + us_per_byte * num_bytes for us, us_per_byte in collective_lines(kind, link)])


@lru_cache(maxsize=8192)
def collective_lines(kind: str, link: GroupLink) -> tuple[Line, ...]:
    """The lines (us, us per byte) whose lowest is the price: for many sizes at once. Raises as `collective_us`.

    A line that starts higher and rises faster than another is never the lowest, and is left out.
    """
    if kind not in COLLECTIVE_KINDS:
        close = get_close_matches(str(kind), COLLECTIVE_KINDS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(
            f'no collective is named "{kind}"', at="kind", do=f"{hint}known: {', '.join(COLLECTIVE_KINDS)}"
        )
    if link.ranks == 1:
        return ((0.0, 0.0),)
    if kind == "all_to_all":
        return (_all_to_all(link),)
    lines = _direct(kind, link)
    if kind == "all_reduce":
        lines += _joined([_direct("reduce_scatter", link), _direct("all_gather", link)], -link.launch_us)
    if kind == "reduce_scatter":  # an all-reduce holds its result
        lines += collective_lines("all_reduce", link)
    return _lowest(lines)


def _direct(kind: str, link: GroupLink) -> list[Line]:
    """All ways of one collective that are not made of other collectives over the same ranks."""
    lines = [_line(kind, link, way, link.steps_in_node, link.steps_between_nodes) for way in RING]
    if link.spans_nodes:
        lines += _log_steps(kind, link) + _two_levels(kind, link)
    elif link.node_multicast_us is not None:
        lines += [_line(kind, link, Protocol(link.node_multicast_us, 0.0, 0.0, 1.0), 0, 0)]
    return lines


def _line(kind: str, link: GroupLink, way: Protocol, steps_in_node: int, steps_between: int) -> Line:
    """One algorithm: base + passes x hops, and passes x (n - 1) / n of the bytes; an all-reduce has two passes."""
    passes = 2 if kind == "all_reduce" else 1
    hops_us = steps_in_node * way.node_hop * link.hop_us + steps_between * way.net_hop * link.net_hop_us
    rate = link.bandwidth_bytes_per_s(kind) * way.rate
    if link.spans_nodes:
        rate = min(rate, way.net_cap_bytes_per_s)
    share = (link.ranks - 1) / link.ranks
    return link.launch_us + way.base_us + passes * hops_us, passes * share / rate * 1e6


def _log_steps(kind: str, link: GroupLink) -> list[Line]:
    """Ways that cross the network in log2(nodes) steps: trees for an all-reduce, PAT for the others."""
    steps = ceil(log2(link.nodes))
    if kind == "all_reduce":
        return [_line(kind, link, way, link.ranks_per_node - 1, steps) for way in TREE]
    return [_line(kind, link, PAT, 0, steps)] if link.ranks_per_node == 1 else []


def _two_levels(kind: str, link: GroupLink) -> list[Line]:
    """Within the nodes and across them, one after the other in either order; the second sees 1/n of the bytes."""
    ranks, nodes = link.ranks_per_node, link.nodes
    if ranks == 1 or ranks * nodes != link.ranks:
        return []
    infinite = (float("inf"),) * len(COLLECTIVE_KINDS)
    node = replace(link, ranks=ranks, nodes=1, launch_us=0.0, net_bandwidth=infinite)
    net = replace(link, ranks=nodes, ranks_per_node=1, launch_us=0.0, node_bandwidth=infinite)
    lines = []
    for outer, inner in ((node, net), (net, node)):
        parts = ["reduce_scatter", "all_gather"] if kind == "all_reduce" else [kind]
        on_all = [list(collective_lines(part, outer)) for part in parts]
        on_share = [(us, slope / outer.ranks) for us, slope in collective_lines(kind, inner)]
        lines += _joined([on_share, *on_all], link.launch_us)
    return lines


def _joined(stages: list[list[Line]], more_us: float) -> list[Line]:
    """One stage after the other, each in any of its ways; `more_us` on top."""
    total: list[Line] = [(more_us, 0.0)]
    for stage in stages:
        total = list(_lowest([(us + stage_us, slope + more) for us, slope in total for stage_us, more in stage]))
    return total


def _all_to_all(link: GroupLink) -> Line:
    """Point to point: one message a peer; the node's link and the rank's one network card work side by side.

    No ring helps here: what leaves the node leaves through the sender's own card.
    """
    own_node, away = link.ranks_per_node - 1, link.ranks - link.ranks_per_node
    hops_us = own_node * RING[0].node_hop * link.hop_us + away * RING[0].net_hop * link.net_hop_us
    position = COLLECTIVE_KINDS.index("all_to_all")
    slowest = max(own_node / link.node_bandwidth[position], away / link.net_bandwidth[position])
    us = link.launch_us + RING[-1].base_us + ALL_TO_ALL_EXTRA_US + hops_us
    return us, slowest / link.ranks**2 * 1e6


def _lowest(lines: list[Line]) -> tuple[Line, ...]:
    """Lines that no other beats at both ends, by rising start."""
    kept: list[Line] = []
    for line in sorted(lines):
        if not kept or line[1] < kept[-1][1]:
            kept.append(line)
    return tuple(kept)
