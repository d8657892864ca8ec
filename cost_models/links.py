"""What a group of ranks talks over: those along one mesh axis, or along several together, on nodes of a device profile.

Ranks are row-major and fill nodes in order, `gpus_per_node` to a node. `group_link` finds how a group lies on the nodes
and gives the rates that `collectives.py` prices with. Each GPU has a network card of its own, so r ranks on a node
carry r times its rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from autoparallel_fp8.errors import CostError, UsageError
from autoparallel_fp8.mesh import Mesh

from .device import COLLECTIVE_KINDS, DeviceProfile, Link


@dataclass(frozen=True)
class Topology:
    """What differs from the profile's node.

    Attributes:
        gpus_per_node: GPUs that the scale-up link joins; None for the profile's.
        nic_bandwidth_bytes_per_s: network rate of one GPU, in one direction; None for the profile's.
    """

    gpus_per_node: int | None = None
    nic_bandwidth_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("gpus_per_node", self.gpus_per_node),
            ("nic_bandwidth_bytes_per_s", self.nic_bandwidth_bytes_per_s),
        ):
            if value is not None and value <= 0:
                raise UsageError(
                    f"{name} is {value}", at="topology", do="give a number above 0, or None for the profile's"
                )


@dataclass(frozen=True)
class GroupLink:
    """How a group of ranks is joined; all groups of the same axes are priced as the worst of them.

    Attributes:
        ranks: size of the group.
        nodes: nodes that it touches.
        ranks_per_node: its ranks on a node; the fewest where nodes differ.
        launch_us: once a collective: launch, and the network's share where nodes > 1.
        hop_us, net_hop_us: one ring step of a large message, within and between nodes.
        node_bandwidth: bytes/s that a ring reaches within the node, one direction, by collective in the order of
            `COLLECTIVE_KINDS`; infinite where no two ranks share a node.
        net_bandwidth: the same between nodes, for one GPU; infinite for one node.
        node_multicast_us: latency within a node whose switch carries collectives itself; else None.
    """

    ranks: int
    nodes: int
    ranks_per_node: int
    launch_us: float
    hop_us: float
    net_hop_us: float
    node_bandwidth: tuple[float, ...]
    net_bandwidth: tuple[float, ...]
    node_multicast_us: float | None = None

    @property
    def spans_nodes(self) -> bool:
        return self.nodes > 1

    @property
    def steps_between_nodes(self) -> int:
        """Ring steps that cross the network, for one way round."""
        return self.nodes - 1

    @property
    def steps_in_node(self) -> int:
        """Ring steps over the scale-up link, for one way round."""
        return self.ranks - self.nodes

    def bandwidth_bytes_per_s(self, kind: str) -> float:
        """Rate of one ring through the whole group: the node's, or that of its ranks' network cards if that is less."""
        position = COLLECTIVE_KINDS.index(kind)
        return min(self.node_bandwidth[position], self.net_bandwidth[position] * self.ranks_per_node)


def group_link(
    mesh: Mesh, axes: str | Iterable[str], profile: DeviceProfile, topology: Topology | None = None
) -> GroupLink:
    """How the ranks along one axis, or along several at once, are joined.

    >>> from autoparallel_fp8.cost_models import load_device
    >>> from autoparallel_fp8.mesh import parse_mesh
    >>> link = group_link(parse_mesh("dp=8,tp=8"), "dp", load_device("h100"))
    >>> link.ranks, link.nodes, link.ranks_per_node
    (8, 8, 1)

    Args:
        mesh: gives ranks, row-major.
        axes: a name or several; their order does not matter.
        profile: links and GPUs a node.
        topology: overrides of the profile.

    Raises:
        UsageError: an unknown or repeated axis.
        CostError: the group spans nodes and the profile has no network.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    return _group_link(mesh, names, profile, topology or Topology())


@lru_cache(maxsize=4096)
def _group_link(mesh: Mesh, names: tuple[str, ...], profile: DeviceProfile, topology: Topology) -> GroupLink:
    positions = sorted(mesh.index(name) for name in names)
    if len(set(positions)) < len(positions):
        raise UsageError(f"an axis is named twice in {', '.join(names)}", at=f"mesh {mesh}", do="name each axis once")
    gpus_per_node = topology.gpus_per_node or profile.gpus_per_node
    ranks, nodes, ranks_per_node = _layout(mesh, tuple(positions), gpus_per_node)
    up, launch_us, net_hop_us = profile.scale_up, profile.scale_up.base_us, 0.0
    net: tuple[float, ...] = (float("inf"),) * len(COLLECTIVE_KINDS)
    if nodes > 1:
        out = _network(mesh, names, profile, gpus_per_node)
        rate = topology.nic_bandwidth_bytes_per_s or out.bandwidth_bytes_per_s
        net = tuple(rate * out.efficiency[kind] for kind in COLLECTIVE_KINDS)
        launch_us, net_hop_us = launch_us + out.base_us, out.latency_us
    node = tuple(node_bandwidth(up, kind, ranks_per_node) for kind in COLLECTIVE_KINDS)
    return GroupLink(ranks, nodes, ranks_per_node, launch_us, up.latency_us, net_hop_us, node, net, up.multicast_us)


def node_bandwidth(link: Link, kind: str, ranks: int) -> float:
    """Rate of a ring of GPUs of one node, in bytes/s; infinite for one GPU.

    Between the two measured group sizes, 2 and `efficiency_ranks`, the time for a byte, (n - 1) / n / rate, is taken
    linear in 1 / n, as it is where the rate is constant; beyond them the rate is. Without a switch, each of n GPUs has
    n - 1 links.
    """
    if ranks == 1:
        return float("inf")
    line = link.bandwidth_bytes_per_s
    if link.peer_bandwidth_bytes_per_s is not None:
        line = min(line, (ranks - 1) * link.peer_bandwidth_bytes_per_s)
    full = link.efficiency[kind]
    if link.pair_efficiency is None or ranks >= link.efficiency_ranks:
        return line * full
    far = 1 / link.efficiency_ranks
    time_full, time_pair = (1 - far) / full, 0.5 / link.pair_efficiency[kind]
    time = time_full + (time_pair - time_full) * (1 / ranks - far) / (0.5 - far)
    return line * (1 - 1 / ranks) / time


def _layout(mesh: Mesh, positions: tuple[int, ...], gpus_per_node: int) -> tuple[int, int, int]:
    """Ranks, most nodes and fewest ranks on a node, of the groups along these axes."""
    ranks = prod(mesh.sizes[position] for position in positions)
    others = [position for position in range(len(mesh.axes)) if position not in positions]
    node_of_rank = np.arange(mesh.num_devices).reshape(mesh.sizes) // gpus_per_node
    groups = np.unique(node_of_rank.transpose(*others, *positions).reshape(-1, ranks), axis=0)
    counts = [np.unique(group, return_counts=True)[1] for group in groups]
    return ranks, max(len(count) for count in counts), min(int(count.min()) for count in counts)


def _network(mesh: Mesh, names: tuple[str, ...], profile: DeviceProfile, gpus_per_node: int) -> Link:
    if profile.scale_out is None:
        raise CostError(
            f"{profile.name} has no network between nodes, and {', '.join(names)} spans several",
            at=f"mesh {mesh}, {gpus_per_node} GPUs a node",
            do="use fewer devices or a topology with more GPUs a node; or a profile of your own with [scale_out]",
        )
    return profile.scale_out
