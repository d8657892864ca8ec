"""The options that commands share: of a model and how it is planned, and of one call of an op."""

from __future__ import annotations

import argparse

MESH = "dp=8"
"""Where neither --mesh nor --gpus is given."""


def add_model_arguments(parser: argparse.ArgumentParser, *others: str) -> None:
    """MODEL, and what is asked of its plan.

    Args:
        parser: of the command.
        others: what MODEL may be besides a preset, a config and a factory.
    """
    kinds = ", ".join(("a preset", "a config.json", *others))
    parser.add_argument("model", metavar="MODEL", help=f"{kinds}, or package.module:factory")
    parser.add_argument("--layers", type=int, metavar="N", help="build the model with N layers")
    parser.add_argument(
        "--recipe", help="tensorwise, rowwise, rowwise_with_gw_hp or mxfp8; without it the model stays as it is"
    )
    parser.add_argument("--mesh", help=f"axes and sizes, outermost first (default: {MESH})")
    parser.add_argument("--gpus", type=int, metavar="N", help="instead of --mesh: the best of all meshes of N GPUs")
    parser.add_argument("--max-axes", type=int, metavar="K", help="of those meshes, 1 to 3 (default: 2)")
    parser.add_argument(
        "--workers", type=int, metavar="W", help="processes that plan them (default: one a core, at most 4)"
    )
    parser.add_argument("--device", help="a device profile (see `devices`) or a .toml file")
    parser.add_argument(
        "--batch",
        type=int,
        help="global batch (default: twice the first axis, with --gpus one a GPU; of images 32 times the first axis)",
    )
    parser.add_argument("--seq", type=int, help="sequence length (default: min(8192, the model's maximum))")
    parser.add_argument(
        "--memory-limit", metavar="SIZE", help='a device, such as "64 GiB" (default: the device\'s memory)'
    )
    parser.add_argument(
        "--recompute", help="none (default), selective or full: what backward makes again, layer by layer"
    )
    parser.add_argument("--scale-scope", help="local (default) or global float8 scales")
    parser.add_argument(
        "--emulate", action="store_true", help="plan a recipe without a kernel on the device as emulated"
    )
    parser.add_argument(
        "--mixed-precision", action="store_true", help="fp32 masters, bf16 compute, fp32 gradient reduction"
    )
    parser.add_argument("--no-loss", action="store_true", help="leave cross-entropy out of the graph")
    parser.add_argument(
        "--pin", action="append", default=[], metavar="NAME=PLACEMENT", help='such as "layers.*.wq.weight=R, S(0)"'
    )
    parser.add_argument("--strict", action="store_true", help="an op without a rule is an error")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="for the solver, of all meshes together")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument(
        "--times", action="store_true", help="print the time of each stage to stderr at the end, in a pipe too"
    )


def add_rules_arguments(parser: argparse.ArgumentParser) -> None:
    """An op, and one call of it."""
    parser.add_argument("op", nargs="?", metavar="OP", help="an op's name, such as aten.mm.default, aten.mm or mm")
    parser.add_argument(
        "--shapes",
        default="",
        metavar="OPERANDS",
        help="tensors in order, SHAPE[:DTYPE][:ORDER]: 16x64, scalar; bf16 (default), f32, e4m3, i64, ...; t for the "
        "last two dims swapped in memory, or dims outermost first, such as 021; [a, b] is a list, none leaves one out",
    )
    parser.add_argument(
        "--arg", action="append", default=[], metavar="NAME=VALUE", help="an argument that is no tensor, such as dim=1"
    )
    parser.add_argument("--mesh", help="axes and sizes, outermost first (default: dp=8)")
    parser.add_argument("--device", help="a device profile (see `devices`) or a .toml file (default: H100)")
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
