"""What a device can do, as data: `profiles/*.toml` in, `DeviceProfile` out.

A profile is one file a device: memory, bandwidth, dense FLOP rates by dtype, the float8 recipes that its kernels take,
the share of peak that large GEMMs reach, its links. Every number carries its source (`profile_file.py` has the form).
Units: decimal (3.35 TB/s = 3.35e12), link rates in one direction for one GPU, FLOP rates without structured sparsity
(one multiply-add = 2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoparallel_fp8.errors import CostError, UsageError

from .profile_file import ProfileFile

PROFILE_DIR = Path(__file__).parent / "profiles"
DEFAULT_DEVICE = "h100"
COLLECTIVE_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "nvfp4")
KERNEL_RECIPES = tuple(name for name in RECIPES if name != "rowwise_with_gw_hp")  # that one is rowwise plus bf16 GEMMs
DTYPES = (
    *("float64", "float32", "tfloat32", "bfloat16", "float16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2", "int8"),
)
_EFFICIENCY_KEYS = ("default", *DTYPES, *KERNEL_RECIPES, "tensorwise_slow_accum")
_TWINS = {"float8_e4m3fn": "float8_e4m3fnuz", "float8_e5m2": "float8_e5m2fnuz"}
_TWINS.update({value: key for key, value in _TWINS.items()})


@dataclass(frozen=True)
class Link:
    """One kind of connection of a GPU to others.

    Attributes:
        kind: "nvlink", "pcie", "infinity_fabric", "memory"; "infiniband", "ethernet" between nodes.
        bandwidth_bytes_per_s: of one GPU to all its peers together, in one direction.
        latency_us: one ring step of a large message.
        base_us: added once to a collective that uses the link.
        efficiency: collective -> share of the bandwidth that large messages reach; above 1 where a switch reduces.
        efficiency_ranks: number of GPUs that `efficiency` was measured with.
        pair_efficiency: the same for two GPUs; None where it does not depend on their number.
        peer_bandwidth_bytes_per_s: of the link to any one peer; None behind a switch.
        multicast_us: of a collective that the switch carries, whatever the number of GPUs; None where it cannot.
    """

    kind: str
    bandwidth_bytes_per_s: float
    latency_us: float
    base_us: float
    efficiency: Mapping[str, float]
    efficiency_ranks: int = 8
    pair_efficiency: Mapping[str, float] | None = None
    peer_bandwidth_bytes_per_s: float | None = None
    multicast_us: float | None = None


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of GPU and its place in a node; change one with `dataclasses.replace`.

    >>> load_device("H200").bandwidth_bytes_per_s
    4800000000000.0

    Attributes:
        name: file name of the profile, lower case.
        aliases: other names it answers to.
        cuda_names: parts of the name that the driver gives the device.
        vendor: "nvidia", "amd" or "generic".
        architecture: "sm90", "gfx942", ...
        recipes: float8 recipes with a GEMM kernel, of `KERNEL_RECIPES`.
        memory_bytes: what a plan may fill.
        bandwidth_bytes_per_s: of device memory, peak.
        memory_efficiency: share of it that a streaming kernel reaches.
        num_compute_units: SMs or CUs.
        l2_bytes: last cache that all compute units share.
        launch_us: least time of a kernel in a compiled program.
        gpus_per_node: GPUs that `scale_up` joins.
        hidden_share: share of its time that a collective beside compute still costs; above 0.
        peak_flops: dtype -> dense FLOP/s of matrix products.
        gemm_efficiency: recipe or dtype -> share of peak that large GEMMs reach; "default" for the others.
        scale_up, scale_out: links within and between nodes; scale_out is None without a network.
        sources: dotted key of every number -> where it comes from.
    """

    name: str
    aliases: tuple[str, ...]
    cuda_names: tuple[str, ...]
    vendor: str
    architecture: str
    recipes: tuple[str, ...]
    memory_bytes: int
    bandwidth_bytes_per_s: float
    memory_efficiency: float
    num_compute_units: int
    l2_bytes: int
    launch_us: float
    gpus_per_node: int
    hidden_share: float
    peak_flops: Mapping[str, float]
    gemm_efficiency: Mapping[str, float]
    scale_up: Link
    scale_out: Link | None
    sources: Mapping[str, str] = field(repr=False)

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.bandwidth_bytes_per_s, self.gpus_per_node))

    @classmethod
    def from_toml(cls, path: str | Path) -> DeviceProfile:
        """The profile in a file, which may name a shipped one as its `base`.

        Raises:
            UsageError: the file cannot be read, or a key is missing, unknown, of the wrong type, out of range or
                without a source; the message names file and key.
        """
        file = ProfileFile(Path(path), PROFILE_DIR)
        profile = cls(
            name=file.text("name").lower(),
            aliases=tuple(alias.lower() for alias in file.texts("aliases")) if file.has("aliases") else (),
            cuda_names=file.texts("cuda_names") if file.has("cuda_names") else (),
            vendor=file.text("vendor"),
            architecture=file.text("architecture"),
            recipes=_recipes(file),
            memory_bytes=file.whole("memory_bytes"),
            bandwidth_bytes_per_s=file.number("bandwidth_bytes_per_s"),
            memory_efficiency=file.number("memory_efficiency", at_most=1.0),
            num_compute_units=file.whole("num_compute_units"),
            l2_bytes=file.whole("l2_bytes"),
            launch_us=file.number("launch_us"),
            gpus_per_node=file.whole("gpus_per_node"),
            hidden_share=file.number("hidden_share", at_most=1.0),
            peak_flops=file.table("peak_flops", DTYPES),
            gemm_efficiency=file.table("gemm_efficiency", _EFFICIENCY_KEYS, at_most=1.0),
            scale_up=_link(file, "scale_up"),
            scale_out=_link(file, "scale_out") if file.has("scale_out") else None,
            sources=file.sources,
        )
        if "default" not in profile.gemm_efficiency:
            raise file.error("key gemm_efficiency.default is missing", "gemm_efficiency.default")
        file.finish()
        return profile


def device_names() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted.

    >>> device_names()[:4]
    ('a100', 'b200', 'b300', 'cpu')
    """
    return tuple(sorted(file.stem for file in PROFILE_DIR.glob("*.toml")))


def load_device(device: str | Path | DeviceProfile) -> DeviceProfile:
    """The profile of a name, an alias, a driver's name (in any case), or of a `.toml` file; or the profile itself.

    >>> load_device("MI300X").architecture
    'gfx942'

    Raises:
        UsageError: no profile has that name; the message lists the names, the closest first. See `from_toml` for files.
    """
    if isinstance(device, DeviceProfile):
        return device
    if isinstance(device, Path) or (isinstance(device, str) and device.endswith(".toml")):
        return DeviceProfile.from_toml(device)
    if not isinstance(device, str):
        message = f"device is a {type(device).__name__}, not a name or a DeviceProfile"
        raise UsageError(message, at="device", do=f"use one of {', '.join(device_names())}")
    by_name = _shipped()
    wanted = re.sub(r"[\s_]+", "-", device.strip().lower())
    if name := wanted if wanted in by_name else _match_cuda_name(device):
        return by_name[name]
    close = [by_name[name].name for name in get_close_matches(wanted, by_name, n=3)]
    hint = f"did you mean {' or '.join(dict.fromkeys(close))}? " if close else ""
    do = f"{hint}known: {', '.join(device_names())}; or pass the path of a .toml profile"
    raise UsageError(f'no device profile is named "{device}"', at="device", do=do)


def default_device() -> tuple[DeviceProfile, str]:
    """The profile of the CUDA (or ROCm) device at hand, else of the H100; and a sentence that says which and why."""
    cuda_name = _cuda_device_name()
    if cuda_name is None:
        return load_device(DEFAULT_DEVICE), f"no GPU here: planned for {DEFAULT_DEVICE}; choose another with device="
    name = _match_cuda_name(cuda_name)
    if name is None:
        reason = f'no profile fits the GPU here, "{cuda_name}"'
        return load_device(DEFAULT_DEVICE), f"{reason}: planned for {DEFAULT_DEVICE}; choose another with device="
    return load_device(name), f'planned for {name}, the GPU here ("{cuda_name}")'


def require_recipe(profile: DeviceProfile, recipe: str | None, *, emulate: bool = False) -> bool:
    """Whether the recipe has to be emulated on the device; False for None.

    Args:
        profile: the device.
        recipe: one of `RECIPES`, or None.
        emulate: a recipe without a kernel is emulated instead of refused.

    Raises:
        UsageError: unknown recipe; or one the device has no kernel for, with the devices that have one.
    """
    if recipe is None:
        return False
    if recipe not in RECIPES:
        close = get_close_matches(str(recipe), RECIPES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f'no recipe is named "{recipe}"', at="recipe", do=f"{hint}known: {', '.join(RECIPES)}")
    if _has_kernel(profile, recipe):
        return False
    if emulate:
        return True
    fitting = [name for name in device_names() if _has_kernel(load_device(name), recipe) and name != "cpu"]
    raise UsageError(
        f'{profile.name} ({profile.architecture}) has no kernel for recipe "{recipe}"',
        at="device, recipe",
        do=f"plan for a device that has: {', '.join(fitting)}; or with emulate=True (--emulate)",
    )


def matmul_peak_flops(
    profile: DeviceProfile, dtype: Any, recipe: str | None = None, *, emulated: bool = False
) -> float:
    """Dense peak of a matrix product, in FLOP/s.

    Args:
        profile: the device.
        dtype: of the operands, a torch dtype or its name. The OCP and the fnuz spelling of a float8 type stand for each
            other, since a graph captured elsewhere names the type of the machine that traced it.
        recipe: float8 recipe of the product; block formats run at the rate of their element type.
        emulated: the operands are dequantised and multiplied in bfloat16.

    Raises:
        CostError: the device has no rate for the dtype, or no kernel for the recipe.
    """
    name = "bfloat16" if emulated else _dtype_name(dtype)
    rate = profile.peak_flops.get(name) or profile.peak_flops.get(_TWINS.get(name, ""))
    if rate is None:
        do = f"it has rates for {', '.join(profile.peak_flops)}"
        raise CostError(
            f"{profile.name} has no matrix rate for {name}", at=f"profile {profile.name}: peak_flops", do=do
        )
    if recipe is not None and not emulated and not _has_kernel(profile, recipe):
        message = f'{profile.name} ({profile.architecture}) has no kernel for recipe "{recipe}"'
        raise CostError(message, at=f"profile {profile.name}: recipes", do="plan it with emulate=True (--emulate)")
    return rate


def matmul_efficiency(
    profile: DeviceProfile, dtype: Any, recipe: str | None = None, *, emulated: bool = False
) -> float:
    """Share of `matmul_peak_flops` that large GEMMs reach: by recipe if there is one, else by dtype or the default."""
    table = profile.gemm_efficiency
    if recipe is not None and not emulated:
        kernel = "rowwise" if recipe == "rowwise_with_gw_hp" else recipe
        if kernel in table:
            return table[kernel]
    return table.get("bfloat16" if emulated else _dtype_name(dtype), table["default"])


@lru_cache(maxsize=1)
def _shipped() -> dict[str, DeviceProfile]:
    """Every name and alias -> profile."""
    found: dict[str, DeviceProfile] = {}
    for name in device_names():
        profile = DeviceProfile.from_toml(PROFILE_DIR / f"{name}.toml")
        for key in (profile.name, *profile.aliases):
            assert key not in found, f"{key} names two profiles, {name} and {found[key].name}"
            found[key] = profile
    return found


def _recipes(file: ProfileFile) -> tuple[str, ...]:
    recipes = file.texts("recipes")
    for recipe in recipes:
        if recipe not in KERNEL_RECIPES:
            raise file.error(f"unknown recipe {recipe!r}", "recipes", f"known: {', '.join(KERNEL_RECIPES)}")
    return recipes


def _link(file: ProfileFile, key: str) -> Link:
    def shares(name: str) -> dict[str, float]:
        table = file.table(f"{key}.{name}", COLLECTIVE_KINDS, at_most=2.0)
        if missing := [kind for kind in COLLECTIVE_KINDS if kind not in table]:
            raise file.error(f"key {key}.{name}.{missing[0]} is missing", f"{key}.{name}.{missing[0]}")
        return table

    peer, multicast = f"{key}.peer_bandwidth_bytes_per_s", f"{key}.multicast_us"
    return Link(
        kind=file.text(f"{key}.kind"),
        bandwidth_bytes_per_s=file.number(f"{key}.bandwidth_bytes_per_s"),
        latency_us=file.number(f"{key}.latency_us"),
        base_us=file.number(f"{key}.base_us"),
        efficiency=shares("efficiency"),
        efficiency_ranks=file.whole(f"{key}.efficiency_ranks") if file.has(f"{key}.efficiency_ranks") else 8,
        pair_efficiency=shares("pair_efficiency") if file.has(f"{key}.pair_efficiency") else None,
        peer_bandwidth_bytes_per_s=file.number(peer) if file.has(peer) else None,
        multicast_us=file.number(multicast) if file.has(multicast) else None,
    )


def _has_kernel(profile: DeviceProfile, recipe: str) -> bool:
    if recipe == "rowwise_with_gw_hp":
        return "rowwise" in profile.recipes and "bfloat16" in profile.peak_flops
    return recipe in profile.recipes


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _cuda_device_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _match_cuda_name(cuda_name: str) -> str | None:
    """Name of the profile of which a `cuda_names` entry stands in the driver's name as a word; "H200" not in GH200."""
    for profile in _shipped().values():
        for part in profile.cuda_names:
            if re.search(rf"(?<![A-Za-z0-9]){re.escape(part)}(?![A-Za-z0-9])", cuda_name, re.IGNORECASE):
                return profile.name
    return None
