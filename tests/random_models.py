"""Small random models, and plans to try them with, as plain data that prints as the code that makes it again.

`models(recipe)` draws what a model is made of, `build` makes the module, `arguments` its inputs. Sizes are mostly
multiples of 32, so that every recipe applies and axes of 2 and 4 split them, now and then 10, 48 or 72.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

MULTIPLES = (32, 64, 96, 128)
ODD = (10, 48, 72)


class AsCode:
    """Prints as a call that names only what is not as usual."""

    def __repr__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """As hypothesis prints it."""
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Model(AsCode):
    """What a model is made of; the defaults are the plainest.

    Attributes:
        vocab: rows of the embedding; 0 for a float input [batch, seq, hidden].
        positions: "", "learned" (an embedding of arange) or "rotary" (a buffer of frequencies; with attention).
        attention: "", "full", "causal", "mask" (of booleans), "bias" (added to the scores) or "by hand" (matmul,
            masked_fill, softmax, matmul).
        repeats_heads: key and value heads are repeated by hand instead of by the kernel.
        is_fused: one linear makes queries, keys and values, which are split.
        mlp: "", "gelu", "relu", "silu" (gated).
        norm: "", "layer", "rms" or "by hand" (an RMSNorm written out, in float32).
        buffer: "", "read" or "counted" (forward writes it).
        is_shared: every block is the same module.
        sequence_first: blocks work on [seq, batch, hidden].
        pool: "", "mean" (of the sequence) or "last" (of its positions), before the head.
        temperature: a parameter without dims that scales the logits.
        softcap: logits go through tanh.
        smoothing: the loss smooths labels, adds up, and leaves out a class.
        frozen: part of the names of parameters without a gradient; "" for none.
        unused: a parameter that forward does not read.
        keyword: "", "given" (a tensor that scales the input) or "none" (None in its place).
        result: "loss", "logits", "both" or "dict".
    """

    batch: int = 4
    seq: int = 8
    hidden: int = 32
    blocks: int = 1
    vocab: int = 0
    positions: str = ""
    attention: str = ""
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    repeats_heads: bool = False
    is_fused: bool = False
    mlp: str = ""
    inner: int = 64
    norm: str = ""
    bias: bool = False
    residual: bool = False
    dropout: bool = False
    tied: bool = False
    buffer: str = ""
    is_shared: bool = False
    sequence_first: bool = False
    pool: str = ""
    temperature: bool = False
    softcap: bool = False
    smoothing: bool = False
    frozen: str = ""
    unused: bool = False
    keyword: str = ""
    result: str = "logits"
    dtype: torch.dtype = torch.bfloat16

    @property
    def classes(self) -> int:
        """Columns of the head."""
        return self.vocab or 48


@dataclass(frozen=True, repr=False)
class Trial(AsCode):
    """One plan of a captured model.

    Attributes:
        mesh: as the user writes it.
        scale_scope: "local" or "global".
        pins: (parameter, placement).
        budget: whether every rank holds its share of each parameter at most.
        seed: of random choices; None for the best ones.
        stay: how often a random choice is one that moves nothing.
        random_routes: whether a value goes from layout to layout by collectives at random instead of the cheapest.
    """

    mesh: str
    scale_scope: str = "local"
    pins: tuple[tuple[str, str], ...] = ()
    budget: bool = False
    seed: int | None = None
    stay: float = 0.0
    random_routes: bool = False


@dataclass(frozen=True, repr=False)
class Case(AsCode):
    """A model as it is captured once, and the plans of it.

    Attributes:
        emulate: mxfp8 on a device without a kernel for it.
        mixed: parameters in float32, compute in bfloat16, gradients reduced in float32.
        recompute: what backward makes again: "none", "selective" or "full".
    """

    model: Model
    recipe: str | None = None
    emulate: bool = False
    mixed: bool = False
    recompute: str = "none"
    trials: tuple[Trial, ...] = ()


# ---- strategies ---------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn, recipe: str | None, mixed: bool) -> Model:
    """A model that the recipe converts something of; in bfloat16 for mxfp8, which is cast from nothing wider."""
    sizes = st.sampled_from(MULTIPLES) if recipe else st.sampled_from((*MULTIPLES, *MULTIPLES, *ODD))
    batch, seq = draw(st.sampled_from((4, 2, 6, 8, 3))), draw(st.sampled_from((8, 16, 12, 4)))
    if recipe:  # tokens are what the gradient of a weight is summed over: blocks of 32 in MX, else 16
        seq = 32 if batch % 2 else 16
    attention = draw(st.sampled_from(("", "causal", "full", "causal", "mask", "bias", "by hand")))
    kv_heads = draw(st.sampled_from((2, 1, 4, 3)))
    vocab = draw(st.sampled_from((64, 0, 96, 50)))
    mlp = draw(st.sampled_from(("gelu", "silu", "relu", ""))) if attention and not recipe else "silu"
    tied = bool(vocab) and draw(st.booleans())
    dtypes = [torch.bfloat16] if recipe == "mxfp8" else [torch.bfloat16, torch.bfloat16, torch.float32]
    dtypes = [torch.float32] if mixed else dtypes
    seldom = st.sampled_from((False, False, False, True))
    return Model(
        batch=batch,
        seq=seq,
        hidden=draw(sizes),
        blocks=draw(st.sampled_from((1, 1, 2))),
        vocab=vocab,
        positions=draw(st.sampled_from(("", "learned", "rotary"))),
        attention=attention,
        heads=kv_heads * draw(st.sampled_from((1, 2, 4))),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((16, 32, 8))),
        repeats_heads=draw(st.booleans()),
        is_fused=draw(seldom),
        mlp=draw(st.sampled_from(("gelu", "silu", "relu"))) if recipe else mlp,
        inner=draw(sizes),
        norm=draw(st.sampled_from(("", "layer", "rms", "by hand"))),
        bias=draw(st.booleans()),
        residual=draw(st.booleans()),
        dropout=draw(seldom),
        tied=tied,
        buffer=draw(st.sampled_from(("", "", "read", "counted"))),
        is_shared=draw(seldom),
        sequence_first=draw(seldom),
        pool=draw(st.sampled_from(("", "", "", "mean", "last"))),
        temperature=draw(seldom),
        softcap=draw(seldom),
        smoothing=draw(seldom),
        frozen=draw(st.sampled_from(("", "", "norm", "up", "embed"))),
        unused=draw(seldom),
        keyword=draw(st.sampled_from(("", "", "given", "none"))),
        result=draw(st.sampled_from(("loss", "logits", "both", "dict"))),
        dtype=draw(st.sampled_from(dtypes)),
    )


@st.composite
def meshes(draw: st.DrawFn) -> str:
    """One to three axes of 1 to 4, at most 16 ranks; three are of two ranks each at most."""
    count = draw(st.sampled_from((2, 1, 2, 2, 3)))
    axis = st.sampled_from((2, 4, 3, 1)) if count < 3 else st.sampled_from((2, 2, 1))
    names = ("dp", "tp", "cp")[:count]
    return ",".join(f"{name}={draw(axis)}" for name in names)


@st.composite
def trials(draw: st.DrawFn, names: list[str]) -> Trial:
    """A plan of a model with these parameters; on three axes at random, where the best takes the solver long."""
    mesh = draw(meshes())
    num_axes = mesh.count("=")
    is_random = num_axes == 3 or draw(st.booleans())
    placement = st.lists(st.sampled_from(("R", "S(0)", "S(1)")), min_size=num_axes, max_size=num_axes)
    pin = st.tuples(st.sampled_from(names), placement.map(", ".join))
    return Trial(
        mesh=mesh,
        scale_scope=draw(st.sampled_from(("local", "local", "global"))),
        pins=tuple(draw(st.lists(pin, max_size=0 if is_random else 3, unique_by=lambda pin: pin[0]))),
        budget=not is_random and draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)) if is_random else None,
        stay=draw(st.sampled_from((0.0, 0.5, 0.9))) if is_random else 0.0,
        random_routes=is_random and draw(st.booleans()),
    )


RECIPES = (None, "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")


@st.composite
def cases(draw: st.DrawFn, recipes: tuple[str | None, ...] = RECIPES, num_trials: int = 3) -> Case:
    """A model and plans of it."""
    recipe = draw(st.sampled_from(recipes))
    mixed = draw(st.sampled_from((False, False, True)))
    model = draw(models(recipe, mixed))
    names = [name for name, _ in build(model).named_parameters()]
    drawn = draw(st.lists(trials(names), min_size=num_trials, max_size=num_trials))
    emulate = recipe == "mxfp8" and draw(st.booleans())
    recompute = draw(st.sampled_from(("none", "none", "selective", "full")))
    return Case(model, recipe, emulate, mixed, recompute, tuple(drawn))


# ---- modules ------------------------------------------------------------------------------------------------------


class RMSNormByHand(nn.Module):
    """As Llama writes it: in float32, and back."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * (wide * scale).to(x.dtype)


def _norm(model: Model) -> nn.Module:
    made = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "by hand": RMSNormByHand}
    return made[model.norm](model.hidden) if model.norm else nn.Identity()


class Attention(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, width = model, model.head_dim
        self.sizes = [model.heads * width, model.kv_heads * width, model.kv_heads * width]
        if model.is_fused:
            self.qkv = nn.Linear(model.hidden, sum(self.sizes), bias=model.bias)
        else:
            self.q, self.k, self.v = (nn.Linear(model.hidden, size, bias=model.bias) for size in self.sizes)
        self.o = nn.Linear(model.heads * width, model.hidden, bias=model.bias)
        if model.positions == "rotary":
            self.register_buffer("frequencies", 100.0 ** (-torch.arange(0, width, 2) / width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        model, (batch, seq, _) = self.model, x.shape
        parts = self.qkv(x).split(self.sizes, -1) if model.is_fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.reshape(batch, seq, -1, model.head_dim).transpose(1, 2) for part in parts)
        if model.positions == "rotary":
            q, k = self._turned(q), self._turned(k)
        by_hand = model.attention == "by hand"
        if (model.repeats_heads or by_hand) and model.heads != model.kv_heads:
            k, v = (part.repeat_interleave(model.heads // model.kv_heads, 1) for part in (k, v))
        out = self._by_hand(q, k, v) if by_hand else self._by_kernel(q, k, v)
        return self.o(out.transpose(1, 2).reshape(batch, seq, -1))

    def _by_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        model, mask = self.model, None
        if model.attention in ("mask", "bias"):
            places = torch.arange(q.shape[2], device=q.device)
            distance = places[:, None] - places[None, :]
            mask = (distance >= 0) & (distance < 5) if model.attention == "mask" else (distance * -0.1).to(q.dtype)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=model.attention == "causal", enable_gqa=k.shape[1] != q.shape[1]
        )

    def _by_hand(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * self.model.head_dim**-0.5
        places = torch.arange(q.shape[2], device=q.device)
        return torch.softmax(scores.masked_fill(places[None, :] > places[:, None], float("-inf")), -1) @ v

    def _turned(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2], device=x.device), self.frequencies)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        one, two = x.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


class MLP(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.kind = model.mlp
        self.up = nn.Linear(model.hidden, model.inner, bias=model.bias)
        self.down = nn.Linear(model.inner, model.hidden, bias=model.bias)
        if model.mlp == "silu":
            self.gate = nn.Linear(model.hidden, model.inner, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "silu":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x)) if self.kind == "gelu" else F.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        if model.attention:
            self.norm1, self.attention = _norm(model), Attention(model)
        if model.mlp:
            self.norm2, self.mlp = _norm(model), MLP(model)
        self.dropout = nn.Dropout(0.25 if model.dropout else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.model.attention:
            x = self._joined(x, self.attention(self.norm1(x)))
        if self.model.mlp:
            x = self._joined(x, self.mlp(self.norm2(x)))
        return x

    def _joined(self, x: Tensor, made: Tensor) -> Tensor:
        made = self.dropout(made) if self.model.dropout else made
        return x + made if self.model.residual else made


class RandomModel(nn.Module):
    """The module that a `Model` describes."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        if model.vocab:
            self.embed = nn.Embedding(model.vocab, model.hidden)
        if model.positions == "learned":
            self.embed_position = nn.Embedding(model.seq, model.hidden)
        self.blocks = nn.ModuleList(Block(model) for _ in range(1 if model.is_shared else model.blocks))
        self.head_norm = _norm(model)
        self.head = nn.Linear(model.hidden, model.classes, bias=False)
        if model.tied:
            self.head.weight = self.embed.weight
        if model.temperature:
            self.temperature = nn.Parameter(torch.tensor(1.0))
        if model.unused:
            self.unused = nn.Parameter(torch.zeros(model.hidden, 3))
        if model.buffer:
            self.register_buffer("average", torch.zeros(model.hidden))
        for name, parameter in self.named_parameters():
            if model.frozen and model.frozen in name:
                parameter.requires_grad_(False)

    def forward(self, x: Tensor, targets: Tensor | None = None, scale: Tensor | None = None) -> Any:
        model = self.model
        if model.vocab:
            x = self.embed(x)
        if scale is not None:
            x = x * scale.unsqueeze(-1)
        if model.positions == "learned":
            x = x + self.embed_position(torch.arange(x.shape[1], device=x.device))
        if model.buffer == "counted":
            self.average.mul_(0.5).add_(x.detach().mean((0, 1)))
        if model.buffer:
            x = x + self.average.to(x.dtype)
        logits = self._logits(x)
        if targets is None:
            return logits
        targets = targets[:, -1] if model.pool else targets
        how: dict[str, Any] = {"label_smoothing": 0.1, "reduction": "sum", "ignore_index": 1} if model.smoothing else {}
        loss = F.cross_entropy(logits.reshape(-1, model.classes).float(), targets.flatten(), **how)
        return {"loss": loss}[model.result] if model.result == "loss" else self._all(loss, logits)

    def _logits(self, x: Tensor) -> Tensor:
        model = self.model
        x = x.transpose(0, 1).contiguous() if model.sequence_first else x  # torchao's rowwise linears copy no view
        for k in range(model.blocks):
            x = self.blocks[0 if model.is_shared else k](x)
        x = x.transpose(0, 1) if model.sequence_first else x
        x = x.mean(1) if model.pool == "mean" else x[:, -1] if model.pool == "last" else x
        logits = self.head(self.head_norm(x))
        logits = logits * self.temperature if model.temperature else logits
        return 5 * torch.tanh(logits / 5) if model.softcap else logits

    def _all(self, loss: Tensor, logits: Tensor) -> Any:
        return (loss, logits) if self.model.result == "both" else {"logits": logits, "loss": loss}


def build(model: Model, device: str = "meta") -> RandomModel:
    """The module, its parameters on a device."""
    with torch.device(device):
        return RandomModel(model).to(model.dtype)


def arguments(model: Model, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs, on the meta device, floats of this dtype."""
    shape = (model.batch, model.seq)
    ids = torch.empty(shape, dtype=torch.int64, device="meta")
    x = ids if model.vocab else torch.empty(*shape, model.hidden, dtype=dtype, device="meta")
    args = (x,) if model.result == "logits" else (x, ids)
    keywords = {"given": {"scale": torch.empty(shape, dtype=dtype, device="meta")}, "none": {"scale": None}}
    return args, keywords.get(model.keyword, {})
