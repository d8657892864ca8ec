"""Sample calls of grouped GEMMs: groups of uneven sizes, an empty one, tokens that belong to nobody."""

from __future__ import annotations

import torch
from scaled_samples import BF16, E4M3, E8M0, powers, tiles, whole
from split_ops import Sample
from torch import Tensor

from autoparallel_fp8.ops.scale_tiles import to_tiles
from autoparallel_fp8.ops.scaling import BLOCK_1X32, NO_SWIZZLE, ROWWISE, SWIZZLE_32_4_4, round_up
from autoparallel_fp8.ops.stand_ins import stand_in

aten = torch.ops.aten
F32 = torch.float32


def ends(*found: int) -> Tensor:
    return torch.tensor(found, dtype=torch.int32)


def experts(count: int, k: int, n: int, dtype: torch.dtype = BF16) -> Tensor:
    """Weights [count, k, n], column-major in the last two dims."""
    return whole(count, k, n, most=1, dtype=dtype, order="T")


def few(rows: int, columns: int) -> Tensor:
    """One in eight is 1 or -1, the others 0: parts of a sum stay where bfloat16 is exact."""
    generator = torch.Generator().manual_seed(rows + columns)
    drawn = torch.randint(0, 16, (rows, columns), generator=generator)
    return ((drawn == 0).to(F32) - (drawn == 1).to(F32)).to(E4M3)


def forms(dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Operands and ends of every form, with results that bfloat16 holds; groups end where kernels want them to."""
    offs, some = ends(16, 16, 64, 96), ends(16, 48, 48, 80)
    tokens = whole(96, 32, most=1, dtype=dtype)
    return [
        (tokens, experts(4, 32, 32, dtype), offs),
        (tokens, experts(4, 32, 32, dtype), some),
        (whole(16, 96, most=1, dtype=dtype), whole(96, 32, most=1, dtype=dtype, order="T"), offs),
        (whole(4, 8, 32, most=1, dtype=dtype), whole(32, 96, most=1, dtype=dtype, order="T"), offs),
        (whole(4, 8, 48, most=1, dtype=dtype), experts(4, 48, 32, dtype), None),
    ]


def plain() -> list[Sample]:
    op = aten._grouped_mm.default
    return [Sample(op, form if form[2] is not None else form[:2], stand_in=stand_in(op)) for form in forms(BF16)]


def factors(a: Tensor, b: Tensor, offs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rowwise scales of a form."""
    groups = len(offs) if a.ndim == b.ndim == 2 and offs is not None else 1
    of_a = powers(*a.shape[:-1]) if a.ndim == 3 else powers(a.shape[0] * groups)
    of_b = powers(b.shape[0], b.shape[2]) if b.ndim == 3 else powers(b.shape[1] * groups)
    return of_a, of_b


def rowwise() -> list[Sample]:
    op, named = aten._scaled_grouped_mm.default, aten._scaled_grouped_mm_v2.default
    found = []
    for a, b, offs in forms(E4M3):
        scale_a, scale_b = factors(a, b, offs)
        more = () if offs is None else (offs,)
        found.append(Sample(op, (a, b, scale_a, scale_b, *more), stand_in=stand_in(op)))
        lists = ((scale_a,), (ROWWISE,), (NO_SWIZZLE,), (scale_b,), (ROWWISE,), (NO_SWIZZLE,))
        found.append(Sample(named, (a, b, *lists, *more), stand_in=stand_in(named)))
    return found


def tokens_scales(sizes: tuple[int, ...], blocks: int, rows: int) -> Tensor:
    """Swizzled scales of groups of tokens, group by group; `rows` rows in all, the last of them nobody's."""
    flat = torch.cat([tiles(size, blocks).view(torch.uint8) for size in sizes if size])
    width = round_up(blocks, 4)
    made = torch.zeros(rows * width, dtype=torch.uint8)
    made[: len(flat)] = flat
    return made.view(E8M0).view(rows, width)


def weights_scales(count: int, n: int, blocks: int) -> Tensor:
    every = [to_tiles(powers(n, blocks + g, dtype=E8M0)[:, g:]).view(torch.uint8) for g in range(count)]
    return torch.stack(every).view(E8M0)


def mx() -> list[Sample]:
    """Tokens with weights: tiles that k and n fill, and such that they do not; scales of more rows than there are."""
    op, named = aten._scaled_grouped_mm.default, aten._scaled_grouped_mm_v2.default
    found = []
    cases = [(256, 256, 512, (32, 0, 96, 32)), (192, 96, 352, (32, 64)), (384, 64, 672, (64, 32, 32, 32))]
    for k, n, rows, sizes in cases:
        a, b = few(sum(sizes), k), experts(len(sizes), k, n, E4M3)
        offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
        scales = tokens_scales(sizes, k // 32, rows), weights_scales(len(sizes), n, k // 32)
        found.append(Sample(op, (a, b, *scales, offs), stand_in=stand_in(op)))
        lists = ((scales[0],), (BLOCK_1X32,), (SWIZZLE_32_4_4,), (scales[1],), (BLOCK_1X32,), (SWIZZLE_32_4_4,))
        found.append(Sample(named, (a, b, *lists, offs), stand_in=stand_in(named)))
    return found


def columns_scales(rows: int, sizes: tuple[int, ...], count: int) -> Tensor:
    """Swizzled scales of a matrix whose groups are columns, group by group; `count` columns in all."""
    flat = torch.cat([tiles(rows, -(-size // 32)).view(torch.uint8) for size in sizes if size])
    made = torch.zeros(round_up(rows, 128) * count, dtype=torch.uint8)
    made[: len(flat)] = flat
    return made.view(E8M0).view(round_up(rows, 128), count)


def mx_gradients() -> list[Sample]:
    """Two matrices whose contracted dim has the groups: groups of some blocks, of none."""
    op, named = aten._scaled_grouped_mm.default, aten._scaled_grouped_mm_v2.default
    found = []
    for m, n, sizes in ((192, 96, (64, 0, 160, 32)), (256, 128, (96, 32))):
        tokens, offs = sum(sizes), torch.tensor(sizes).cumsum(0).to(torch.int32)
        a, b = few(m, tokens), whole(tokens, n, most=1, order="T")
        count = tokens // 32 + 4 * len(sizes)
        scales = columns_scales(m, sizes, count), columns_scales(n, sizes, count)
        found.append(Sample(op, (a, b, *scales, offs), stand_in=stand_in(op)))
        lists = ((scales[0],), (BLOCK_1X32,), (SWIZZLE_32_4_4,), (scales[1],), (BLOCK_1X32,), (SWIZZLE_32_4_4,))
        found.append(Sample(named, (a, b, *lists, offs), stand_in=stand_in(named)))
    return found


def grouped_samples() -> list[Sample]:
    return [*plain(), *rowwise(), *mx(), *mx_gradients()]
