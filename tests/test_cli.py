"""The command line: what it prints, its exit codes, and that wrong input is a paragraph with place and cure."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from autoparallel_fp8.rules import named_rules, rule_ops

from autoparallel_fp8 import options
from autoparallel_fp8.cli import main
from autoparallel_fp8.models.presets import preset_config

SMALL = ["factories:small", "--mesh", "dp=4", "--device", "H100"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command."""
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_plan_prints_a_table_and_writes_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, "plan", *SMALL, "--json", str(tmp_path / "plan.json"))
    assert (code, err) == (0, "")
    assert "proven optimal" in out and "0.weight" in out and "memory a device" in out
    assert re.search(r"^inputs lie as \(dp\): input ", out, re.MULTILINE)
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["status"] == "optimal" and data["mesh"] == {"dp": 4} and data["device"] == "h100"
    for key in (
        "version",
        "torch",
        "graph",
        "model",
        "recipe",
        "objective_us",
        "lower_bound_us",
        "gap",
        "step_time_us",
    ):
        assert key in data
    assert set(data["memory_bytes"]) == {"parameters", "gradients", "optimizer", "activations", "total", "limit"}
    assert set(data["step_time_us"]) == {"compute", "exposed_comm", "hidden_comm", "optimizer", "total"}
    assert set(data["parameters"]["0.weight"]) >= {"shape", "dtype", "placements", "split", "local_shape", "bytes"}


def test_json_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", *SMALL, "--json", "-")
    assert code == 0 and json.loads(out)["status"] == "optimal"


def test_explain_lists_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", *SMALL, "--parameter", "0.weight")
    assert code == 0
    assert "chosen" in out and "S(0)" in out and "S(1)" in out and "slower by" in out and "more compute" in out


def test_devices_and_rules(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "devices")
    assert code == 0 and "h100" in out and "3.35 TB/s" in out
    code, out, _ = run(capsys, "devices", "H200")
    assert code == 0 and "bandwidth_bytes_per_s" in out


def test_rules_lists_every_op_with_a_line_about_its_rule(capsys: pytest.CaptureFixture[str]) -> None:
    """The docstring's first line, or what the rule returns as it is written; as JSON too."""
    code, out, err = run(capsys, "rules")
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines()[2:])
    assert list(lines) == [*(str(op) for op in rule_ops()), *named_rules()]
    assert lines["aten.mm.default"].startswith("einsum(op, 'm k, k n -> m n'")
    assert lines["aten.embedding.default"] == "weight[v, d], indices[...] -> out[..., d]."
    code, out, _ = run(capsys, "rules", "--json")
    assert code == 0 and json.loads(out) == lines


def test_rules_of_one_op(capsys: pytest.CaptureFixture[str]) -> None:
    """Its schema, the rule as it is written, the kernel's demands; every overload where none is named."""
    code, out, _ = run(capsys, "rules", "_scaled_mm")
    assert code == 0 and "aten::_scaled_mm(Tensor self, Tensor mat2" in out and "    def scaled_mm(op: OpCall)" in out
    assert "the kernel wants, on every rank:\n  K and N are multiples of 16 on every rank." in out
    code, out, _ = run(capsys, "rules", "sum", "--json")
    assert code == 0 and [rule["op"] for rule in json.loads(out)] == ["aten.sum.default", "aten.sum.dim_IntList"]
    assert json.loads(out)[0]["text"].startswith("def sum_all(op: OpCall)")


ROWWISE = ["_scaled_mm", "--shapes", "16x64:e4m3, 64x576:e4m3:t, 16x1:f32, 1x576:f32", "--arg", "out_dtype=bf16"]


def test_rules_of_one_call(capsys: pytest.CaptureFixture[str]) -> None:
    """A rowwise GEMM in one line: the answer is that of `options`, as a table or as JSON."""
    a, b = torch.empty(16, 64, dtype=torch.float8_e4m3fn), torch.empty(576, 64, dtype=torch.float8_e4m3fn).t()
    scales = torch.empty(16, 1), torch.empty(1, 576)
    for mesh in ("tp=4", "tp=8"):
        found = options("_scaled_mm", a, b, *scales, out_dtype=torch.bfloat16, mesh=mesh, device="H200")
        asked = ["rules", *ROWWISE, "--mesh", mesh, "--device", "H200"]
        assert run(capsys, *asked) == (0, f"{found}\n", "")
        assert run(capsys, *asked, "--json") == (0, found.to_json(), "")
    assert "mat2 local [64, 72]: 72 is not a multiple of 16" in str(found)


CALLS = {
    "lists": (["cat", "--shapes", "[4x8, 6x8:bf16]", "--arg", "dim=0"], "tensors[1] [6, 8] bfloat16 -> result [10, 8]"),
    "left out": (["aten.index", "--shapes", "4x8:f32, [none, 3:i64]"], "indices[1] [3] int64 -> result [4, 3]"),
    "an argument between tensors": (["gather", "--shapes", "4x8,4x2:i64", "--arg", "dim=-1"], "masked_lookup"),
    "overload by its arguments": (["sum", "--shapes", "4x8", "--arg", "dim=1"], "aten.sum.dim_IntList: self [4, 8]"),
    "other overload": (["sum", "--shapes", "4x8"], "aten.sum.default: self [4, 8]"),
    "a number for a tensor": (["add", "--shapes", "4x8", "--arg", "other=2"], "aten.add.Tensor: self [4, 8] bfloat16"),
    "no tensor": (["aten.arange", "--arg", "end=16"], "aten.arange.default: no tensor -> result [16] int64"),
    "dtype": (["_to_copy", "--shapes", "4x8:f32", "--arg", "dtype=float8_e4m3fn"], "result [4, 8] float8_e4m3fn"),
    "memory order": (["relu", "--shapes", "4x6x8:f32:201"], "self [4, 6, 8] strides [6, 1, 24] float32"),
    "last two swapped": (["relu", "--shapes", "4x6x8:t"], "self [4, 6, 8] strides [48, 1, 6] bfloat16"),
    "scalar": (["mul", "--shapes", "4x8,scalar:f32"], "other [] float32 -> result [4, 8] bfloat16"),
    "truths and lists": (
        ["amax", "--shapes", "4x8", "--arg", "dim=[0,1]", "--arg", "keepdim=true"], "result [1, 1] bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_how_calls_are_written(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Operands in order of the tensor arguments, the others by name."""
    arguments, words = CALLS[name]
    code, out, err = run(capsys, "rules", *arguments)
    assert (code, err) == (0, "") and words in out and "mesh dp=8, device h100" in out


def test_a_long_answer_is_cut_short_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Four axes of mm, and a list of 500 tensors; JSON stays whole."""
    asked = ["rules", "mm", "--shapes", "64x64,64x64", "--mesh", "a=2,b=2,c=2,d=2"]
    _, out, _ = run(capsys, *asked)
    _, data, _ = run(capsys, *asked, "--json")
    count = len(json.loads(data)["options"])
    assert f"... and {count - 200} more options of {count}: as JSON" in out and len(out.splitlines()) < 250 < count
    _, out, _ = run(capsys, "rules", "cat", "--shapes", f"[{','.join(['4x8'] * 500)}]", "--mesh", "tp=2")
    assert "tensors[4] [4, 8] bfloat16, ... 494 more ..., tensors[499] [4, 8] bfloat16 -> result [2000, 8]" in out
    assert (
        re.search(r"tensors\[4\] +\.\.\. 494 more \.\.\. +tensors\[499\]", out)
        and max(map(len, out.splitlines())) < 400
    )


WRONG = {
    "no such file": (
        ["verify", "nothere.json"],
        2,
        "there is no file nothere.json\n  at: MODEL\n  do: name",
    ),
    "unknown preset": (["plan", "llama3-9b"], 2, "no preset is called 'llama3-9b'"),
    "unknown device": (["plan", "factories:small", "--device", "H1000"], 2, 'no device profile is named "H1000"'),
    "unknown recipe": (["plan", "factories:small", "--device", "H100", "--recipe", "int4"], 2, "recipe is 'int4'"),
    "mxfp8 on H100": (["plan", *SMALL, "--recipe", "mxfp8"], 2, "plan for a device that has: b200"),
    "mxfp8 of odd tokens": (
        ["plan", "factories:odd_tokens", "--device", "B200", "--recipe", "mxfp8"],
        2,
        "the smallest from here is 3 x 32 (96 tokens)",
    ),
    "float8 on A100": (["plan", "factories:small", "--device", "A100", "--recipe", "rowwise"], 2, "h100"),
    "mesh text": (["plan", "factories:small", "--device", "H100", "--mesh", "8x8"], 2, "mesh"),
    "axis of size 0": (["plan", "factories:small", "--device", "H100", "--mesh", "dp=0"], 2, "dp"),
    "no inputs": (["plan", "factories:no_inputs", "--device", "H100"], 2, "no inputs for a Linear"),
    "batch of no inputs": (
        ["plan", "factories:no_inputs", "--batch", "4", "--device", "H100"],
        2,
        "set model.example_inputs = (x, ...) with the global shapes, as a factory may",
    ),
    "graph break": (["plan", "factories:graph_break", "--device", "H100"], 1, "cannot be traced"),
    "not a model": (["plan", "factories:not_a_model", "--device", "H100"], 2, "returned a int"),
    "no such factory": (["plan", "factories:absent"], 2, "has no function 'absent'"),
    "no such config": (["plan", "nowhere/config.json"], 2, "nowhere/config.json"),
    "odd tokens": (
        ["plan", "factories:odd_tokens", "--device", "H100", "--recipe", "tensorwise"],
        2,
        "the smallest from here is 3 x 16 (48 tokens)",
    ),
    "memory": (["plan", *SMALL, "--memory-limit", "1 KiB"], 1, "the smallest needs"),
    "memory text": (["plan", *SMALL, "--memory-limit", "much"], 2, "memory limit 'much'"),
    "pin": (["plan", *SMALL, "--pin", "0.weight=S(5)"], 2, "names dim 5 of a tensor with 2 dims"),
    "pin of no option": (["plan", *SMALL, "--pin", "0.weight=P(sum)"], 2, "choose one of: R; S(0); S(1)"),
    "pin of nothing": (["plan", *SMALL, "--pin", "absent=R"], 2, "no parameter is called 'absent'"),
    "pin without placement": (["plan", *SMALL, "--pin", "0.weight"], 2, "has no placement"),
    "recipe on Conv1D": (["plan", "gpt2", "--layers", "1", "--device", "H100", "--recipe", "tensorwise"], 2, "Conv1D"),
    "layers": (["plan", "gpt2", "--layers", "0"], 2, "--layers is 0"),
    "too long": (["plan", "gpt2", "--layers", "1", "--seq", "9999", "--device", "H100"], 2, "at most 1024"),
    "time limit": (["plan", *SMALL, "--time-limit", "-1"], 2, "time_limit is -1"),
    "recompute": (["plan", *SMALL, "--recompute", "some"], 2, "use one of none, selective, full"),
    "unknown parameter": (["explain", *SMALL, "--parameter", "weight"], 2, "did you mean 0.weight"),
    "no such parameter": (["explain", *SMALL, "--parameter", "qqq"], 2, "names are 0.weight, 2.weight"),
    "factory raises": (["plan", "factories:raises"], 2, "the factory raises OSError: no weights here"),
    "factory needs arguments": (["plan", "factories:needs_arguments"], 2, "missing a required argument: 'width'"),
    "factory exits": (["plan", "factories:exits"], 2, "the factory raises SystemExit: 3"),
    "model instead of a factory": (["plan", "factories:MODEL"], 2, "this is a ReLU, not a function"),
    "syntax error": (["plan", "wrong_syntax:model"], 2, "importing 'wrong_syntax' raises SyntaxError: "),
    "import raises": (["plan", "wrong_import:model"], 2, "importing 'wrong_import' raises RuntimeError: not today"),
    "no module": (["plan", ":model"], 2, "':model' names no function of a module"),
    "relative module": (["plan", "..:model"], 2, "'..:model' names no function of a module"),
    "no function": (["plan", "factories:"], 2, "'factories:' names no function of a module"),
    "example_inputs raises": (["plan", "factories:bad_examples"], 2, "example_inputs() raises KeyError: 'data'"),
    "batch beside example_inputs": (["plan", *SMALL, "--batch", "8"], 2, "the model has example_inputs"),
    "mesh of too many devices": (["plan", *SMALL, "--mesh", "dp=4096,tp=4096"], 2, "more than 1048576 devices"),
    "axis with many digits": (["plan", *SMALL, "--mesh", "dp=" + "9" * 5000], 2, "more than 1048576 devices"),
    "forward returns nothing": (["plan", "factories:returns_nothing", "--device", "H100"], 1, "returns no tensor"),
    "no command": ([], 2, "COMMAND"),
    "no such op": (["rules", "_scaled_m"], 2, "did you mean aten._scaled_mm"),
    "no rule": (["rules", "aten.nonzero"], 1, "no rule for aten.nonzero"),
    "no rule for a call": (["rules", "aten.nonzero", "--shapes", "4x4"], 1, "no rule for aten.nonzero.default"),
    "call of no op": (["rules", "--shapes", "4x4"], 2, "none is named"),
    "mesh of no call": (["rules", "mm", "--mesh", "tp=2"], 2, "give the call too"),
    "mesh of a call": (["rules", "mm", "--shapes", "4x8,8x4", "--mesh", "2x2"], 2, "is not name=size"),
    "device of a call": (["rules", "mm", "--shapes", "4x8,8x4", "--device", "H1000"], 2, "H1000"),
    "shape": (["rules", "mm", "--shapes", "4x,8x4"], 2, "'4x' in operand '4x' is no shape"),
    "dtype of an operand": (["rules", "mm", "--shapes", "4x8:e9,8x4"], 2, "'e9' in operand '4x8:e9' is neither"),
    "brackets": (["rules", "cat", "--shapes", "[4x8,4x8"], 2, "brackets do not match"),
    "shapes that do not fit": (["rules", "mm", "--shapes", "4x8,9x4"], 2, "must have same reduction dim"),
    "too few operands": (["rules", "mm", "--shapes", "4x8"], 2, "aten.mm does not take 1 operands"),
    "unknown argument": (["rules", "mm", "--shapes", "4x8,8x4", "--arg", "foo=1"], 2, "2 operands and --arg foo"),
    "argument without a value": (["rules", "relu", "--shapes", "4", "--arg", "dim"], 2, "--arg 'dim' has no value"),
    "value": (["rules", "sum", "--shapes", "4x8", "--arg", "dim=x"], 2, "'x' is no value of type"),
    "an op that capture rewrites": (["rules", "linear"], 1, "capture writes it in simpler ops"),
    "a call that capture rewrites": (["rules", "linear", "--shapes", "4x8,6x8"], 1, "such as aten.mm.default"),
    "a size of 20 digits": (["rules", "mm", "--shapes", "9" * 20 + "x4,4x4"], 2, "has more than 2**56 elements"),
    "a size of 5000 digits": (["rules", "mm", "--shapes", "9" * 5000 + "x4,4x4"], 2, "has more than 2**56 elements"),
    "an operand too large": (["rules", "mm", "--shapes", "9999999999x9999999999,9999999999x4"], 2, "than 2**56"),
    "a result too large": (
        ["rules", "mm", "--shapes", "9999999999x4,4x9999999999"],
        2,
        "does not take these arguments",
    ),
    "an argument of many digits": (["rules", "sum", "--shapes", "4x8", "--arg", "dim=" + "9" * 20], 2, "aten.sum"),
    "an argument twice": (["rules", "sum", "--shapes", "4x8", "--arg", "dim=1", "--arg", "dim=0"], 2, "dim is given 2"),
    "dtype argument": (["rules", "_to_copy", "--shapes", "4", "--arg", "dtype=e9"], 2, "'e9' is no dtype"),
}


@pytest.fixture
def wrong_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that cannot be imported, where Python finds them."""
    (tmp_path / "wrong_syntax.py").write_text("def model(:\n")
    (tmp_path / "wrong_import.py").write_text('raise RuntimeError("not today")\n')
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("wrong_modules")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_a_paragraph_with_a_cure(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code, what is wrong, what to do; nothing on standard output, no traceback."""
    arguments, expected, words = WRONG[name]
    code, out, err = run(capsys, *arguments)
    assert code == expected, err
    assert words in err
    assert err.startswith("error: ") and "do: " in err and "Traceback" not in err and out == ""
    assert len(err.splitlines()) <= 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "abc"}, "Field 'hidden_size' expected int, got str (value: 'abc')"),
        ({"hidden_size": 100, "num_attention_heads": 7}, "hidden size (100) is not a multiple"),
        ({"hidden_size": -256}, "config has hidden_size -256"),
        ({"num_hidden_layers": 0}, "config has num_hidden_layers 0"),
        ({"hidden_act": "nope"}, "KeyError: 'nope'"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is neither a language model nor an image classifier"),
    ],
)
def test_a_wrong_config_is_a_paragraph(
    changes: dict[str, object], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Wrong types and impossible sizes: the reason of transformers in one line, and the file."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**preset_config("llama3-debug"), **changes}))
    code, out, err = run(capsys, "plan", str(path))
    assert code == 2 and words in err and str(path) in err and out == "" and len(err.splitlines()) == 3


def test_a_wrong_factory_is_told_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the user's own code raised."""
    _, _, err = run(capsys, "plan", "factories:raises")
    assert "at: model 'factories:raises', " in err and "factories.py:" in err


def test_explain_takes_the_folded_name_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """`{0-31}` is the first of the layers."""
    code, out, _ = run(capsys, "explain", *SMALL, "--parameter", "{0,2-4}.weight")
    assert code == 0 and out.startswith("0.weight ")


@pytest.mark.parametrize("command", [["devices"], ["rules"]])
def test_output_that_cannot_be_written_is_a_paragraph(command: list[str], tmp_path: Path) -> None:
    """As on a full disk: code 1 and no traceback, also for what is written at the very end."""
    path = tmp_path / "output"
    path.touch()
    with path.open() as read_only:
        run_it = [sys.executable, "-m", "autoparallel_fp8.cli", *command]
        done = subprocess.run(run_it, stdout=read_only, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "error: cannot write: Bad file descriptor\n  at: standard output\n  do: make room, or write elsewhere\n"
    )


@pytest.mark.parametrize("path", ["absent/plan.json", "."])
def test_an_unwritable_output_fails_before_the_work(
    path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, "plan", "llama3-70b", "--mesh", "dp=8,tp=8", "--json", str(tmp_path / path))
    assert code == 2 and "cannot write" in err and out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_batch_smaller_than_an_axis_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys,
        "plan",
        "llama3-debug",
        "--layers",
        "1",
        "--mesh",
        "dp=8",
        "--batch",
        "2",
        "--seq",
        "256",
        "--device",
        "H100",
    )
    assert code == 0 and "proven optimal" in out


FACTORY = """import torch
def make():
    model = torch.nn.Linear(64, 64, bias=False)
    model.example_inputs = (torch.empty(8, 64),)
    return model
"""


@pytest.mark.parametrize("start", [["-m", "autoparallel_fp8"], ["-c", "from autoparallel_fp8.cli import main; main()"]])
def test_a_factory_in_the_folder_where_one_stands(start: list[str], tmp_path: Path) -> None:
    """As a module, and as the console script, which Python starts without that folder on its path."""
    (tmp_path / "my_model.py").write_text(FACTORY)
    script = ["-P"] * (start[0] == "-c" and sys.version_info >= (3, 11))
    asked = ["plan", "my_model:make", "--mesh", "dp=2", "--device", "H100"]
    done = subprocess.run([sys.executable, *script, *start, *asked], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "proven optimal" in done.stdout


def test_help_says_what_batch_is_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "--help")
    assert code == 0 and "of images 32 times" in " ".join(out.split())


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_a_published_config_is_planned_as_it_is(kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """These leave dropout at its default: that of attention weights is planned as 0, and the plan says so."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "decoder_start_token_id": 0}))
    size = ["--layers", "1", "--mesh", "dp=2", "--seq", "64", "--device", "H100"]
    code, out, err = run(capsys, "plan", str(tmp_path), *size)
    assert (code, err) == (0, "") and "note: attention dropout 0.1 of the config is planned as 0\n" in out
