"""The command line: `autoparallel-fp8 plan llama3-8b --recipe tensorwise --mesh dp=8,tp=8`.

Exit codes: 0 done, 1 no plan (the model or the constraints do not allow one) or no rule for an op, 2 wrong usage (an
op that does not exist too). Errors are a paragraph on stderr, never a traceback. Progress goes to stderr where it is a
terminal.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import AutoParallelError, PlanError, UsageError

if TYPE_CHECKING:
    from .api import AutoParallel


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk is told here, not after the end
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except AutoParallelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        _drop_output()
        where = error.filename or "standard output"
        print(
            f"error: cannot write: {error.strerror or error}\n  at: {where}\n  do: make room, or write elsewhere",
            file=sys.stderr,
        )
        return 1
    return 0


def _drop_output() -> None:
    """What is left in the buffer goes nowhere, so that the interpreter does not fail on it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """Argparse with errors in this program's form."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}\n  do: see `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="autoparallel-fp8", description="Plan how a PyTorch model is sharded, in bf16 and float8.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    plan = commands.add_parser("plan", help="make a plan and print it")
    _add_model_arguments(plan)
    plan.add_argument("--json", metavar="FILE", help="write plan.json; - for standard output instead of the table")
    plan.set_defaults(run=_plan)
    explain = commands.add_parser("explain", help="every alternative of a parameter: its cost, or what forbids it")
    _add_model_arguments(explain)
    explain.add_argument("--parameter", metavar="NAME", required=True, help="as the plan has it")
    explain.set_defaults(run=_explain)
    verify = commands.add_parser("verify", help="plan, then run every rank in this process against the unsharded model")
    _add_model_arguments(verify)
    verify.set_defaults(run=_verify)
    devices = commands.add_parser("devices", help="list device profiles, or show one with its sources")
    devices.add_argument("name", nargs="?", help="one device, with the source of each number")
    devices.set_defaults(run=_devices)
    rules = commands.add_parser(
        "rules",
        help="list the ops that have a rule, or show one: what a mesh may do to it",
        description='Such as: rules _scaled_mm --shapes "16x64:e4m3, 64x576:e4m3:t, 16x1:f32, 1x576:f32" --mesh tp=4',
    )
    _add_rules_arguments(rules)
    rules.set_defaults(run=_rules)
    return parser


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a preset, a config.json, or package.module:factory")
    parser.add_argument("--layers", type=int, metavar="N", help="build the model with N layers")
    parser.add_argument(
        "--recipe", help="tensorwise, rowwise, rowwise_with_gw_hp or mxfp8; without it the model stays as it is"
    )
    parser.add_argument("--mesh", default="dp=8", help="axes and sizes, outermost first (default: %(default)s)")
    parser.add_argument("--device", help="a device profile (see `devices`) or a .toml file")
    parser.add_argument("--batch", type=int, help="global batch (default: twice the first axis, of images 32 times)")
    parser.add_argument("--seq", type=int, help="sequence length (default: min(8192, the model's maximum))")
    parser.add_argument(
        "--memory-limit", metavar="SIZE", help='a device, such as "64 GiB" (default: the device\'s memory)'
    )
    parser.add_argument("--recompute", default="none", help="none (default); selective and full are not planned yet")
    parser.add_argument("--scale-scope", default="local", help="local (default) or global float8 scales")
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
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="for the solver")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument(
        "--times", action="store_true", help="print the time of each stage to stderr at the end, in a pipe too"
    )


def _add_rules_arguments(parser: argparse.ArgumentParser) -> None:
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


def _planner(options: argparse.Namespace) -> AutoParallel:
    """The planner that the options describe; whatever is wrong with them fails here, before the work."""
    from .mesh import parse_mesh

    parse_mesh(options.mesh)
    if options.layers is not None and options.layers < 1:
        raise UsageError(f"--layers is {options.layers}", at="--layers", do="give a whole number of 1 or more")
    pins = [_pin(text) for text in options.pin]
    _tell_plugins()
    from .api import AutoParallel
    from .models.presets import build
    from .quiet import quiet

    progress = _Progress(sys.stderr, options.quiet, options.times)
    progress("model: building")
    if ":" in options.model and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())  # a factory beside the user, as `python -m` finds it
    with quiet():
        model = build(options.model, num_layers=options.layers, dtype=_master_dtype(options))
    planner = AutoParallel(
        model,
        options.mesh,
        recipe=options.recipe,
        device=options.device,
        batch=options.batch,
        seq=options.seq,
        loss=None if options.no_loss else "auto",
        mixed_precision=_policy(options),
        recompute=options.recompute,
        scale_scope=options.scale_scope,
        emulate=options.emulate,
        memory_limit=options.memory_limit,
        strict=options.strict,
        time_limit=options.time_limit,
        progress=progress,
        name=options.model + (f" ({options.layers} layers)" if options.layers else ""),
    )
    for name, placement in pins:
        planner.pin(name, placement)
    return planner


def _master_dtype(options: argparse.Namespace) -> Any:
    import torch

    return torch.float32 if options.mixed_precision else torch.bfloat16


def _policy(options: argparse.Namespace) -> Any:
    if not options.mixed_precision:
        return None
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _pin(text: str) -> tuple[str, str]:
    name, equals, placement = text.partition("=")
    if not equals or not name.strip() or not placement.strip():
        raise UsageError(
            f"--pin {text!r} has no placement", at="--pin", do='write NAME=PLACEMENT, such as "lm_head.weight=R, S(0)"'
        )
    return name.strip(), placement.strip()


def _plan(options: argparse.Namespace) -> None:
    from .plan import check_writable

    if options.json and options.json != "-":
        check_writable(options.json)
    planner = _planner(options)
    plan = planner.optimize()
    planner.finish_progress()
    if options.json == "-":
        sys.stdout.write(plan.to_json())
        return
    print(plan)
    if options.json:
        plan.save(options.json)


def _explain(options: argparse.Namespace) -> None:
    planner = _planner(options)
    # As the table prints equal layers in one line, `layers.{0-31}.w`: the first of them.
    name = re.sub(r"\{(\d+)[\d,-]*\}", r"\1", options.parameter)
    names = [known for known, _ in planner.model.named_parameters(remove_duplicate=False)]
    if name not in names:
        close = [*(known for known in names if name in known), *get_close_matches(name, names, n=3)]
        shown = ", ".join(dict.fromkeys(close[:3])) or ", ".join(names[:3]) + ", ..." * (len(names) > 3)
        raise UsageError(
            f"the model has no parameter {options.parameter!r}",
            at="--parameter",
            do=f"did you mean {shown}?" if close else f"names are {shown}",
        )
    explanation = planner.optimize().explain(name)
    planner.finish_progress()
    print(explanation)


def _verify(options: argparse.Namespace) -> None:
    planner = _planner(options)
    result = planner.optimize().verify()
    planner.finish_progress()
    print(result)
    wrong = [one.name for one in result.compared if one.error > result.bound]
    if wrong:
        count = f"{len(wrong)} of {len(result.compared)} tensors differ"
        raise PlanError(
            f"the plan does not give the unsharded model's numbers: {count}",
            at=", ".join(wrong[:3]),
            do="do not run it; report it with the command that made it",
        )


def _devices(options: argparse.Namespace) -> None:
    from .cost_models import device_names, load_device
    from .report.text import format_table

    if options.name:
        profile = load_device(options.name)
        shown = [("number", "source"), *profile.sources.items()]
        print(
            f"{profile.name} ({profile.vendor}, {profile.architecture}); "
            f"recipes: {', '.join(profile.recipes) or 'none'}"
        )
        print(format_table(shown))
        return
    rows = [("device", "arch", "memory", "bandwidth", "bf16", "float8", "recipes")]
    for name in device_names():
        d = load_device(name)
        float8 = d.peak_flops.get("float8_e4m3fn") or d.peak_flops.get("float8_e4m3fnuz")
        rows.append(
            (d.name, d.architecture, f"{d.memory_bytes / 1e9:.0f} GB", f"{d.bandwidth_bytes_per_s / 1e12:.2f} TB/s",
             f"{d.peak_flops['bfloat16'] / 1e12:.0f} TFLOP/s", f"{float8 / 1e12:.0f} TFLOP/s" if float8 else "-",
             ", ".join(d.recipes) or "none")
        )  # fmt: skip
    print(format_table(rows))


def _rules(options: argparse.Namespace) -> None:
    import json

    from .report.rules import format_rule, format_rules, rule_dict, rule_summaries
    from .rules.op_names import overloads_with_rules

    is_call = bool(options.shapes or options.arg)
    if not is_call and (options.mesh or options.device):
        do = 'give the call too, such as --shapes "16x64, 64x32"; without one there is nothing to split'
        raise UsageError("--mesh and --device ask about a call of an op", at="--shapes", do=do)
    if is_call and options.op is None:
        raise UsageError("--shapes and --arg are of an op, and none is named", at="OP", do="name it, such as aten.mm")
    _tell_plugins()
    if options.op is None:
        print(json.dumps(rule_summaries(), indent=1) if options.json else format_rules())
        return
    if is_call:
        _op_options(options)
        return
    ops = overloads_with_rules(options.op)
    print(json.dumps([rule_dict(op) for op in ops], indent=1) if options.json else "\n\n".join(map(format_rule, ops)))


def _op_options(options: argparse.Namespace) -> None:
    """What the mesh may do to the call that was written down."""
    from .op_options import options as ask
    from .operand_text import parse_call

    op, args, kwargs = parse_call(options.op, options.shapes, options.arg)
    found = ask(op, *args, mesh=options.mesh or "dp=8", device=options.device or "H100", **kwargs)
    if options.json:
        sys.stdout.write(found.to_json())
        return
    print(found)


def _tell_plugins() -> None:
    """Loads the rules of installed packages, and says what went wrong with them or what they replace."""
    from .rules.plugins import load_plugins

    for note in load_plugins():
        print(f"note: {note}", file=sys.stderr)


class _Progress:
    """Lines on a terminal, each stage overwriting the last; nothing in a pipe. Keeps the stages' times."""

    def __init__(self, stream: Any, quiet: bool, times: bool = False) -> None:
        self.stream, self.with_times = stream, times
        self.shown = not quiet and stream.isatty()
        self.started = time.perf_counter()
        self.times: list[str] = []

    def __call__(self, text: str) -> None:
        if text.endswith(" s"):
            self.times.append(text)
        if self.shown:
            print(f"\r\x1b[2K{time.perf_counter() - self.started:6.1f} s  {text}", end="", file=self.stream, flush=True)

    def finish(self) -> None:
        total = f"{time.perf_counter() - self.started:6.1f} s  {', '.join(self.times)}"
        if self.shown:
            print(f"\r\x1b[2K{total}", file=self.stream, flush=True)
        elif self.with_times:
            print(total, file=self.stream, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
