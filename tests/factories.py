"""Models for `package.module:factory` on the command line."""

import torch
from torch import nn

BF16 = torch.bfloat16


def small() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False)).to(BF16)
    model.example_inputs = (torch.empty(32, 64, dtype=BF16, device="meta"),)
    return model


def no_inputs() -> nn.Module:
    return nn.Linear(8, 8)


def graph_break() -> nn.Module:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return y * 2 if y.sum().item() > 0 else y

    model = Branching()
    model.example_inputs = (torch.empty(4, 8),)
    return model


def odd_tokens() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).to(BF16)
    model.example_inputs = (torch.empty(3, 10, 64, dtype=BF16, device="meta"),)
    return model


def not_a_model() -> int:
    return 3


def raises() -> nn.Module:
    raise OSError("no weights\n  here")


def needs_arguments(width: int) -> nn.Module:
    return nn.Linear(width, width)


def exits() -> nn.Module:
    raise SystemExit(3)


def bad_examples() -> nn.Module:
    def example_inputs() -> tuple[torch.Tensor]:
        raise KeyError("data")

    model = nn.Linear(8, 8)
    model.example_inputs = example_inputs
    return model


def returns_nothing() -> nn.Module:
    class Silent(nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            x.sum()

    model = Silent()
    model.example_inputs = (torch.empty(4, 8),)
    return model


MODEL = nn.ReLU()
