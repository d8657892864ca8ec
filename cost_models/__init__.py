"""Time and memory of plans: device profiles, links and collectives."""

from .collectives import collective_lines, collective_us
from .device import (
    COLLECTIVE_KINDS,
    RECIPES,
    DeviceProfile,
    Link,
    default_device,
    device_names,
    load_device,
    matmul_efficiency,
    matmul_peak_flops,
    require_recipe,
)
from .links import GroupLink, Topology, group_link
from .pricing import Optimizer, Pricing

__all__ = [
    "COLLECTIVE_KINDS",
    "RECIPES",
    "DeviceProfile",
    "GroupLink",
    "Link",
    "Optimizer",
    "Pricing",
    "Topology",
    "collective_lines",
    "collective_us",
    "default_device",
    "device_names",
    "group_link",
    "load_device",
    "matmul_efficiency",
    "matmul_peak_flops",
    "require_recipe",
]
