"""MX casts, their GEMM and the linear layer made of them, held against torchao's reference; and the recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from autoparallel_fp8.rules import broken_constraints, options
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype
from torchao.prototype.mx_formats.mx_tensor import to_mx as torchao_to_mx
from torchao.prototype.mx_formats.utils import to_blocked
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from autoparallel_fp8.capture.meta_copy import meta_copy
from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.graph import TensorSpec
from autoparallel_fp8.integrations.hugging_face import build_from_config
from autoparallel_fp8.models.presets import build, preset_config
from autoparallel_fp8.ops.mx_linear import MXLinear
from autoparallel_fp8.ops.mx_mm import mx_mm
from autoparallel_fp8.ops.scale_tiles import to_tiles
from autoparallel_fp8.ops.to_mx import SCALING_MODES, from_mx, to_mx
from autoparallel_fp8.recipes import convert
from autoparallel_fp8.shards import same_bits

F32, BF16, E4M3, E5M2, E8M0 = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)
BITS = {F32: torch.int32, BF16: torch.int16}


def reference(x: Tensor, dtype: torch.dtype, axis: int, mode: str, block: int = 32) -> tuple[Tensor, Tensor]:
    """(data, scale) that torchao gives with the axis put last."""
    scale, data = torchao_to_mx(x.movedim(axis, -1).contiguous(), dtype, block, ScaleCalculationMode(mode))
    return data.movedim(-1, axis), scale.movedim(-1, axis)


def holds(x: Tensor, dtype: torch.dtype, axis: int, mode: str, block: int = 32) -> bool:
    """Whether the cast is torchao's, bit for bit; NaNs of either sign included."""
    found, wanted = to_mx(x, dtype, block, axis, mode), reference(x, dtype, axis, mode, block)
    return all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))


def edges(dtype: torch.dtype) -> list[float]:
    """Zeros, subnormals, powers of two and their neighbours, the largest numbers, infinities and NaN."""
    info = torch.finfo(dtype)
    near = [
        2.0**e * f for e in (-140, -127, -126, -9, 0, 8, 120, 127) for f in (0.875, 1.0, 1.0078125, 1.75, 1.7578125)
    ]
    return [0.0, -0.0, info.smallest_normal, info.smallest_normal / 4, info.max, float("inf"), float("nan"), *near]


# ---- casts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", SCALING_MODES)
@pytest.mark.parametrize("elements", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [F32, BF16])
class TestCastIsTorchaos:
    """Data and scale equal torchao's bit for bit, whatever the numbers."""

    def test_of_any_bits(self, dtype: torch.dtype, elements: torch.dtype, mode: str) -> None:
        """Random bit patterns: each block has numbers of every size, NaNs and infinities among them."""
        generator = torch.Generator().manual_seed(1)
        info = torch.iinfo(BITS[dtype])
        for _ in range(8):
            x = torch.randint(info.min, info.max, (64, 96), dtype=BITS[dtype], generator=generator).view(dtype)
            assert holds(x, elements, 1, mode) and holds(x.nan_to_num(0, 1, -1), elements, 0, mode)

    def test_of_blocks_of_one_size(self, dtype: torch.dtype, elements: torch.dtype, mode: str) -> None:
        """Rows of every magnitude that the dtype has, subnormal ones included."""
        exponents = torch.arange(-149, 128, dtype=F32)
        rows = torch.randn(len(exponents), 64, generator=torch.Generator().manual_seed(2))
        assert holds((rows * 2.0 ** exponents[:, None]).to(dtype), elements, 1, mode)

    @given(data=st.data())
    @settings(max_examples=60, deadline=None)
    def test_of_chosen_numbers(self, dtype: torch.dtype, elements: torch.dtype, mode: str, data: Any) -> None:
        """Edge cases side by side in a block."""
        number = st.one_of(st.sampled_from(edges(dtype)), st.floats(width=32))
        block = torch.tensor(data.draw(st.lists(number, min_size=8, max_size=8)), dtype=F32).to(dtype)
        assert holds(block, elements, 0, mode, block=4)

    def test_of_other_memory_orders(self, dtype: torch.dtype, elements: torch.dtype, mode: str) -> None:
        """Any axis of any strides; results lie with the axis innermost, and the fake op says so."""
        x = torch.randn(6, 8, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
        for view in (x, x.transpose(0, 2), x.permute(1, 2, 0)[:, ::2], x.expand(2, 6, 8, 64)):
            for axis in range(-view.ndim, view.ndim):
                assert holds(view, elements, axis, mode, block=2)
                made = to_mx(view, elements, 2, axis, mode)
                faked = to_mx(view.to("meta"), elements, 2, axis, mode)
                for real, fake in zip(made, faked, strict=True):
                    assert real.movedim(axis, -1).is_contiguous()
                    assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_values_come_back() -> None:
    """What a cast stands for is torchao's dequantised tensor, along either axis."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(4)) * 10
    for dtype in (F32, BF16):
        data, scale = to_mx(x, E4M3, 32, 1, "rceil")
        assert same_bits(from_mx(data, scale, 1, dtype), to_dtype(data, scale, E4M3, 32, dtype))
        turned = from_mx(*to_mx(x.t(), E4M3, 32, 0, "rceil"), 0, dtype)
        assert same_bits(turned.t(), from_mx(data, scale, 1, dtype))


WRONG_CASTS = [
    (torch.zeros(4, 32, dtype=torch.float16), E4M3, 32, 1, "floor", "from float32 or bfloat16, not torch.float16"),
    (torch.zeros(4, 32), torch.float8_e4m3fnuz, 32, 1, "floor", "no elements of torch.float8_e4m3fnuz"),
    (torch.zeros(4, 32), E4M3, 32, 2, "floor", "along dim 2 of a tensor with 2 dims"),
    (torch.zeros(4, 32), E4M3, 32, 0, "floor", r"\[4, 32\] along dim 0: 4 is not a multiple of 32"),
    (torch.zeros(4, 32), E4M3, 32, 1, "even", "no scaling mode 'even'\n.*\n  do: use floor or rceil"),
    (torch.zeros(()), E4M3, 32, 0, "floor", "along dim 0 of a tensor with 0 dims"),
]


@pytest.mark.parametrize(("x", "dtype", "block", "axis", "mode", "message"), WRONG_CASTS)
def test_a_cast_that_cannot_be(x: Tensor, dtype: torch.dtype, block: int, axis: int, mode: str, message: str) -> None:
    """The error says what is wrong, on real and on meta tensors."""
    for tensor in (x, x.to("meta")):
        with pytest.raises(UsageError, match=message):
            to_mx(tensor, dtype, block, axis, mode)


# ---- the GEMM ------------------------------------------------------------------------------------------------------


def mx_operands(m: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + k + n)
    a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator) * 5
    (data_a, scale_a), (data_b, scale_b) = to_mx(a, E4M3, 32, 1, "rceil"), to_mx(b, E4M3, 32, 0, "floor")
    return data_a, data_b, scale_a, scale_b


def test_the_product_is_that_of_dequantised_operands() -> None:
    """In float32, then cast; the fake op has the same form."""
    a, b, scale_a, scale_b = mx_operands(48, 96, 16)
    wanted = to_dtype(a, scale_a, E4M3, 32, F32) @ to_dtype(b.t(), scale_b.t(), E4M3, 32, F32).t()
    for dtype in (F32, BF16):
        made = mx_mm(a, b, scale_a, scale_b, dtype)
        torch.testing.assert_close(made, wanted.to(dtype))
        fake = mx_mm(*(t.to("meta") for t in (a, b, scale_a, scale_b)), dtype)
        assert (made.shape, made.stride(), made.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_a_product_of_wrong_operands() -> None:
    """Shapes and dtypes are named."""
    a, b, scale_a, scale_b = mx_operands(48, 96, 16)
    with pytest.raises(UsageError, match=r"\[48, 96\] and \[96, 16\] with scales \[48, 2\] and \[3, 16\]"):
        mx_mm(a, b, scale_a[:, :2], scale_b, F32)
    with pytest.raises(UsageError, match="not float32, float8_e4m3fn, float8_e8m0fnu, float8_e8m0fnu"):
        mx_mm(a.float(), b, scale_a, scale_b, F32)


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (200, 7), (384, 12), (130, 4)])
def test_scales_are_swizzled_as_kernels_read_them(shape: tuple[int, int]) -> None:
    """As torchao's `to_blocked`, padding of zeros included."""
    codes = torch.randint(0, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    assert torch.equal(to_tiles(codes.view(E8M0)).view(torch.uint8), to_blocked(codes))
    turned = codes.t().contiguous().t().view(E8M0)
    assert torch.equal(to_tiles(turned).view(torch.uint8), to_blocked(codes))


def test_torchs_scaled_gemm_takes_the_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed over on a device with the kernel passes torch's own checks of orders, recipes and scale sizes."""
    from autoparallel_fp8.ops import mx_mm as module

    monkeypatch.setattr(module, "has_kernel", lambda device: True)
    with FakeTensorMode():
        a = torch.empty(48, 96, dtype=E4M3, device="cuda")
        b = torch.empty(32, 96, dtype=E4M3, device="cuda").t()
        scale_a = torch.empty(48, 3, dtype=E8M0, device="cuda")
        scale_b = torch.empty(32, 3, dtype=E8M0, device="cuda").t()
        made = module._mx_mm_cuda(a, b, scale_a, scale_b, BF16)
        assert (tuple(made.shape), made.dtype) == ((48, 32), BF16)
        monkeypatch.setattr(module, "to_tiles", lambda scale: scale.contiguous())
        with pytest.raises(RuntimeError, match=r"scale_a must have 512 \(got: 144\)"):
            module._mx_mm_cuda(a, b, scale_a, scale_b, BF16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    """Casts are those of the CPU bit for bit; the product is that of the dequantised operands in bfloat16."""
    generator = torch.Generator().manual_seed(10)
    for dtype in (F32, BF16):
        x = (torch.randn(256, 512, generator=generator) * 2.0 ** torch.randint(-20, 20, (256, 1))).to(dtype)
        for mode in SCALING_MODES:
            for axis in (0, 1):
                here, there = to_mx(x, E4M3, 32, axis, mode), to_mx(x.cuda(), E4M3, 32, axis, mode)
                assert all(same_bits(a, b.cpu()) for a, b in zip(here, there, strict=True))
    operands = mx_operands(256, 512, 128)
    wanted = mx_mm(*operands, F32)
    for dtype in (F32, BF16):
        made = mx_mm(*(t.cuda() for t in operands), dtype)
        assert made.dtype == dtype
        assert float((made.cpu().double() - wanted.double()).norm() / wanted.double().norm()) < 5e-3


ORDERS = {"row": lambda m, n: (n, 1), "column": lambda m, n: (1, m)}
CONSTRAINTS = [
    ("sm100", (48, 64, 48), "row", "column", None),
    ("sm100", (48, 64, 40), "row", "column", r"mat2 local [64, 40]: 40 is not a multiple of 16"),
    ("sm120", (7, 64, 48), "row", "column", None),
    ("gfx950", (48, 64, 64), "row", "column", r"mat1 local [48, 64]: 48 is not a multiple of 32"),
    ("gfx950", (64, 64, 48), "row", "column", r"mat2 local [64, 48]: 48 is not a multiple of 32"),
    ("sm100", (48, 64, 48), "column", "column", "mat1 local [48, 64] has strides [1, 48]: it must be row-major"),
    ("sm100", (48, 64, 48), "row", "row", "mat2 local [64, 48] has strides [48, 1]: it must be column-major"),
    ("sm90", (7, 64, 5), "column", "row", "sm90 has no MX GEMM: it needs sm100 or later, or gfx950"),
    ("gfx942", (64, 64, 64), "row", "column", "gfx942 has no MX GEMM: it needs sm100 or later, or gfx950"),
    ("cpu", (7, 64, 5), "column", "row", None),
]


@pytest.mark.parametrize(("architecture", "sizes", "order_a", "order_b", "sentence"), CONSTRAINTS)
def test_what_kernels_demand(
    architecture: str, sizes: tuple[int, int, int], order_a: str, order_b: str, sentence: str | None
) -> None:
    """Of a rank's own operands; a device without the kernel says so, and demands nothing where it is emulated."""
    m, k, n = sizes
    a = TensorSpec((m, k), ORDERS[order_a](m, k), E4M3)
    b = TensorSpec((k, n), ORDERS[order_b](k, n), E4M3)
    scales = (TensorSpec((m, k // 32), (k // 32, 1), E8M0), TensorSpec((k // 32, n), (1, k // 32), E8M0))
    op = torch.ops.autoparallel_fp8.mx_mm.default
    broken = broken_constraints(op, (a, b, *scales), architecture)
    assert broken == (() if sentence is None else (sentence,))
    emulated = broken_constraints(op, (a, b, *scales), architecture, emulate=True)
    assert emulated == (() if sentence and "no MX GEMM" in sentence else broken)


def test_advice_names_the_multiple_that_is_demanded() -> None:
    """16 on NVIDIA, 32 on AMD."""
    for device, multiple in (("B200", 16), ("MI350X", 32)):
        a, b = torch.empty(64, 64, dtype=E4M3, device="meta"), torch.empty(24, 64, dtype=E4M3, device="meta")
        scales = torch.empty(64, 2, dtype=E8M0, device="meta"), torch.empty(24, 2, dtype=E8M0, device="meta").t()
        found = options("autoparallel_fp8.mx_mm", a, b.t(), *scales, BF16, mesh="tp=4", device=device)
        assert found.refused[0].sentence == f"mat2 local [64, 24]: 24 is not a multiple of {multiple}"
        assert f"out features to a multiple of {multiple}" in found.advice


def test_a_result_is_wide() -> None:
    """bfloat16, float16 or float32; on AMD the first two. Two e5m2 operands are refused on CUDA."""
    a, b, *scales = mx_operands(64, 64, 64)
    b, scales[1] = b.t().contiguous().t(), scales[1].t().contiguous().t()
    with pytest.raises(UsageError, match="mx_mm makes bfloat16, float16 or float32, not int32"):
        options("autoparallel_fp8.mx_mm", a, b, *scales, torch.int32, mesh="tp=2", device="B200")
    found = options("autoparallel_fp8.mx_mm", a, b, *scales, F32, mesh="tp=2", device="MI350X")
    assert not found.options and found.refused[0].sentence.startswith("a result of float32: gfx950 multiplies MX")
    assert options("autoparallel_fp8.mx_mm", a, b, *scales, F32, mesh="tp=2", device="B200").options
    a, b = a.view(torch.float8_e5m2), b.view(torch.float8_e5m2)
    assert options("autoparallel_fp8.mx_mm", a, b, *scales, BF16, mesh="tp=2", device="MI350X").options
    found = options("autoparallel_fp8.mx_mm", a, b, *scales, BF16, mesh="tp=2", device="B200")
    assert not found.options and "both float8_e5m2" in found.refused[0].sentence


# ---- the layer -----------------------------------------------------------------------------------------------------


def linears(mode: str, bias: bool, dtype: torch.dtype, wgrad_with_hp: bool = False) -> tuple[MXLinear, nn.Module]:
    """Ours and torchao's emulated one, with the same parameters."""
    torch.manual_seed(0)
    ours = MXLinear(96, 64, bias=bias, scaling_mode=mode, dtype=dtype, wgrad_with_hp=wgrad_with_hp)
    theirs = MXFP8Linear(
        96,
        64,
        bias=bias,
        dtype=dtype,
        kernel_preference=KernelPreference.EMULATED,
        scale_calculation_mode=ScaleCalculationMode(mode),
        wgrad_with_hp=wgrad_with_hp,
    )
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("mode", SCALING_MODES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "rounding"), [(F32, 1e-6), (BF16, 8e-3)])
def test_a_layer_computes_what_torchaos_does(mode: str, bias: bool, dtype: torch.dtype, rounding: float) -> None:
    """Output and all gradients of [batch, seq, in]; in float32 nothing but the order of sums may differ."""
    found = []
    for layer in linears(mode, bias, dtype, wgrad_with_hp=bias):
        x = torch.randn(2, 48, 96, generator=torch.Generator().manual_seed(6)).to(dtype).requires_grad_()
        grad = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(7)).to(dtype)
        y = layer(x)
        y.backward(grad)
        found.append([y.detach(), x.grad, *(p.grad for _, p in sorted(layer.named_parameters()))])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert float((ours.double() - theirs.double()).norm() / theirs.double().norm()) < rounding


def test_each_gemm_casts_along_what_it_contracts() -> None:
    """y, dX and dW from torchao's casts along in, out and tokens, multiplied in plain float32."""
    layer, _ = linears("rceil", False, F32)
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(8)).requires_grad_()
    grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(9))
    y = layer(x)
    y.backward(grad)

    def cast(t: Tensor, axis: int) -> Tensor:
        data, scale = reference(t.detach(), E4M3, axis, "rceil")
        data, scale = data.movedim(axis, -1), scale.movedim(axis, -1)
        return to_dtype(data.contiguous(), scale.contiguous(), E4M3, 32, F32).movedim(-1, axis)

    weight = layer.weight
    torch.testing.assert_close(y, cast(x, 1) @ cast(weight, 1).t())
    torch.testing.assert_close(x.grad, cast(grad, 1) @ cast(weight, 0))
    torch.testing.assert_close(weight.grad, cast(grad, 0).t() @ cast(x, 0))


def test_a_layer_refuses_odd_sizes() -> None:
    """Of the layer when it is made, of the tokens when it runs; the next legal sequence is named."""
    with pytest.raises(UsageError, match="in_features 48 is not a multiple of 32"):
        MXLinear(48, 64)
    with pytest.raises(UsageError, match=r"30 tokens .*\n  do: .* the smallest from here is 3 x 32 \(96 tokens\)"):
        MXLinear(64, 64)(torch.zeros(3, 10, 64))
    with pytest.raises(UsageError, match="1 tokens are not a multiple of 32"):
        MXLinear(64, 64)(torch.zeros(64))


# ---- the recipe ----------------------------------------------------------------------------------------------------


def test_the_recipe_converts_all_linears_but_the_head() -> None:
    """With their very parameters; names stay."""
    plain = meta_copy(build("llama3-debug", num_layers=1))
    names = [name for name, _ in plain.named_parameters()]
    weight = plain.get_parameter("model.layers.0.mlp.up_proj.weight")
    model, skipped = convert(plain, "mxfp8")
    kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert skipped == (("lm_head", "output head"),)
    assert kinds.pop("lm_head") is nn.Linear and set(kinds.values()) == {MXLinear}
    assert [name for name, _ in model.named_parameters()] == names
    assert model.get_parameter("model.layers.0.mlp.up_proj.weight") is weight


class _Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_what_the_recipe_leaves_alone_is_listed() -> None:
    """Odd sizes, heads, classes with a forward of their own; a module of two names is converted under both."""
    shared = nn.Linear(64, 64)
    layers = {"a": shared, "b": shared, "c": nn.Linear(64, 48), "d": nn.Linear(80, 64), "e": _Doubling(64, 64)}
    model, skipped = convert(nn.ModuleDict({**layers, "head": nn.Linear(64, 64)}), "mxfp8")
    assert skipped == (
        ("c", "out_features 48 is not a multiple of 32"),
        ("d", "in_features 80 is not a multiple of 32"),
        ("e", "its class _Doubling has a forward of its own"),
        ("head", "output head"),
    )
    assert model["a"] is model["b"] and isinstance(model["a"], MXLinear)  # type: ignore[index]
    assert isinstance(convert(nn.Linear(32, 32), "mxfp8")[0], MXLinear)
    with pytest.raises(UsageError, match=r"converts nothing: 0 \(in_features 80 .*\n.*\n.*multiples of 32"):
        convert(nn.Sequential(nn.Linear(80, 64)), "mxfp8")


def test_hooks_and_tied_weights_stay() -> None:
    """A converted layer is the old one in all but its forward."""
    linear, other = nn.Linear(32, 32), nn.Linear(32, 32)
    other.weight = linear.weight
    seen = []
    linear.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model, _ = convert(nn.Sequential(linear, other).eval(), "mxfp8")
    model(torch.zeros(32, 32))
    assert seen == [(32, 32)] and not model[0].training  # type: ignore[index]
    assert model[0].weight is model[1].weight  # type: ignore[index]


def test_a_model_that_is_converted_to_something_else() -> None:
    """Is refused with both orders of recipes; with the same one it is taken as it is."""
    model, _ = convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8")
    assert convert(model, "mxfp8") == (model, ())
    with pytest.raises(UsageError, match=r"converted already, and not with recipe 'rowwise'\n  at: 0"):
        convert(model, "rowwise")
    torchaos = nn.Sequential(MXFP8Linear(64, 64, bias=False))
    with pytest.raises(UsageError, match="converted already, and not with recipe 'mxfp8'"):
        convert(torchaos, "mxfp8")


def test_every_llama_and_qwen_linear_but_the_head_fits() -> None:
    """The presets' own sizes are multiples of 32."""
    for name in ("llama3-8b", "llama3-70b", "llama3-405b", "qwen3-8b"):
        _, skipped = convert(build_from_config(preset_config(name), 1), "mxfp8")
        assert skipped == (("lm_head", "output head"),)
