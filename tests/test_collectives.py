"""Prices of collectives: by hand on a made-up device, sane everywhere, near what was measured."""

import doctest
from dataclasses import replace
from itertools import pairwise

import pytest
from autoparallel_fp8.cost_models import (
    COLLECTIVE_KINDS,
    Link,
    Topology,
    collective_lines,
    collective_us,
    device_names,
    group_link,
    load_device,
)
from autoparallel_fp8.cost_models import collectives as collectives_module
from autoparallel_fp8.cost_models import links as links_module

from autoparallel_fp8.errors import CostError, UsageError
from autoparallel_fp8.mesh import parse_mesh

KB, MB, GB = 1024, 1024**2, 1024**3
SIZES = [64 * KB * 2**step for step in range(15)]  # 64 KB to 1 GB
GROUPS = [(mesh, axes) for mesh in ("dp=2,tp=8", "dp=8,tp=8") for axes in ("dp", "tp", ("dp", "tp"))]
NETWORKED = [name for name in device_names() if not name.startswith("rtx")]

ONE = dict.fromkeys(COLLECTIVE_KINDS, 1.0)
TOY = replace(
    load_device("h100"),
    gpus_per_node=4,
    scale_up=Link("nvlink", 100e9, 3.4, 5.0, ONE),
    scale_out=Link("infiniband", 10e9, 14.0, 15.0, ONE),
)


def price(kind, num_bytes, mesh, axes, device="h100"):
    return collective_us(kind, num_bytes, group_link(parse_mesh(mesh), axes, load_device(device)))


def test_in_one_node_by_hand():
    """Four ranks at 100 GB/s: 5 us launch, 8.4 us base, 3 hops of 3.4 us, 3/4 of the bytes; all-reduces pass twice."""
    link = group_link(parse_mesh("tp=4"), "tp", TOY)
    assert collective_us("all_gather", 4e9, link) == pytest.approx(5 + 8.4 + 3 * 3.4 + 30_000)
    assert collective_us("reduce_scatter", 4e9, link) == pytest.approx(5 + 8.4 + 3 * 3.4 + 30_000)
    assert collective_us("all_reduce", 4e9, link) == pytest.approx(5 + 8.4 + 6 * 3.4 + 60_000)
    # each rank holds 1 GB and sends 3/4 of it; three messages at LL's hop of 0.6 us, 10 us more than a gather
    assert collective_us("all_to_all", 4e9, link) == pytest.approx(5 + 8.4 + 10 + 3 * 0.6 + 7_500)
    assert collective_us("all_gather", 0, link) == pytest.approx(5 + 6.6 + 3 * 0.6)  # LL has the least latency


def test_between_nodes_by_hand():
    """Four ranks, one a node, at 10 GB/s: 15 us more to begin, log2(4) hops of 14 us; all-reduces pass twice."""
    link = group_link(parse_mesh("dp=4,tp=4"), "dp", TOY)
    assert collective_us("all_gather", 4e9, link) == pytest.approx(20 + 8.0 + 2 * 14 + 300_000)
    assert collective_us("all_reduce", 4e9, link) == pytest.approx(20 + 2 * 8.0 + 4 * 14 + 600_000)
    assert collective_us("all_reduce", 0, link) == pytest.approx(
        20 + 6.6 + 6 * 2.7
    )  # LL ring; its tree takes 20 + 6.8 + 4 * 5
    assert collective_us("all_to_all", 4e9, link) == pytest.approx(20 + 8.4 + 10 + 3 * 2.7 + 75_000)


def test_over_both_levels_by_hand():
    """Sixteen ranks, four a node: the ring is bound by the four network cards of a node, 40 GB/s."""
    link = group_link(parse_mesh("dp=4,tp=4"), ("dp", "tp"), TOY)
    assert (link.ranks, link.nodes, link.ranks_per_node) == (16, 4, 4)
    assert (link.steps_in_node, link.steps_between_nodes) == (12, 3)
    assert link.bandwidth_bytes_per_s("all_gather") == 40e9
    ring = 20 + 8.4 + 12 * 3.4 + 3 * 14 + 16e9 * 15 / 16 / 40e9 * 1e6
    assert collective_us("all_gather", 16e9, link) == pytest.approx(ring)
    # each rank holds 1 GB; 12/16 of it leave through its own card, which takes longer than 3/16 inside the node
    assert collective_us("all_to_all", 16e9, link) == pytest.approx(20 + 8.4 + 10 + 3 * 0.6 + 12 * 2.7 + 75_000)


@pytest.mark.parametrize("device", device_names())
@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_one_device_costs_nothing(device, kind):
    """An axis of one device has no collective to pay."""
    assert price(kind, GB, "dp=1,tp=8", "dp", device) == 0.0


@pytest.mark.parametrize(("mesh", "axes"), GROUPS)
@pytest.mark.parametrize("device", NETWORKED)
def test_strictly_increasing_and_continuous(device, mesh, axes):
    """One byte more costs more, but never a jump: the slope between neighbours stays below the steepest line's."""
    link = group_link(parse_mesh(mesh), axes, load_device(device))
    for kind in COLLECTIVE_KINDS:
        steepest = max(slope for _, slope in collective_lines(kind, link))
        dense = sorted(
            {int(size * factor) + more for size in SIZES for factor in (1, 1.19, 1.41, 1.68) for more in (0, 1)}
        )
        for smaller, larger in pairwise(dense):
            rise = collective_us(kind, larger, link) - collective_us(kind, smaller, link)
            assert 0 < rise <= steepest * (larger - smaller) * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize(("mesh", "axes"), GROUPS)
@pytest.mark.parametrize("device", NETWORKED)
def test_reduce_scatter_all_reduce_all_gather(device, mesh, axes):
    """RS <= AR <= about RS + AG, at every size and on every axis."""
    for size in SIZES:
        gather, scatter, both, _ = (price(kind, size, mesh, axes, device) for kind in COLLECTIVE_KINDS)
        assert scatter <= both <= scatter + gather


def test_reduce_scatter_is_never_dearer_at_scale():
    """On 64 nodes a tree all-reduce takes fewer hops than a ring; a reduce-scatter may be one, parts thrown away."""
    link = group_link(parse_mesh("dp=64,tp=8"), "dp", load_device("h100"))
    assert collective_us("reduce_scatter", 1024, link) <= collective_us("all_reduce", 1024, link)


@pytest.mark.parametrize("mesh", ["dp=2,tp=8", "dp=8,tp=8"])
@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_outer_axis_uses_the_network(mesh, kind):
    """With one rank a host the price follows the network card, not NVLink; the inner axis does not feel the network."""
    fast = Topology(nic_bandwidth_bytes_per_s=100e9)
    h100, parsed = load_device("h100"), parse_mesh(mesh)
    outer, inner = group_link(parsed, "dp", h100), group_link(parsed, "tp", h100)
    assert outer.ranks_per_node == 1 and outer.bandwidth_bytes_per_s(kind) == h100.scale_out.efficiency[kind] * 50e9
    assert inner.nodes == 1 and inner == group_link(parsed, "tp", h100, fast)
    halved = collective_us(kind, GB, group_link(parsed, "dp", h100, fast))
    assert halved == pytest.approx(collective_us(kind, GB, outer) / 2, rel=0.02 if kind != "all_to_all" else 0.1)
    per_byte = collective_us(kind, GB, outer) - collective_us(kind, GB // 2, outer)
    sent = {"all_reduce": 2, "all_to_all": 1 / outer.ranks}.get(kind, 1) * (outer.ranks - 1) / outer.ranks * GB / 2
    assert per_byte == pytest.approx(sent / outer.bandwidth_bytes_per_s(kind) * 1e6)


def test_outer_axis_is_dearer_than_inner():
    """The same bytes over as many ranks cost several times more between hosts."""
    for kind in COLLECTIVE_KINDS:
        for size in SIZES:
            assert price(kind, size, "dp=8,tp=8", "dp") > 1.8 * price(kind, size, "dp=8,tp=8", "tp")


@pytest.mark.parametrize("device", NETWORKED)
def test_all_to_all_has_its_own_price(device):
    """For large tensors it moves 1/n of what a gather does; across hosts one network card a rank bounds it."""
    for axes, ranks in (("tp", 8), ("dp", 8)):
        gather, exchange = (price(kind, 4 * GB, "dp=8,tp=8", axes, device) for kind in ("all_gather", "all_to_all"))
        assert gather / ranks < exchange < 2 * gather / ranks
    both = price("all_to_all", 4 * GB, "dp=8,tp=8", ("dp", "tp"), device)
    out = load_device(device)
    if out.gpus_per_node == 8:
        rate = out.scale_out.bandwidth_bytes_per_s * out.scale_out.efficiency["all_to_all"]
        assert both >= 4 * GB / 64 * 56 / 64 / rate * 1e6


@pytest.mark.parametrize("device", NETWORKED)
@pytest.mark.parametrize("mesh", ["dp=2,tp=8", "dp=8,tp=8"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_both_axes_at_once_beat_one_after_the_other(device, mesh, kind):
    """P,P to S(0)S(0), and the other two, cost no more in one step than in the better two-step order."""
    ranks = {axis.name: axis.size for axis in parse_mesh(mesh).axes}
    for size in [0, KB, *SIZES]:
        joint = price(kind, size, mesh, ("dp", "tp"), device)
        for first, second in (("dp", "tp"), ("tp", "dp")):
            rest = size if kind == "all_reduce" else size / ranks[first]
            two_steps = price(kind, size, mesh, first, device) + price(kind, rest, mesh, second, device)
            assert joint <= two_steps


@pytest.mark.parametrize("device", device_names())
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_more_ranks_of_a_node_cost_more(device, kind):
    """Behind a switch, the more ranks share a result the more it costs; without one, more ranks have more links."""
    prices = [price(kind, size, f"tp={n}", "tp", device) for size in (KB, GB) for n in range(2, 9)]
    if load_device(device).scale_up.peer_bandwidth_bytes_per_s is None:
        assert prices[:7] == sorted(prices[:7]) and prices[7:] == sorted(prices[7:])
    else:
        assert prices[:7] == sorted(prices[:7]) and prices[7] > prices[13]


def test_two_h200_as_measured():
    """Large tensors between two H200 of one host, eager NCCL, torch 2.11, CUDA 13.0, 2026-11-30: medians within 8 %.

    All-to-all was measured on a buffer of that size on each GPU: the whole tensor has twice the bytes.
    """
    measured_us = {
        "all_gather": {64: 161.3, 256: 552.4},
        "reduce_scatter": {64: 166.6, 256: 579.4},
        "all_reduce": {64: 253.1, 256: 902.6},
        "all_to_all": {64: 173.4, 256: 603.9},
    }
    for kind, by_size in measured_us.items():
        for size, us in by_size.items():
            num_bytes = size * MB * (2 if kind == "all_to_all" else 1)
            assert price(kind, num_bytes, "dp=2", "dp", "h200") == pytest.approx(us, rel=0.08)


def test_four_gb200_as_measured():
    """All-reduce on the four GPUs of one host (Azure AI-benchmarking-guide, ND_GB200_v6_results.md), bus GB/s by MB."""
    for size, bus in {0.001: 0.10, 1: 80, 8: 253, 16: 331, 67: 551, 268: 594, 1000: 647, 8000: 680}.items():
        us = 1.5 * size * 1e6 / (bus * 1e9) * 1e6
        assert price("all_reduce", size * 1e6, "tp=4", "tp", "gb200") == pytest.approx(us, rel=0.12)


def test_eight_h100_as_measured():
    """Bus GB/s at 8 GB: 370 to gather, 475 to all-reduce with NVLS (nccl-tests issues 212, 272); 2x8 floor ~46 us."""
    bus = {kind: 8 * GB * 7 / 8 / price(kind, 8 * GB, "tp=8", "tp") / 1e3 for kind in ("all_gather", "all_reduce")}
    assert bus["all_gather"] == pytest.approx(370, rel=0.02)
    assert 2 * bus["all_reduce"] == pytest.approx(475, rel=0.02)
    assert price("all_reduce", 8, "dp=16", "dp") == pytest.approx(46, rel=0.1)


def test_groups_on_nodes():
    """Where the ranks of each axis lie, eight GPUs a node; the worst group speaks for the axis."""
    h100 = load_device("h100")

    def place(mesh, axes, topology=None):
        link = group_link(parse_mesh(mesh), axes, h100, topology)
        return link.ranks, link.nodes, link.ranks_per_node

    assert place("dp=8,tp=8", "dp") == (8, 8, 1)
    assert place("dp=8,tp=8", "tp") == (8, 1, 8)
    assert place("dp=8,tp=8", ("tp", "dp")) == (64, 8, 8)
    assert place("dp=16,tp=4", "dp") == (16, 8, 2)
    assert place("dp=2,cp=4,tp=4", ("dp", "tp")) == (8, 2, 4)
    assert place("dp=2,cp=4,tp=4", ("cp", "tp")) == (16, 2, 8)
    assert place("dp=4,tp=6", "tp") == (6, 2, 2)  # ranks 6 to 11: two on the first node
    assert place("dp=8,tp=8", "tp", Topology(gpus_per_node=4)) == (8, 2, 4)
    rack = group_link(parse_mesh("dp=8,tp=8"), ("dp", "tp"), load_device("gb200"))
    assert rack.nodes == 1 and rack.bandwidth_bytes_per_s("all_gather") == 0.76 * 900e9  # as four reach, not more


def test_links_without_a_switch():
    """Two MI300X share one of seven links; eight use them all."""
    mi300x = load_device("mi300x")
    rates = [group_link(parse_mesh(f"tp={n}"), "tp", mi300x).bandwidth_bytes_per_s("all_gather") for n in (2, 4, 8)]
    assert rates == pytest.approx([0.7 * 64e9, 0.7 * 192e9, 0.7 * 448e9])


def test_mistakes():
    """Unknown kind, negative size, no network, an axis twice, a bad topology."""
    link = group_link(parse_mesh("tp=8"), "tp", load_device("h100"))
    with pytest.raises(
        UsageError, match=r'no collective is named "allgather"\n.*\n  do: did you mean all_gather\? known: all_gather, '
    ):
        collective_us("allgather", 1, link)
    with pytest.raises(UsageError, match=r"num_bytes is -1\n  at: price of all_gather"):
        collective_us("all_gather", -1, link)
    with pytest.raises(
        CostError, match=r"rtx4090 has no network between nodes, and dp spans several\n  at: mesh dp=2,tp=8, 8 GPUs"
    ):
        group_link(parse_mesh("dp=2,tp=8"), "dp", load_device("rtx4090"))
    with pytest.raises(UsageError, match=r"an axis is named twice in tp, tp"):
        group_link(parse_mesh("tp=8"), ("tp", "tp"), load_device("h100"))
    with pytest.raises(UsageError, match=r'no axis is named "ep"'):
        group_link(parse_mesh("tp=8"), "ep", load_device("h100"))
    with pytest.raises(UsageError, match=r"gpus_per_node is 0\n  at: topology"):
        Topology(gpus_per_node=0)


def test_doc_examples_run():
    """The examples in the docstrings print what they say."""
    assert doctest.testmod(collectives_module).failed == 0
    assert doctest.testmod(links_module).failed == 0
