"""Device profiles: what ships is complete and sourced, look-ups are forgiving, files are checked key by key."""

import doctest
import pickle
import re
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from autoparallel_fp8.cost_models import (
    RECIPES,
    DeviceProfile,
    default_device,
    device_names,
    load_device,
    matmul_efficiency,
    matmul_peak_flops,
    require_recipe,
)
from autoparallel_fp8.cost_models import device as device_module
from autoparallel_fp8.cost_models.profile_file import ProfileFile, tomllib

from autoparallel_fp8.errors import CostError, UsageError

SHIPPED = (
    *(
        "a100",
        "b200",
        "b300",
        "cpu",
        "gb200",
        "h100",
        "h100-pcie",
        "h200",
        "l40s",
        "mi300x",
        "mi325x",
        "mi350x",
        "mi355x",
    ),
    *("rtx4090", "rtx5090"),
)

MINIMAL = """
name = "Mine"
vendor = "nvidia"
architecture = "sm90"
recipes = ["rowwise"]
memory_bytes = { value = 10e9, source = "s" }
bandwidth_bytes_per_s = { value = 1e12, source = "s" }
memory_efficiency = { value = 0.9, source = "s" }
num_compute_units = { value = 10, source = "s" }
l2_bytes = { value = 1e6, source = "s" }
launch_us = { value = 2.0, source = "s" }
gpus_per_node = { value = 4, source = "s" }
hidden_share = { value = 0.2, source = "s" }
[peak_flops]
bfloat16 = { value = 1e14, source = "s" }
[gemm_efficiency]
default = { value = 0.7, source = "s" }
[scale_up]
kind = "nvlink"
bandwidth_bytes_per_s = { value = 100e9, source = "s" }
latency_us = { value = 3.4, source = "s" }
base_us = { value = 5.0, source = "s" }
[scale_up.efficiency]
all_gather = { value = 0.8, source = "s" }
reduce_scatter = { value = 0.8, source = "s" }
all_reduce = { value = 0.8, source = "s" }
all_to_all = { value = 0.8, source = "s" }
"""


def numbers_of(value, key=""):
    """Dotted key and parent table of every number in a parsed TOML file."""
    for name, item in value.items():
        if isinstance(item, dict):
            yield from numbers_of(item, f"{key}.{name}" if key else name)
        elif isinstance(item, (int, float)):
            yield key, name, value


def test_every_device_ships():
    """The list of profiles is pinned."""
    assert device_names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_number_has_a_source(name):
    """No number stands in a profile without a text beside it that says where it is from."""
    raw = tomllib.loads((device_module.PROFILE_DIR / f"{name}.toml").read_text())
    for key, part, table in numbers_of(raw):
        assert part == "value", f"{key}.{part} is a bare number"
        assert len(table["source"]) >= 7, key
    profile = load_device(name)
    counted = 8 + len(profile.peak_flops) + len(profile.gemm_efficiency)
    for link in filter(None, (profile.scale_up, profile.scale_out)):
        counted += 3 + len(link.efficiency) + len(link.pair_efficiency or ())
        counted += bool(link.peer_bandwidth_bytes_per_s) + bool(link.multicast_us)
    stated = [key for key in profile.sources if not key.endswith("efficiency_ranks")]
    assert len(stated) == counted


@pytest.mark.parametrize("name", SHIPPED)
def test_profiles_are_plausible(name):
    """Units are right to a factor of ten: no tera where a giga belongs; no rate is a sparse one."""
    profile = load_device(name)
    assert profile.name == name
    assert 2e10 < profile.memory_bytes < 4e11
    assert 5e10 < profile.bandwidth_bytes_per_s <= 8e12
    assert 1e6 < profile.l2_bytes < 2e8
    assert profile.peak_flops["bfloat16"] == profile.peak_flops["float16"]
    for dtype, rate in profile.peak_flops.items():
        if dtype.startswith("float8"):
            assert profile.peak_flops["bfloat16"] <= rate <= 2.03 * profile.peak_flops["bfloat16"]
    for link in filter(None, (profile.scale_up, profile.scale_out)):
        assert 1e9 <= link.bandwidth_bytes_per_s <= 9e11
    assert 0 < profile.hidden_share <= 1


def test_bases_share_what_they_should():
    """The H200 is the H100's die with other memory; names are not taken over."""
    h100, h200 = load_device("h100"), load_device("h200")
    assert h200.peak_flops == h100.peak_flops and h200.recipes == h100.recipes
    assert (h100.bandwidth_bytes_per_s, h200.bandwidth_bytes_per_s) == (3.35e12, 4.8e12)
    assert not set(h100.aliases) & set(h200.aliases)
    assert "tfloat32" not in load_device("mi350x").peak_flops and "float8_e4m3fn" in load_device("mi355x").peak_flops


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *(
            ("H200", "h200"),
            (" h100 ", "h100"),
            ("H100-SXM", "h100"),
            ("h100_pcie", "h100-pcie"),
            ("RTX 4090", "rtx4090"),
        ),
        *(("NVIDIA H200", "h200"), ("GB200-NVL72", "gb200"), ("mi300", "mi300x")),
    ],
)
def test_names_are_forgiving(given, name):
    """Case, blanks, underscores, aliases and the driver's own names all find the profile."""
    assert load_device(given).name == name


def test_unknown_names_list_the_known():
    """A name that nothing answers to gets the closest ones and the whole list."""
    with pytest.raises(UsageError, match=r'no device profile is named "h20"') as caught:
        load_device("h20")
    assert re.search(r"did you mean .*h200", caught.value.do) and "mi300x" in caught.value.do
    with pytest.raises(UsageError, match=r'"tpu-v7"\n  at: device\n  do: known: a100, b200'):
        load_device("tpu-v7")
    with pytest.raises(UsageError, match="device is a int, not a name"):
        load_device(7)


def test_a_profile_is_a_value():
    """A profile passes through `load_device`, is frozen, hashable, picklable, and changed by `replace`."""
    profile = load_device("h200")
    assert load_device(profile) is profile
    smaller = replace(profile, memory_bytes=10**9)
    assert smaller != profile and len({profile, smaller, load_device("H200")}) == 2
    assert pickle.loads(pickle.dumps(profile)) == profile
    with pytest.raises(FrozenInstanceError):
        profile.memory_bytes = 1


@pytest.mark.parametrize(
    ("cuda_name", "name"),
    [
        *(("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie")),
        *(("NVIDIA GB200", "gb200"), ("NVIDIA B200", "b200"), ("NVIDIA A100-SXM4-80GB", "a100")),
        *(("NVIDIA GeForce RTX 5090", "rtx5090"), ("AMD Instinct MI300X", "mi300x")),
    ],
)
def test_default_device_is_the_one_at_hand(monkeypatch, cuda_name, name):
    """The driver's name picks the profile; a longer name is never taken for a shorter one inside it."""
    monkeypatch.setattr(device_module, "_cuda_device_name", lambda: cuda_name)
    profile, sentence = default_device()
    assert profile.name == name
    assert sentence == f'planned for {name}, the GPU here ("{cuda_name}")'


@pytest.mark.parametrize("cuda_name", [None, "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-40GB", "Tesla T4"])
def test_default_device_without_a_profile(monkeypatch, cuda_name):
    """No GPU, or one without a profile, plans for the H100 and says so."""
    monkeypatch.setattr(device_module, "_cuda_device_name", lambda: cuda_name)
    profile, sentence = default_device()
    assert profile.name == "h100"
    assert sentence.endswith("planned for h100; choose another with device=")
    assert (cuda_name or "no GPU here") in sentence


def test_recipes_by_device():
    """Which kernels exist where."""
    having = {recipe: [n for n in SHIPPED if recipe_fits(n, recipe)] for recipe in RECIPES}
    blackwell = ["b200", "b300", "gb200"]
    assert having["blockwise"] == ["h100", "h100-pcie", "h200"]
    assert having["mxfp8"] == [*blackwell, "mi350x", "mi355x", "rtx5090"]
    assert having["nvfp4"] == blackwell
    assert having["tensorwise"] == having["rowwise"] == having["rowwise_with_gw_hp"] == list(SHIPPED[1:])


def recipe_fits(name, recipe):
    try:
        return not require_recipe(load_device(name), recipe)
    except UsageError:
        return False


def test_require_recipe_names_devices_that_fit():
    """A recipe without a kernel is refused with the devices that have one, or emulated where that was asked for."""
    a100, h100 = load_device("a100"), load_device("h100")
    with pytest.raises(UsageError, match=r'a100 \(sm80\) has no kernel for recipe "rowwise"') as caught:
        require_recipe(a100, "rowwise")
    assert "h100, h100-pcie, h200, l40s" in caught.value.do and "cpu" not in caught.value.do
    with pytest.raises(
        UsageError, match=r"do: plan for a device that has: b200, b300, gb200, mi350x, mi355x, rtx5090; or"
    ):
        require_recipe(h100, "mxfp8")
    assert require_recipe(h100, "mxfp8", emulate=True) is True
    assert require_recipe(h100, "rowwise", emulate=True) is False
    assert require_recipe(a100, None) is False
    with pytest.raises(UsageError, match=r'no recipe is named "row_wise"\n.*\n  do: did you mean rowwise\?'):
        require_recipe(h100, "row_wise")


def test_matmul_peak():
    """Rates by dtype, torch's or by name; float8 spellings stand for each other; emulation multiplies in bf16."""
    h100, mi300x = load_device("h100"), load_device("mi300x")
    assert matmul_peak_flops(h100, torch.bfloat16) == 989.4e12
    assert matmul_peak_flops(h100, torch.float8_e5m2, "tensorwise") == 1978.9e12
    assert matmul_peak_flops(mi300x, torch.float8_e4m3fn, "rowwise") == 2614.9e12
    assert matmul_peak_flops(load_device("mi350x"), "float8_e4m3fnuz") == 4614e12
    assert matmul_peak_flops(h100, torch.float8_e4m3fn, "mxfp8", emulated=True) == 989.4e12
    with pytest.raises(
        CostError, match=r"a100 has no matrix rate for float8_e4m3fn\n  at: profile a100: peak_flops\n  do: .*bfloat16"
    ):
        matmul_peak_flops(load_device("a100"), torch.float8_e4m3fn)
    with pytest.raises(CostError, match=r"h100 has no matrix rate for int64"):
        matmul_peak_flops(h100, torch.int64)
    with pytest.raises(CostError, match=r'h100 \(sm90\) has no kernel for recipe "mxfp8"\n.*\n  do: .*emulate=True'):
        matmul_peak_flops(h100, torch.float8_e4m3fn, "mxfp8")


def test_matmul_efficiency():
    """The recipe's share where there is one, else the dtype's, else the default."""
    h200 = load_device("h200")
    assert matmul_efficiency(h200, torch.bfloat16) == 0.676
    assert (
        matmul_efficiency(h200, torch.float8_e4m3fn, "rowwise_with_gw_hp")
        == matmul_efficiency(h200, "x", "rowwise")
        == 0.639
    )
    assert matmul_efficiency(h200, torch.float8_e4m3fn, "mxfp8", emulated=True) == 0.676
    assert matmul_efficiency(h200, torch.float64) == h200.gemm_efficiency["default"]


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_file_of_ones_own(tmp_path):
    """A whole profile, and one that changes two figures of a shipped one."""
    mine = load_device(str(write(tmp_path, MINIMAL)))
    assert (mine.name, mine.aliases, mine.scale_out, mine.scale_up.efficiency_ranks) == ("mine", (), None, 8)
    tuned = (
        'base = "h200"\nname = "lab"\n[scale_out]\nbandwidth_bytes_per_s = { value = 25e9, source = "ib_write_bw" }\n'
    )
    lab = load_device(write(tmp_path, tuned))
    assert (
        lab.scale_out.bandwidth_bytes_per_s == 25e9 and lab.sources["scale_out.bandwidth_bytes_per_s"] == "ib_write_bw"
    )
    assert lab.memory_bytes == load_device("h200").memory_bytes and lab.cuda_names == ()


@pytest.mark.parametrize(
    ("old", "new", "key", "message"),
    [
        ('launch_us = { value = 2.0, source = "s" }', "", "launch_us", "key launch_us is missing"),
        ('launch_us = { value = 2.0, source = "s" }', "launch_us = 2.0", "launch_us", "launch_us has no source"),
        (
            'launch_us = { value = 2.0, source = "s" }',
            "launch_us = { value = 2.0 }",
            "launch_us",
            "launch_us has no source",
        ),
        ('value = 2.0, source = "s"', 'value = "two", source = "s"', "launch_us", "launch_us is 'two', not a number"),
        ('value = 2.0, source = "s"', 'value = inf, source = "s"', "launch_us", "launch_us is inf; it must be above 0"),
        ('value = 2.0, source = "s"', 'value = nan, source = "s"', "launch_us", "launch_us is nan; it must be above 0"),
        ('value = 2.0, source = "s"', 'value = 2.0, source = "s", unit = "us"', "launch_us", "unknown part 'unit'"),
        ("value = 0.2,", "value = 0,", "hidden_share", "hidden_share is 0; it must be above 0 and at most 1"),
        ("value = 10,", "value = 10.5,", "num_compute_units", "num_compute_units is 10.5, not a whole number"),
        ('"sm90"', "90", "architecture", "architecture is 90, not a text"),
        ('["rowwise"]', '"rowwise"', "recipes", "recipes is 'rowwise', not a list of texts"),
        ('["rowwise"]', '["rowise"]', "recipes", "unknown recipe 'rowise'"),
        ("launch_us", "lunch_us", "launch_us", "key launch_us is missing"),
        ('name = "Mine"', 'name = "Mine"\nspeed = 3', "speed", "unknown key speed"),
        (
            "bfloat16 =",
            "bfloat61 =",
            "peak_flops.bfloat61",
            r"unknown key peak_flops.bfloat61\n.*\n  do: did you mean bfloat16",
        ),
        ("default =", "rowwise =", "gemm_efficiency.default", "key gemm_efficiency.default is missing"),
        ('all_to_all = { value = 0.8, source = "s" }', "", "all_to_all", "scale_up.efficiency.all_to_all is missing"),
        ('name = "Mine"', 'name = "Mine"\nbase = "h20"', "base", "base 'h20' is no shipped profile"),
        ('name = "Mine"', 'name = "Mine"\nbase = "h200"\nwithout = ["x"]', "without", "without names 'x'"),
    ],
)
def test_file_errors_name_file_and_key(tmp_path, old, new, key, message):
    """Each mistake in a file is told with the file and the key."""
    assert old in MINIMAL
    path = write(tmp_path, MINIMAL.replace(old, new, 1))
    with pytest.raises(UsageError, match=message) as caught:
        DeviceProfile.from_toml(path)
    assert caught.value.at.startswith(f"{path}: ") and caught.value.at.endswith(key)


def test_unreadable_files(tmp_path):
    """A missing file, and one that is no TOML."""
    with pytest.raises(UsageError, match=r"cannot read the device profile: No such file"):
        load_device(str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match=r"the device profile is not valid TOML"):
        load_device(write(tmp_path, "name = "))
    with pytest.raises(UsageError, match=r"table \[peak_flops\] is missing or empty"):
        load_device(write(tmp_path, MINIMAL.replace("[peak_flops]\nbfloat16", "[peak_flops]\n[other]\nbfloat16")))


def test_doc_examples_run():
    """The examples in the docstrings print what they say."""
    assert doctest.testmod(device_module).failed == 0
    assert ProfileFile.__doc__
