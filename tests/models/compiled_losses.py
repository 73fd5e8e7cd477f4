"""Losses that code under torch.compile takes of lazy logits, the least model that has one, and a look into graphs."""

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from models.conftest import VOCAB, OwnFunction


class Graphs:
    """A backend that keeps the shapes of all tensors of forward and backward graphs, and those of logits."""

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


def modified_view(z, y):
    view = z[:, :-1]
    z *= 2
    return of_rows(view, y[:, 1:])


def filled(z, y):
    z[..., 3] = -100.0
    return of_rows(z, y)


def added_to(z, y):
    view = z[:, :-1]
    z += torch.arange(V) / V
    return of_rows(view, y[:, 1:])


def looked_at(z, y):
    found = torch.is_tensor(z), hasattr(z, "view"), hasattr(z, "mask"), getattr(z, "mask", None)
    return of_rows(z, y) if found == (True, True, False, None) else z.mean()


WITHOUT_LOGITS = {
    "rows": of_rows,
    "shifted": lambda z, y: of_rows(z[:, :-1].contiguous(), y[:, 1:]),
    "ellipsis": lambda z, y: of_rows(z.float()[..., :-1, :], y[:, 1:]),
    "one row": lambda z, y: F.cross_entropy(z[:, -1], y[:, -1]),
    "classes second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "permuted": lambda z, y: F.cross_entropy(z.permute(0, 2, 1), y, label_smoothing=0.1),
    "a module": lambda z, y: nn.CrossEntropyLoss(reduction="sum")(z.view(-1, z.size(-1)), y.view(-1)),
    "per token": lambda z, y: F.cross_entropy(
        z.view(z.shape[0] * z.shape[1], z.shape[-1]), y.view(-1), reduction="none"
    ),
    "softcap": lambda z, y: of_rows(3 * torch.tanh(z / 3), y),
    "negative": lambda z, y: of_rows(-0.5 * z.to(torch.float64), y),
    "class weights": lambda z, y: of_rows(z, y, weight=torch.arange(V).float()),
    "log-softmax": lambda z, y: F.nll_loss(F.log_softmax(z, -1).flatten(0, 1), y.flatten()),
    "asked for its type": lambda z, y: of_rows(z, y) if isinstance(z, torch.Tensor) and z.ndim == 3 else None,
    "looked at": looked_at,
    "by name": lambda z, y: F.cross_entropy(target=y.flatten(), input=z.flatten(end_dim=1)),
    "twice": lambda z, y: of_rows(z, y) + of_rows(z[:, :-1], y[:, 1:]),
}
WITH_LOGITS = {
    "another loss too": lambda z, y: of_rows(z, y) + z.square().mean(),
    "by itself": lambda z, y: (z * z).mean(),
    "from the left": lambda z, y: (torch.ones(V) * z + z).mean(),
    "subtracted": lambda z, y: of_rows(1 - z, y),
    "in a list": lambda z, y: torch.cat([z, z], 0).mean(),
    "an argument": lambda z, y: torch.where(y[..., None] > 50, z, 0.0).mean(),
    "rows in a loop": lambda z, y: sum(row.logsumexp(-1).mean() for row in z),
    "in place before": modified_view,
    "filled": filled,
    "added to": added_to,
    "a product": lambda z, y: (z.flatten(0, 1) @ torch.arange(V * 14.0).cos().view(V, 14)).square().mean(),
    "a custom function": lambda z, y: OwnFunction.apply(z).square().mean(),
    "in float8": lambda z, y: of_rows(z.to(torch.float8_e4m3fn).float(), y),
    "as bits": lambda z, y: of_rows(z, y) + (z.view(torch.int32) & 1).sum(),
    "compared": lambda z, y: of_rows(z, y) + (z > 0).float().mean(),
    "no gradients": lambda z, y: of_rows(z, y) + torch.no_grad()(lambda: z.float().softmax(-1).max())(),
}
