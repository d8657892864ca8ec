"""Plans how a PyTorch model is sharded over a mesh of GPUs, in bf16 and float8, and proves how good the plan is."""

from .api import AutoParallel
from .cost_models import DeviceProfile, Topology
from .errors import (
    ApplyError,
    AutoParallelError,
    CaptureError,
    CostError,
    InfeasibleError,
    PlanError,
    ProblemError,
    RuleError,
    SolveError,
    UsageError,
)
from .op_options import options
from .plan import Plan

__all__ = [
    "ApplyError",
    "AutoParallel",
    "AutoParallelError",
    "CaptureError",
    "CostError",
    "DeviceProfile",
    "InfeasibleError",
    "Plan",
    "PlanError",
    "ProblemError",
    "RuleError",
    "SolveError",
    "Topology",
    "UsageError",
    "options",
]
