"""Plan one layer of a float8 Llama, look at a weight's alternatives, and score a plan written by hand.

python examples/plan_llama.py
"""

from autoparallel_fp8 import AutoParallel
from autoparallel_fp8.models.presets import build

model = build("llama3-8b", num_layers=1)
planner = AutoParallel(model, "dp=2,tp=4", recipe="tensorwise", device="H100", batch=8, seq=4096)
plan = planner.optimize()
print(plan)

print(plan.explain("model.layers.0.mlp.down_proj.weight"))

by_hand = planner.score(
    {
        "model.layers.*.self_attn.[qkv]_proj.weight": "R, S(0)",
        "model.layers.*.self_attn.o_proj.weight": "R, S(1)",
        "model.layers.*.mlp.gate_proj.weight": "R, S(0)",
        "model.layers.*.mlp.up_proj.weight": "R, S(0)",
        "model.layers.*.mlp.down_proj.weight": "R, S(1)",
    }
)
print(f"tensor parallel by hand: {by_hand.objective_us / plan.objective_us:.2f} x the time of the chosen plan")
