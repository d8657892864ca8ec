"""Plans how a PyTorch model is sharded over a mesh of GPUs, in bf16 and float8, and proves how good the plan is."""

from .api import AutoParallel
from .cost_models import DeviceProfile, Topology
from .errors import (
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
