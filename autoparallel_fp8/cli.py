"""The command line: `autoparallel-fp8 plan llama3-8b --recipe tensorwise --mesh dp=8,tp=8`.

Exit codes: 0 done, 1 no plan (the model or the constraints do not allow one) or no rule for an op, 2 wrong usage (an
op that does not exist too) or a wrong problem file; `diff` has 0 where the plans are the same, 1 where they differ, 2
for all errors. Errors are a paragraph on stderr, never a traceback. Progress goes to stderr where it is a terminal.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from . import solve_command
from .cli_options import MESH, add_model_arguments, add_rules_arguments
from .errors import AutoParallelError, PlanError, ProblemError, UsageError
from .progress_line import ProgressLine

if TYPE_CHECKING:
    from torch import nn

    from .api import AutoParallel
    from .explain import Overview
    from .plan import Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk is told here, not after the end
    except (UsageError, ProblemError) as error:
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
        return 0
    except OSError as error:
        _drop_output()
        where = error.filename or "standard output"
        print(
            f"error: cannot write: {error.strerror or error}\n  at: {where}\n  do: make room, or write elsewhere",
            file=sys.stderr,
        )
        return 1
    return code or 0


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
    add_model_arguments(plan)
    plan.add_argument("--json", metavar="FILE", help="write plan.json; - for standard output instead of the table")
    plan.add_argument(
        "--compare",
        action="store_true",
        help="show the plans people write by hand beside it: DDP, FSDP, HSDP, TP + SP, FSDP x TP",
    )
    plan.add_argument(
        "--regrets",
        action="store_true",
        help="write to plan.json what every other layout of every parameter would cost; takes some seconds",
    )
    plan.add_argument(
        "--parallelize",
        metavar="FILE",
        help="write the nearest form by hand, Python with FSDP2, parallel styles and torchao; - for standard output "
        "instead of the table",
    )
    plan.set_defaults(run=_plan)
    explain = commands.add_parser(
        "explain", help="every alternative of a parameter: its cost, or what forbids it; or the next best of each"
    )
    add_model_arguments(explain, "a plan file")
    explain.add_argument(
        "--parameter", metavar="NAME", help="as the plan has it; without it, a line for each parameter"
    )
    explain.set_defaults(run=_explain)
    verify = commands.add_parser("verify", help="plan, then run every rank in this process against the unsharded model")
    add_model_arguments(verify, "a plan file")
    verify.set_defaults(run=_verify)
    solve = commands.add_parser(
        "solve",
        help="solve a problem of the IOPDDL contest",
        description="Choose one option a node at the least cost within the usage limit, and prove how good that is.",
    )
    solve_command.add_arguments(solve)
    solve.set_defaults(run=solve_command.run)
    diff = commands.add_parser(
        "diff",
        help="what two plan files have different",
        description="Exit code 0: the same plan; 1: they differ; 2: a file is no plan.",
    )
    diff.add_argument("first", metavar="A", help="a plan file")
    diff.add_argument("second", metavar="B", help="another")
    diff.add_argument("--json", action="store_true", help="the answer as JSON")
    diff.set_defaults(run=_diff)
    devices = commands.add_parser("devices", help="list device profiles, or show one with its sources")
    devices.add_argument("name", nargs="?", help="one device, with the source of each number")
    devices.set_defaults(run=_devices)
    rules = commands.add_parser(
        "rules",
        help="list the ops that have a rule, or show one: what a mesh may do to it",
        description='Such as: rules _scaled_mm --shapes "16x64:e4m3, 64x576:e4m3:t, 16x1:f32, 1x576:f32" --mesh tp=4',
    )
    add_rules_arguments(rules)
    rules.set_defaults(run=_rules)
    return parser


def _planner(options: argparse.Namespace, progress: ProgressLine) -> AutoParallel:
    """The planner that the options describe; whatever is wrong with them fails here, before the work."""
    from .mesh import parse_mesh

    mesh, gpus = _mesh(options)
    parse_mesh(mesh if gpus is None else {"dp": gpus})
    if options.layers is not None and options.layers < 1:
        raise UsageError(f"--layers is {options.layers}", at="--layers", do="give a whole number of 1 or more")
    pins = [_pin(text) for text in options.pin]
    _tell_plugins()
    from .api import AutoParallel

    model = _build(options.model, options.layers, options.mixed_precision, progress)
    planner = AutoParallel(
        model,
        mesh,
        gpus=gpus,
        recipe=options.recipe,
        device=options.device,
        batch=options.batch,
        seq=options.seq,
        loss=None if options.no_loss else "auto",
        mixed_precision=_policy(options),
        recompute=options.recompute or "none",
        scale_scope=options.scale_scope or "local",
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


def _mesh(options: argparse.Namespace) -> tuple[str, int | None]:
    """--mesh or --gpus, which are checked before the model is built."""
    from .mesh_candidates import AUTO, check_gpus, check_whole

    mesh = options.mesh or (MESH if options.gpus is None else AUTO)
    gpus = check_gpus(mesh, options.gpus)
    for name, value, most in (("--max-axes", options.max_axes, 3), ("--workers", options.workers, None)):
        if value is not None:
            check_whole(name, value, most)
            if gpus is None:
                raise UsageError(f"{name} is of a search over meshes", at=name, do="give --gpus too, or leave it out")
    return mesh, gpus


def _optimized(options: argparse.Namespace, planner: AutoParallel) -> tuple[Plan, str]:
    """The plan, and the table of the meshes where they were searched."""
    if planner.gpus is None:
        return planner.optimize(), ""
    found = planner.search_meshes(workers=options.workers, max_axes=options.max_axes or 2)
    return found.plan, f"{found}\n"


def _build(name: str, layers: int | None, with_masters: bool, progress: ProgressLine) -> nn.Module:
    import torch

    from .models.presets import build
    from .quiet import quiet

    progress("model: building")
    if ":" in name and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())  # a factory beside the user, as `python -m` finds it
    with quiet():
        return build(name, num_layers=layers, dtype=torch.float32 if with_masters else torch.bfloat16)


def _asked(options: argparse.Namespace, progress: ProgressLine) -> tuple[nn.Module, Callable[[], Plan]]:
    """The model, and how to get its plan: planned, or restored where MODEL is a plan file."""
    from .plan_argument import how_built, plan_in, require_agreement

    plan = plan_in(options.model)
    if plan is None and options.model.endswith(".json") and not os.path.exists(options.model):
        do = "name a plan file, a config.json, a preset, or package.module:factory"
        raise UsageError(f"there is no file {options.model}", at="MODEL", do=do)
    if plan is None:
        planner = _planner(options, progress)
        return planner.model, lambda: _optimized(options, planner)[0]
    require_agreement(plan, options)
    _tell_changed(plan)
    name, layers = how_built(plan, options.model)
    _tell_plugins()
    model = _build(name, layers, plan.settings.get("mixed_precision") is not None, progress)

    def restored() -> Plan:
        from .restore import restore

        found = restore(plan, model, device=options.device, time_limit=options.time_limit, progress=progress)
        for note in found.notes:
            if note not in plan.notes:
                progress.note(note)
        return found

    return model, restored


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
    from .files import check_writable, write_text
    from .plan_argument import built_from, plan_in

    files = [file for file in (options.json, options.parallelize) if file]
    if files == ["-", "-"]:
        do = "give one of them a file"
        raise UsageError("two texts would go to standard output", at="--json and --parallelize", do=do)
    if options.compare and "-" in files:
        do = "write to a file, or leave --compare out"
        raise UsageError("two texts would go to standard output", at="--compare", do=do)
    if options.regrets and not options.json:
        do = "name the file with --json, or print them: explain MODEL"
        raise UsageError("--regrets writes to plan.json, and no file is named", at="--regrets", do=do)
    for file in files:
        if file != "-":
            check_writable(file)
    if plan_in(options.model) is not None:
        do = "run verify or explain with it, or plan its model: a preset, a config.json, or package.module:factory"
        raise UsageError(f"{options.model} is a plan, not a model", at="MODEL", do=do)
    progress = ProgressLine(sys.stderr, options.quiet, options.times)
    planner = _planner(options, progress)
    plan, meshes = _optimized(options, planner)
    comparison = None
    if options.compare:
        from .mesh import parse_mesh

        comparison = (planner.with_mesh(parse_mesh(plan.mesh)) if meshes else planner).compare(plan)
        plan = comparison.chosen
    plan = replace(plan, settings={**plan.settings, **built_from(options.model, options.layers)})
    if options.regrets:
        progress("regrets: every other layout of every parameter")
        plan = plan.with_regrets()
    progress.finish()
    texts = ((options.json, plan.to_json), (options.parallelize, plan.to_parallelize))
    for file, text in texts:
        if file and file != "-":
            write_text(file, text())
    shown = [text() for file, text in texts if file == "-"]
    if shown:
        sys.stdout.write(shown[0])
        return
    if meshes:
        print(meshes)
    print(plan)
    if comparison:
        print(f"\n{comparison}")


def _explain(options: argparse.Namespace) -> None:
    progress = ProgressLine(sys.stderr, options.quiet, options.times)
    stored = _stored_overview(options)
    if stored is not None:
        print(stored)
        return
    model, get_plan = _asked(options, progress)
    if options.parameter is None:
        overview = get_plan().explain()
        progress.finish()
        print(overview)
        return
    # As the table prints equal layers in one line, `layers.{0-31}.w`: the first of them.
    name = re.sub(r"\{(\d+)[\d,-]*\}", r"\1", options.parameter)
    names = [known for known, _ in model.named_parameters(remove_duplicate=False)]
    if name not in names:
        close = [*(known for known in names if name in known), *get_close_matches(name, names, n=3)]
        shown = ", ".join(dict.fromkeys(close[:3])) or ", ".join(names[:3]) + ", ..." * (len(names) > 3)
        raise UsageError(
            f"the model has no parameter {options.parameter!r}",
            at="--parameter",
            do=f"did you mean {shown}?" if close else f"names are {shown}",
        )
    explanation = get_plan().explain(name)
    progress.finish()
    print(explanation)


def _stored_overview(options: argparse.Namespace) -> Overview | None:
    """Of a plan file that was written with `--regrets`, where all parameters are asked about: needs no model."""
    from .plan_argument import plan_in, require_agreement

    plan = plan_in(options.model) if options.parameter is None else None
    if plan is None or not plan.alternatives:
        return None
    require_agreement(plan, options)
    _tell_changed(plan)
    return plan.explain()


def _verify(options: argparse.Namespace) -> None:
    progress = ProgressLine(sys.stderr, options.quiet, options.times)
    result = _asked(options, progress)[1]().verify()
    progress.finish()
    print(result)
    wrong = [one.name for one in result.compared if not one.is_ok]
    if wrong:
        count = f"{len(wrong)} of {len(result.compared)} tensors differ"
        raise PlanError(
            f"the plan does not give the unsharded model's numbers: {count}",
            at=", ".join(wrong[:3]),
            do="do not run it; report it with the command that made it",
        )


def _diff(options: argparse.Namespace) -> int:
    from .plan import Plan

    try:
        first, second = (Plan.load(path) for path in (options.first, options.second))
    except PlanError as error:
        raise UsageError(error.message, at=error.at, do=error.do) from error
    for plan in (first, second):
        _tell_changed(plan)
    found = first.diff(second)
    sys.stdout.write(found.to_json() if options.json else f"{found}\n")
    return int(bool(found))


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


def _tell_changed(plan: Plan) -> None:
    """Says of a plan file that somebody changed it."""
    from .plan_checks import CHANGED

    if CHANGED in plan.notes:
        print(f"note: {CHANGED}", file=sys.stderr)


def _tell_plugins() -> None:
    """Loads the rules of installed packages, and says what went wrong with them or what they replace."""
    from .rules.plugins import load_plugins

    for note in load_plugins():
        print(f"note: {note}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
