"""Losses of lazy logits beneath torch.compile, the least model that has one, and a look into graphs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from models.conftest import VOCAB, OwnFunction


class Graphs:
    """A backend that keeps the names of all operators, and the shapes of logits, in forward and backward graphs."""

    def __init__(self, hidden=16, classes=VOCAB):
        self.classes, self.weights = classes, [[classes, hidden], [hidden, classes], [classes]]
        self.logits, self.operators, self.count = [], set(), 0

    def __call__(self, graph, inputs):
        self.count += 1
        return aot_autograd(fw_compiler=self._look, bw_compiler=self._look)(graph, inputs)

    def _look(self, graph, _):
        for node in graph.graph.nodes:
            self.operators.add(str(node.target).removesuffix(".default"))
            values = node.meta.get("val")
            for value in values if isinstance(values, tuple | list) else [values]:
                # sizes that may change are no ints, and to compare them would make guards
                shape = [size for size in getattr(value, "shape", ()) if type(size) is int]
                if self.classes in shape and (len(shape) < len(value.shape) or shape not in self.weights):
                    self.logits.append((node.name, value.shape))
        return make_boxed_func(graph)


V = 300  # past the integers that Python has one object of


class Tiny(nn.Module):
    """The least that can be patched: tracing a Llama takes a hundred times as long. ``tail`` is its loss."""

    def __init__(self, tail):
        super().__init__()
        self.embedding, self.lm_head, self.tail = nn.Embedding(V, 8), nn.Linear(8, V), tail

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.embedding(input_ids).tanh())
        return self.tail(logits, labels), logits


def of_rows(z, y, **settings):
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), **settings)


def filled(z, y):
    z[..., 3] = -100.0
    return of_rows(z, y)


# Losses of logits z and labels y, and whether they need no logits.
LOSSES = {
    "shifted": (lambda z, y: of_rows(z[:, :-1].contiguous(), y[:, 1:]), True),
    "a module": (lambda z, y: nn.CrossEntropyLoss(reduction="sum")(z.view(-1, z.size(-1)), y.view(-1)), True),
    "another loss too": (lambda z, y: of_rows(z, y) + z.square().mean(), False),
    "filled": (filled, False),
    "a custom function": (lambda z, y: OwnFunction.apply(z).square().mean(), False),
}
