"""Which inputs are indices of which tables."""

import torch
from torch import Tensor, nn

from autoparallel_fp8.capture import capture
from autoparallel_fp8.indices import look_ups


class Tables(nn.Module):
    """Tokens and positions are looked up, and labels among fewer classes than there are tokens, one left out."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(64, 16), nn.Embedding(8, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(8, device=tokens.device))
        kept = labels.ne(-100)
        found = self.head(x).log_softmax(-1).gather(-1, torch.where(kept, labels, 0).unsqueeze(-1)).squeeze(-1)
        return torch.where(kept, found, 0.0).sum()


def test_inputs_as_they_are_and_indices_that_ops_count() -> None:
    """Labels are in range of the classes where a class is left out; positions are nobody's input."""
    ids = torch.zeros(4, 8, dtype=torch.int64)
    graph = capture(Tables(), (ids, ids))
    names = {i: node.target for i, node in enumerate(graph.nodes)}
    found = {
        (graph.spec(one.table).shape[one.dim], None if one.inputs is None else tuple(names[i] for i in one.inputs))
        for one in look_ups(graph)
    }
    assert found == {(64, ("tokens",)), (8, None), (10, ("labels",))}
