"""Models that torchao converted to MXFP8 training: by wrapping weights, or with its `MXFP8Linear`.

`quantize_(model, MXFP8TrainingOpConfig(...))` leaves modules as they are and makes each weight a tensor of a class that
takes `F.linear` over; a copy without data has plain weights and would be planned in full precision. `MXFP8Linear` on
its kernels can be traced only where triton and a CUDA device are. In the copy both become our `MXLinear`, which
computes the same on any machine; what asks for emulation becomes torchao's emulated `MXFP8Linear`, traced as the plain
ops it is. Written for torchao 0.18, imported where it is used.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.modules import with_state_of, with_submodules
from autoparallel_fp8.quiet import quiet

_LINEAR, _MX, _FLOAT8 = "MXFP8Linear", "MXFP8TrainingWeightWrapperTensor", "Float8TrainingWeightWrapperTensor"


def with_mx_linears(copied: nn.Module, model: nn.Module) -> nn.Module:
    """The copy with a layer that can be traced wherever torchao converted the model's to MXFP8.

    Args:
        copied: a plain copy of the model, changed in place.
        model: only read.

    Raises:
        UsageError: a weight is wrapped whose products are not those of a linear in MXFP8.
    """
    made: dict[int, nn.Module] = {}
    named: dict[str, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        config = _config_of(name, module)
        if config is not None:
            if id(module) not in made:
                made[id(module)] = _traceable(copied.get_submodule(name), config)
            named[name] = made[id(module)]
    return with_submodules(copied, named)


def _config_of(name: str, module: nn.Module) -> Any:
    """What has torchao's settings for a module that is to be replaced; None for one that stays."""
    if type(module).__name__ == _LINEAR:
        return None if _is_emulated(module) else module
    wrapped = [p for p in module.parameters(recurse=False) if type(p).__name__ in (_MX, _FLOAT8) and p.ndim > 1]
    if not wrapped or isinstance(module, nn.Embedding):
        return None
    if type(module).forward is nn.Linear.forward and type(wrapped[0]).__name__ == _MX:
        return wrapped[0].config  # type: ignore[attr-defined]
    raise UsageError(
        f"the weight of a {type(module).__name__} is a {type(wrapped[0]).__name__}, which is not planned",
        at=name,
        do="leave this module out of torchao's conversion; nn.Linear is planned in MXFP8",
    )


def _is_emulated(config: Any) -> bool:
    return bool(config.kernel_preference.value == "emulated")


def _traceable(linear: Any, config: Any) -> nn.Module:
    from autoparallel_fp8.ops.mx_linear import MXLinear  # brings dynamo

    if not _is_emulated(config):
        mode = config.scale_calculation_mode.value
        return MXLinear.from_linear(linear, scaling_mode=mode, wgrad_with_hp=config.wgrad_with_hp)
    with quiet():
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear

    names = ("kernel_preference", "scale_calculation_mode", "wgrad_with_hp")
    settings = {name: getattr(config, name) for name in names}
    made: nn.Module = MXFP8Linear(linear.in_features, linear.out_features, bias=False, device="meta", **settings)
    return with_state_of(linear, made, **settings)
