"""Multi-token prediction against plain PyTorch in float64: loops over positions, and all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import HeadOptions, linear_cross_entropy, losses
from promises import promise
from support import every_pair

B, T, D, V, K = 3, 11, 8, 29, 3
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [5] * 11, [0, 0, 1, 0, 0, 0, 2, 2, 2, 2, 0]])  # a name may return


class Case:
    """Random hidden states of K heads, weights and biases, and labels, some ignored."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()

        self.inputs = [normal(B, T, D) for _ in range(K)]
        self.weights = [normal(V, D) for _ in range(K)]
        self.biases = [normal(V) for _ in range(K)]
        self.labels = torch.randint(0, V, (B, T))
        self.labels[torch.rand(B, T) < 0.2] = -100


def label_ahead(labels: Tensor, documents: Tensor | None, b: int, t: int, offset: int) -> int:
    """Return the label that position t is scored against, found by walking there."""
    for s in range(t + 1, t + offset + 1):
        if s >= labels.shape[1] or (documents is not None and documents[b, s] != documents[b, t]):
            return -100
    return int(labels[b, t + offset])


def labels_ahead(labels: Tensor, documents: Tensor | None, offset: int) -> Tensor:
    return torch.tensor([[label_ahead(labels, documents, b, t, offset) for t in range(T)] for b in range(B)])


def check(got: losses.StepLosses, steps: Tensor, factors: list[float], leaves: list[Tensor]) -> None:
    want = sum(f * step for f, step in zip(factors, steps, strict=True))
    torch.testing.assert_close(got.steps, steps.detach())
    torch.testing.assert_close(got.loss, want)
    assert not got.steps.requires_grad
    torch.testing.assert_close(torch.autograd.grad(3 * got.loss, leaves), torch.autograd.grad(3 * want, leaves))


@promise("options")
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_future_labels_stay_in_their_document(documents: Tensor | None) -> None:
    labels = Case().labels
    for first in (0, 1, 2, 9, 30):
        got = losses.future_labels(labels, K, first=first, documents=documents)
        assert torch.equal(got, torch.stack([labels_ahead(labels, documents, first + k) for k in range(K)]))
        narrow = losses.future_labels(labels.clamp(min=0).to(torch.uint8), K, first=first, documents=documents)
        assert torch.equal(narrow, got.where((got == -100) & (narrow == -100), narrow))


@promise("values", "options")
@every_pair(
    shape=["list", "stacked", "own", "shorter"],
    where=[(None, 1), (DOCUMENTS, 1), (None, 2)],
    gradient=["auto", "forward", "recompute"],
    factors=[None, [0.8**k for k in range(K)]],
    more=[{}, {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0, "logit_scale": 0.7, "ignore_index": 3}],
)
def test_values_and_gradients(
    shape: str, where: tuple[Tensor | None, int], gradient: Any, factors: Any, more: dict[str, Any]
) -> None:
    """Heads of one weight or of their own, of as many tokens or of those that the tokens between leave."""
    case, (documents, first) = Case(), where
    options = HeadOptions(gradient=gradient, workspace_mib=0.001)
    own, ignored = shape == "own", more.get("ignore_index", -100)
    if shape == "shorter":
        case.inputs = [x.detach()[:, : T - k].requires_grad_() for k, x in enumerate(case.inputs)]
    targets = [labels_ahead(case.labels, documents, first + k) for k in range(K)]
    labels, targets = ([y.where(y != -100, ignored) for y in ys] for ys in ([case.labels], targets))
    steps = []
    for k, x in enumerate(case.inputs):
        z = (x @ case.weights[k * own].T + case.biases[k * own]) * more.get("logit_scale", 1.0)
        z = z if not more else 4 * (z / 4).tanh()
        y = targets[k][:, : x.shape[1]]
        ce = F.cross_entropy(
            z.flatten(0, 1), y.flatten(), ignore_index=ignored, label_smoothing=more.get("label_smoothing", 0.0)
        )
        steps.append(ce + more.get("z_loss", 0.0) * z.logsumexp(-1)[y != ignored].square().mean())
    got = losses.multi_token_loss(
        torch.stack(case.inputs) if shape == "stacked" else case.inputs, case.weights if own else case.weights[0],
        labels[0], linear_bias=case.biases if own else case.biases[0], weights=factors, documents=documents,
        first=first, options=options, **more,
    )  # fmt: skip
    count = K if own else 1
    leaves = [*case.inputs, *case.weights[:count], *case.biases[:count]]
    check(got, torch.stack(steps), factors or [1 / K] * K, leaves)


@promise("options")
@pytest.mark.parametrize("own", [False, True])
def test_denominators_of_a_step_of_two_micro_batches(own: bool) -> None:
    """Gradient accumulation: the halves' losses add up to the whole's."""
    case = Case()
    weight: Any = case.weights if own else case.weights[0]
    whole = losses.multi_token_loss(case.inputs, weight, case.labels)
    counts = (losses.future_labels(case.labels, K) != -100).flatten(1).sum(1)
    for num_items in (counts, counts.tolist(), list(counts.double())):
        first, second = (
            losses.multi_token_loss([x[rows] for x in case.inputs], weight, case.labels[rows], num_items=num_items)
            for rows in (slice(1), slice(1, None))
        )
        torch.testing.assert_close(first.loss + second.loss, whole.loss)
        torch.testing.assert_close(first.steps + second.steps, whole.steps)
    for one in (7, torch.tensor(7)):
        got = losses.multi_token_loss(case.inputs, weight, case.labels, num_items=one)
        torch.testing.assert_close(got.steps, whole.steps * counts / 7)


@promise("ignored", "layouts")
@pytest.mark.parametrize("own", [False, True])
def test_heads_without_labels_are_zero_and_connected(own: bool) -> None:
    """Where only the first head has any, where there are no sequences, or sequences too short for the others."""
    for rows, length in ((slice(None), T), (slice(0, 0), T), (slice(None), 2), (slice(None), 1), (slice(None), 0)):
        case = Case()
        case.labels[:, 2:] = -100
        case.labels[:, 1] = 4
        labels = case.labels[rows, :length]
        weight: Any = case.weights if own else case.weights[0]
        got = losses.multi_token_loss([x[rows, :length] for x in case.inputs], weight, labels)
        assert (got.steps[1:] == 0).all()
        assert (got.steps[0] > 0) == (labels.numel() > B)
        grads = torch.autograd.grad(got.loss, [*case.inputs, *case.weights[: K if own else 1]])
        assert all(torch.isfinite(g).all() for g in grads)
        assert all((g == 0).all() for g in grads[1:K])


@promise("dtypes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_error_is_that_of_one_call_a_head(dtype: torch.dtype) -> None:
    errors = torch.zeros(2, K + 1, dtype=torch.float64)
    for _ in range(8):
        case = Case(dtype)
        leaves = [*case.inputs, case.weights[0]]
        true = [t.detach().double().requires_grad_() for t in leaves]
        got = losses.multi_token_loss(case.inputs, case.weights[0], case.labels)
        want = losses.multi_token_loss(true[:K], true[K], case.labels)
        targets = losses.future_labels(case.labels, K)
        one = [linear_cross_entropy(x, case.weights[0], y) for x, y in zip(case.inputs, targets, strict=True)]
        assert got.loss.dtype == got.steps.dtype == torch.float32
        torch.testing.assert_close(got.steps, torch.stack(one).detach(), rtol=1e-5, atol=1e-5)
        exact = torch.autograd.grad(want.loss, true)
        for i, loss in enumerate((got.loss, sum(one) / K)):
            grads = torch.autograd.grad(loss, leaves)
            errors[i] += torch.stack([(g - x).norm() / x.norm() for g, x in zip(grads, exact, strict=True)])
    assert (errors[0] <= 1.5 * errors[1] + 8e-6).all(), errors


@promise("compile", "host", "subsets")
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # dynamo's
def test_it_compiles_as_one_graph_and_takes_a_frozen_head() -> None:
    """A graph has no place where the host would wait for a number."""
    case = Case(torch.float32)

    def total(inputs: list[Tensor], weight: Tensor) -> Tensor:
        found = losses.multi_token_loss(inputs, weight, case.labels, documents=DOCUMENTS, weights=[1.0, 0.8, 0.6])
        return found.loss + found.steps.sum()

    for weight in (case.weights[0], case.weights[0].detach()):
        leaves = [*case.inputs, *([weight] if weight.requires_grad else [])]
        true, got = (f(case.inputs, weight) for f in (total, torch.compile(total, fullgraph=True, backend="eager")))
        torch.testing.assert_close(got, true)
        torch.testing.assert_close(torch.autograd.grad(got, leaves), torch.autograd.grad(true, leaves))
