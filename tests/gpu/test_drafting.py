"""Several predictions per position on a CUDA device: values and gradients, no waits, the same bits, memory."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.conftest import ON_GPU, no_waits, peak_beyond_gradients
from lowtide import HeadOptions, losses
from support import relative_error

pytestmark = ON_GPU
B, T, D, V, U, K = 2, 301, 136, 1100, 344, 3
NEAR = {torch.float64: (1e-12, 1e-11), torch.float32: (1e-5, 1e-5), torch.float16: (1e-4, 3e-3)}
NEAR |= {torch.bfloat16: (1e-3, 1.2e-2)}
Leaves = list[Tensor]


def arguments(dtype: torch.dtype, device: str = "cuda") -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(*shape, generator=g)).to(dtype).to(device)

    found: dict[str, Any] = {"inputs": [normal(B, T, D).requires_grad_() for _ in range(K)]}
    found |= {"weight": normal(V, D, std=0.2).requires_grad_(), "student": normal(U, D, std=0.2).requires_grad_()}
    found |= {"teacher": normal(B, T, 96), "teacher_weight": normal(V, 96, std=0.2)}
    labels = torch.randint(0, V, (B, T), generator=g)
    labels[torch.rand(B, T, generator=g) < 0.3] = -100
    found |= {"labels": labels.to(device), "mask": (torch.rand(B, T, generator=g) < 0.8).to(device)}
    found |= {"draft_ids": torch.randperm(V, generator=g)[:U].to(device)}
    found |= {"documents": (torch.rand(B, T, generator=g) < 0.05).cumsum(-1).to(device)}
    return found


def several(a: dict[str, Any], **o: Any) -> tuple[losses.StepLosses, Leaves]:
    loss = losses.multi_token_loss(
        a["inputs"], a["weight"], a["labels"], weights=[1.0, 0.5, 0.25], documents=a["documents"], **o
    )
    return loss, [*a["inputs"], a["weight"]]


def draft(a: dict[str, Any], **o: Any) -> tuple[losses.StepLosses, Leaves]:
    loss = losses.draft_loss(
        a["inputs"], a["student"], a["teacher"], a["teacher_weight"], draft_ids=a["draft_ids"], mask=a["mask"],
        documents=a["documents"], weights=[1.0, 0.5, 0.25], **o,
    )  # fmt: skip
    return loss, [*a["inputs"], a["student"]]


def in_float64(a: dict[str, Any]) -> dict[str, Any]:
    """Return the same numbers on the CPU."""

    def wide(x: Any) -> Any:
        if isinstance(x, list):
            return [wide(y) for y in x]
        moved = x.detach().cpu()
        return moved.double().requires_grad_(x.requires_grad) if x.is_floating_point() else moved

    return {name: wide(x) for name, x in a.items()}


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("of", [several, draft])
def test_values_and_gradients(of: Any, dtype: torch.dtype) -> None:
    a, o = arguments(dtype), {} if of is several else {"skip_outside": False}
    near, of_gradients = NEAR[dtype]
    (got, leaves), (want, true) = of(a, **o), of(in_float64(a), **o)
    assert relative_error(got.loss.cpu(), want.loss) < near
    assert relative_error(got.steps.cpu(), want.steps) < near
    for g, e in zip(torch.autograd.grad(got.loss, leaves), torch.autograd.grad(want.loss, true), strict=True):
        assert relative_error(g.cpu(), e) < of_gradients


def test_positions_are_left_out_by_the_teachers_choice() -> None:
    a = arguments(torch.float32)
    top = (a["teacher"] @ a["teacher_weight"].T).argmax(-1)
    left = a["mask"] & torch.isin(top, a["draft_ids"])
    assert 0 < left.sum() < a["mask"].sum()
    got, want = draft(a)[0], draft(a | {"mask": left}, skip_outside=False)[0]
    torch.testing.assert_close(got.steps, want.steps)


@pytest.mark.parametrize("of", [several, draft])
def test_no_host_waits_and_the_same_bits(of: Any) -> None:
    a, o = arguments(torch.bfloat16), {"options": HeadOptions(ignored_tokens="skip")}

    def step() -> tuple[Tensor, ...]:
        found, leaves = of(a, **o)
        return (*found, *torch.autograd.grad(found.loss, leaves))

    for _ in range(4):
        first = step()
    with no_waits():
        again = step()
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one, two)


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Heads of one weight store one gradient of it; a drafter's step stores no logits of either side."""
    tokens, width, vocab, drafts = 8192, 1024, 65536, 16384
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=g, dtype=torch.bfloat16) / shape[-1] ** 0.5

    inputs = [normal(1, tokens, width).requires_grad_() for _ in range(K)]
    weight, student = normal(vocab, width).requires_grad_(), normal(drafts, width).requires_grad_()
    labels = torch.randint(0, vocab, (1, tokens), device="cuda", generator=g)
    teacher, ids = normal(1, tokens, width), torch.arange(0, vocab, vocab // drafts, device="cuda")
    options = HeadOptions(workspace_mib=256)

    def naive_heads() -> None:
        targets = losses.future_labels(labels, K)
        logits = (torch.cat(inputs) @ weight.T).float()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()

    def naive_draft() -> None:
        with torch.no_grad():
            z = (teacher @ weight.T).float()
            kept, p = torch.isin(z.argmax(-1), ids), z[..., ids].softmax(-1)
        (-(p * (inputs[0] @ student.T).float().log_softmax(-1)).sum(-1) * kept).mean().backward()

    steps: dict[str, tuple[Any, Leaves]] = {
        f"{K} heads": (
            lambda: losses.multi_token_loss(inputs, weight, labels, options=options).loss.backward(), [*inputs, weight]
        ),
        f"{K} heads, a call each": (
            lambda: losses.multi_token_loss(inputs, [weight] * K, labels, options=options).loss.backward(),
            [*inputs, weight],
        ),
        f"{K} heads, all logits": (naive_heads, [*inputs, weight]),
        "a draft": (
            lambda: losses.draft_loss(
                inputs[:1], student, teacher, weight.detach(), draft_ids=ids, options=options
            ).loss.backward(),
            [inputs[0], student],
        ),
        "a draft, all logits": (naive_draft, [inputs[0], student]),
    }  # fmt: skip
    peaks = {}
    for name, (step, leaves) in steps.items():
        step()
        peaks[name] = peak_beyond_gradients(step, *leaves) / 2**20
    with capsys.disabled():
        rows = [f"{name:>24}  {mib:8.0f} MiB beyond inputs and gradients\n" for name, mib in peaks.items()]
        sys.stdout.write("\n" + "".join(rows))
    joined = K * tokens * width * 2 / 2**20  # the hidden states of all heads, and their gradient
    assert peaks[f"{K} heads"] < 256 + 2 * joined + 64
    assert peaks[f"{K} heads, a call each"] > peaks[f"{K} heads"] + 64
    assert peaks["a draft"] < 256 + 2 * (drafts * width * 2 + tokens * width * 2) / 2**20 + 64
