"""Multi-token prediction against plain PyTorch: loops over positions, and all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lowtide import HeadOptions, losses
from lowtide.errors import LowtideError

B, T, D, V, K = 3, 11, 8, 29, 3
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [5] * 11, [0, 0, 1, 0, 0, 0, 2, 2, 2, 2, 0]])  # a name may return


class Case:
    """Random hidden states of K heads, weights and biases, and labels, some ignored."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

        self.inputs = [normal(B, T, D).requires_grad_() for _ in range(K)]
        self.weights = [normal(V, D).requires_grad_() for _ in range(K)]
        self.biases = [normal(V).requires_grad_() for _ in range(K)]
        self.labels = torch.randint(0, V, (B, T), generator=g)
        self.labels[torch.rand(B, T, generator=g) < 0.2] = -100


def label_ahead(labels: Tensor, documents: Tensor | None, b: int, t: int, offset: int, ignored: int = -100) -> int:
    """Return the label that position t is scored against, found by walking there."""
    for s in range(t + 1, t + offset + 1):
        if s >= labels.shape[1] or (documents is not None and documents[b, s] != documents[b, t]):
            return ignored
    return int(labels[b, t + offset])


def cross_entropies(
    case: Case, weights: list[Tensor], documents: Tensor | None = None, first: int = 1, **o: Any
) -> Any:
    """Return each head's sum and its number of labels, from all logits."""
    sums, counts = [], []
    for k, (x, w) in enumerate(zip(case.inputs, weights, strict=True)):
        y = torch.tensor([[label_ahead(case.labels, documents, b, t, first + k) for t in range(T)] for b in range(B)])
        y = y[:, : x.shape[1]]
        sums.append(F.cross_entropy((x @ w.T).flatten(0, 1), y.flatten(), reduction="sum", **o))
        counts.append(int((y != -100).sum()))
    return torch.stack(sums), counts


def check(got: losses.StepLosses, steps: Tensor, factors: list[float], leaves: list[Tensor]) -> None:
    want = sum(f * step for f, step in zip(factors, steps, strict=True))
    torch.testing.assert_close(got.steps, steps.detach())
    torch.testing.assert_close(got.loss, want)
    assert not got.steps.requires_grad
    found = torch.autograd.grad(3 * got.loss, leaves, retain_graph=True)
    for g, true in zip(found, torch.autograd.grad(3 * want, leaves, retain_graph=True), strict=True):
        torch.testing.assert_close(g, true)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("first", [0, 1, 2, 9, 30])
def test_future_labels_stay_in_their_document(documents: Tensor | None, first: int) -> None:
    labels = Case().labels
    got = losses.future_labels(labels, K, first=first, documents=documents)
    want = [[[label_ahead(labels, documents, b, t, first + k) for t in range(T)] for b in range(B)] for k in range(K)]
    assert torch.equal(got, torch.tensor(want))
    narrow = losses.future_labels(labels.clamp(min=0).to(torch.uint8), K, first=first, documents=documents)
    assert torch.equal(narrow, got.where((got == -100) & (narrow == -100), narrow))
    assert (narrow == -100).sum() <= (got == -100).sum()


@pytest.mark.parametrize("gradient", ["auto", "forward", "recompute"])
@pytest.mark.parametrize("shape", ["list", "stacked", "own", "shorter"])
@pytest.mark.parametrize(("documents", "first"), [(None, 1), (DOCUMENTS, 1), (None, 2)])
def test_multi_token(shape: str, documents: Tensor | None, first: int, gradient: Any) -> None:
    case, options = Case(), HeadOptions(gradient=gradient, workspace_mib=0.001)
    weights = case.weights if shape == "own" else case.weights[:1] * K
    if shape == "shorter":  # as modules have them that see the tokens between
        case.inputs = [x.detach()[:, : T - k].requires_grad_() for k, x in enumerate(case.inputs)]
    inputs: Any = torch.stack(case.inputs) if shape == "stacked" else case.inputs
    weight: Any = case.weights if shape == "own" else case.weights[0]
    leaves = [*case.inputs, *(case.weights if shape == "own" else case.weights[:1])]
    sums, counts = cross_entropies(case, weights, documents, first)
    more: Any = {"documents": documents, "first": first, "options": options}
    got = losses.multi_token_loss(inputs, weight, case.labels, **more)
    check(got, sums / torch.tensor(counts), [1 / K] * K, leaves)
    factors = [0.8**k for k in range(K)]
    got = losses.multi_token_loss(inputs, weight, case.labels, weights=factors, **more)
    check(got, sums / torch.tensor(counts), factors, leaves)


@pytest.mark.parametrize("own", [False, True])
def test_multi_token_passes_its_options_on(own: bool) -> None:
    case = Case()
    weight: Any = case.weights if own else case.weights[0]
    bias: Any = case.biases if own else case.biases[0]
    options: Any = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0, "logit_scale": 0.7, "ignore_index": 3}
    case.labels[case.labels == -100] = 3
    got = losses.multi_token_loss(case.inputs, weight, case.labels, linear_bias=bias, **options)
    steps = []
    for k, x in enumerate(case.inputs):
        w, b = (case.weights[k], case.biases[k]) if own else (case.weights[0], case.biases[0])
        z = 4 * ((x @ w.T + b) * 0.7 / 4).tanh()
        y = losses.future_labels(case.labels, K, ignore_index=3)[k]
        ce = F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=3, label_smoothing=0.1)
        steps.append(ce + 0.01 * z.logsumexp(-1)[y != 3].square().mean())
    count = K if own else 1
    check(got, torch.stack(steps), [1 / K] * K, [*case.inputs, *case.weights[:count], *case.biases[:count]])


@pytest.mark.parametrize("own", [False, True])
def test_denominators_of_a_step_of_two_micro_batches(own: bool) -> None:
    """Gradient accumulation: the halves' losses add up to the whole's."""
    case = Case()
    weight: Any = case.weights if own else case.weights[0]
    whole = losses.multi_token_loss(case.inputs, weight, case.labels)
    counts = (losses.future_labels(case.labels, K) != -100).flatten(1).sum(1)
    for num_items in (counts, counts.tolist(), list(counts.double())):
        parts = [
            losses.multi_token_loss([x[rows] for x in case.inputs], weight, case.labels[rows], num_items=num_items)
            for rows in (slice(1), slice(1, None))
        ]
        torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
        torch.testing.assert_close(parts[0].steps + parts[1].steps, whole.steps)
    sums, _ = cross_entropies(case, case.weights if own else case.weights[:1] * K)
    for one in (7, torch.tensor(7)):
        got = losses.multi_token_loss(case.inputs, weight, case.labels, num_items=one)
        torch.testing.assert_close(got.steps, sums.detach() / 7)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("rows", [slice(None), slice(0, 0)])
def test_heads_without_labels_are_zero_and_connected(own: bool, rows: slice) -> None:
    case = Case()
    case.labels[:, 2:] = -100  # one label for the first head, none for the others
    case.labels[:, 1] = 4
    weight: Any = case.weights if own else case.weights[0]
    inputs = [x[rows] for x in case.inputs]
    got = losses.multi_token_loss(inputs, weight, case.labels[rows])
    assert (got.steps[1:] == 0).all()
    assert (got.steps[0] > 0) == (len(case.labels[rows]) > 0)
    grads = torch.autograd.grad(got.loss, [*case.inputs, *case.weights[: K if own else 1]])
    assert all(torch.isfinite(g).all() for g in grads)
    assert all((g == 0).all() for g in grads[1:K])


def test_heads_of_one_weight_store_one_gradient_of_it() -> None:
    """And take 6NDV FLOP each; with weights of their own the same."""
    case = Case(torch.float32)

    class Largest(TorchDispatchMode):
        tensors = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.lowtide.cross_entropy.default:
                self.tensors += sum(isinstance(t, Tensor) and t.shape == (V, D) for t in out)
            return out

    for weight, gradients in ((case.weights[0], 1), (case.weights, K)):
        with Largest() as mode, FlopCounterMode(display=False) as flop:
            losses.multi_token_loss(case.inputs, weight, case.labels).loss.backward()
        assert mode.tensors == gradients
        assert flop.get_total_flops() == 6 * K * B * T * D * V


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_precision_of_multi_token(dtype: torch.dtype) -> None:
    """The error is that of one call a head."""
    from lowtide import linear_cross_entropy

    case, true = Case(dtype), Case()
    for low, high in zip([*case.inputs, case.weights[0]], [*true.inputs, true.weights[0]], strict=True):
        high.data.copy_(low.data)
    got = losses.multi_token_loss(case.inputs, case.weights[0], case.labels)
    want = losses.multi_token_loss(true.inputs, true.weights[0], case.labels)
    targets = losses.future_labels(case.labels, K)
    one = [linear_cross_entropy(x, case.weights[0], y) for x, y in zip(case.inputs, targets, strict=True)]
    assert got.loss.dtype == got.steps.dtype == torch.float32
    grads, each, exact = (
        torch.autograd.grad(loss, [*c.inputs, c.weights[0]])
        for loss, c in ((got.loss, case), (sum(one) / K, case), (want.loss, true))
    )
    for g, e, x in zip(grads, each, exact, strict=True):
        assert (g.double() - x).norm() <= 1.5 * (e.double() - x).norm() + 1e-6 * x.norm()
    torch.testing.assert_close(got.steps, torch.stack(one).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_sequences_shorter_than_the_steps(length: int) -> None:
    case = Case()
    labels = case.labels[:, :length].clamp(min=0)
    got = losses.multi_token_loss([x[:, :length] for x in case.inputs], case.weights[0], labels)
    assert ((got.steps > 0) == (torch.arange(K) < length - 1)).all()
    got.loss.backward()


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # dynamo's
def test_it_compiles_as_one_graph() -> None:
    """Which has no place where the host would wait for a number."""
    case = Case(torch.float32)
    leaves = [*case.inputs, case.weights[0]]

    def total(inputs: list[Tensor], weight: Tensor) -> Tensor:
        factors = [0.8**k for k in range(K)]
        found = losses.multi_token_loss(inputs, weight, case.labels, documents=DOCUMENTS, weights=factors)
        return found.loss + found.steps.sum()

    true = total(case.inputs, case.weights[0])
    got = torch.compile(total, fullgraph=True, backend="eager")(case.inputs, case.weights[0])
    torch.testing.assert_close(got, true)
    grads = torch.autograd.grad(got, leaves)
    for p, q in zip(grads, torch.autograd.grad(true, leaves), strict=True):
        torch.testing.assert_close(p, q)


def test_a_frozen_head() -> None:
    """Modules of multi-token prediction are often trained with the model's own head, which stays as it is."""
    case = Case()
    frozen = case.weights[0].detach()
    with torch.no_grad():
        nothing = losses.multi_token_loss(case.inputs, frozen, case.labels)
    got = losses.multi_token_loss(case.inputs, frozen, case.labels)
    assert torch.equal(nothing.steps, got.steps)
    sums, counts = cross_entropies(case, [frozen] * K)
    check(got, sums / torch.tensor(counts), [1 / K] * K, case.inputs)


X, W, Y = torch.zeros(2, 3, 4, 5), torch.zeros(7, 5), torch.zeros(3, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda: losses.future_labels(Y, 0), "steps: expected an int above 0"),
        (lambda: losses.future_labels(Y, 1, first=-1), "first: expected an int of 0 or more"),
        (lambda: losses.future_labels(Y.float(), 1), "labels: expected an integer dtype"),
        (lambda: losses.future_labels(Y, 1, documents=Y[0]), "documents: expected shape"),
        (lambda: losses.multi_token_loss([], W, Y), "inputs: expected a tensor .* got an empty one"),
        (lambda: losses.multi_token_loss(X[:, :2], W, Y), r"inputs\[0\]: expected shape \[3, 4, 'D'\]"),
        (lambda: losses.multi_token_loss([X[0], X[1, :, :, :2]], W, Y), r"inputs\[1\]: expected shape \[\.\.\., 5\]"),
        (lambda: losses.multi_token_loss([X[0], X[1].half()], W, Y), r"inputs\[1\]: expected dtype torch.float32"),
        (lambda: losses.multi_token_loss(X, W, Y, ignore_index=None), "ignore_index: expected an int"),
        (lambda: losses.multi_token_loss(X, [W, W], Y, linear_bias=W[:, 0]), "linear_bias: expected 2 of them"),
        (lambda: losses.multi_token_loss(X, W, Y, linear_bias=[W[:, 0]] * 2), "linear_bias: expected one tensor"),
        (lambda: losses.multi_token_loss(X, W, Y, weights=[1.0]), "weights: expected 2 of them"),
        (lambda: losses.multi_token_loss(X, W, Y, weights=[1, 0]), r"weights\[1\]: expected a finite number above 0"),
        (lambda: losses.multi_token_loss(X, W, Y, num_items=[1.0]), "num_items: expected 2 of them"),
    ],
)
def test_errors(f: Callable[[], Any], text: str) -> None:
    with pytest.raises(LowtideError, match=text):
        f()
