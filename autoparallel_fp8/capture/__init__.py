"""From a model to a `Graph`: `trace.py` is the way through, top to bottom; the other files are its steps.

meta_copy     the model's structure on the meta device
replace       attention and cross-entropy as ops of our own choosing, in dynamo's graph
shorten       a deep stack of equal blocks cut to six; `lengthen` puts the others back
decompose     what AOTAutograd turns into simpler ops
slots         what the joint graph's inputs and results are
from_fx       fx nodes as plain data
precision     float32 masters and the dtype gradients are reduced in
simplify      rules that make equal work look equal (`rewrite`, `sink_views`, `constant_operands`), and who owns a value
              (`phases`)
trace_errors  what to say where a model cannot be traced
one_op        the graph of one call of an op, without a model
recompute     backward with copies of forward's nodes: a step of its own, on the whole graph
"""

from .trace import capture

__all__ = ["capture"]
