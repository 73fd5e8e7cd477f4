"""What several tests share: random heads, the float64 oracle, and errors measured as norms."""

from __future__ import annotations

import itertools
import os
import random
import sys
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from contract import references

DEVICE = "cpu"  # where the contract is held: pytest --device


class Sharded(Tensor):
    """What a DTensor shows of itself."""

    device_mesh = "a mesh"


def alone() -> bool:
    """Return whether no other worker of pytest uses the machine: only then are times a test's own."""
    return os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1"


def forget_plans() -> None:
    """Have the next calls of the head plan anew."""
    for module in [module for name, module in sys.modules.items() if name.startswith("lowtide.head")]:
        for name, planner in vars(module).items():
            if "plan" in name and hasattr(planner, "cache_clear"):
                planner.cache_clear()


def forget_accelerate() -> None:
    """Have the next Accelerator begin anew: its precision, accumulation and plugins are the whole process's."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def pairs(options: dict[str, list[Any]], seed: int) -> Iterator[dict[str, Any]]:
    """Cases among which every pair of values of any two options occurs, in company that the seed chooses."""
    choose = random.Random(seed)
    places = {name: range(len(values)) for name, values in options.items()}

    def pairs_of(case: dict[str, int]) -> set[Any]:
        return set(itertools.combinations(case.items(), 2))

    missing = set()
    for one, two in itertools.combinations(options, 2):
        missing |= {((one, i), (two, j)) for i in places[one] for j in places[two]}
    while missing:
        wanted = choose.sample(sorted(missing), 1)[0]
        drawn = [{n: choose.choice(places[n]) for n in options} | dict(wanted) for _ in range(30)]
        best = max(drawn, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        yield {name: options[name][i] for name, i in best.items()}


def every_pair(**options: Iterable[Any]) -> pytest.MarkDecorator:
    """Run a test with cases among which every pair of values of any two options occurs."""
    cases = [tuple(case.values()) for case in pairs({name: [*values] for name, values in options.items()}, seed=0)]
    return pytest.mark.parametrize(tuple(options), cases)


def relative_error(got: Tensor, true: Tensor) -> float:
    """Return ||got - true|| / ||true||, or ||got|| where the truth is 0."""
    got, true = got.detach().double(), true.detach().double()
    norm = true.norm().item()
    return (got - true).norm().item() / (norm or 1.0)


def doubled(*tensors: Tensor | None) -> list[Any]:
    """Return the tensors in float64, as leaves where they were."""
    return [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def assert_near(got: Iterable[Tensor], want: Iterable[Tensor], bound: float | None = None, what: object = "") -> None:
    """Compare tensors one by one: by their relative error; with no bound as `torch.testing.assert_close` does."""
    for i, (g, e) in enumerate(zip(got, want, strict=True)):
        if bound is None:
            torch.testing.assert_close(g, e, msg=lambda m, i=i: f"{what} {i}: {m}")
        else:
            assert relative_error(g, e) <= bound, (what, i)


def assert_same_gradients(
    got: Tensor,
    want: Tensor,
    leaves: Sequence[Tensor],
    others: Sequence[Tensor] | None = None,
    bound: float | None = None,
    upstream: Tensor | None = None,
) -> None:
    """Compare the gradients of ``got`` by its leaves with those of ``want`` by the same or by others.

    ``upstream``: of both; None is 1 for each number.
    """
    upstream = torch.ones_like(want) if upstream is None else upstream
    found = torch.autograd.grad(got, leaves, upstream.to(got.dtype))
    assert_near(found, torch.autograd.grad(want, others or leaves, upstream), bound)


def head(
    N: int | tuple[int, ...], D: int, V: int, *, dtype: torch.dtype = torch.float32, seed: int = 0, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return random hidden states [..., D], weight [V, D], bias [V] and targets [...], leaves that need gradients."""
    g = torch.Generator().manual_seed(seed)
    shape = (N,) if isinstance(N, int) else N
    x = torch.randn(*shape, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    w = (2 * torch.randn(V, D, generator=g, dtype=torch.float64) / max(D, 1) ** 0.5).to(dtype).requires_grad_()
    b = torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    return x, w, b, torch.randint(0, V, shape, generator=g)


def on_gpu(*args: Any, **kwargs: Any) -> list[Any]:
    """As `head`, on the GPU."""
    return [t if t is None else t.detach().cuda().requires_grad_(t.requires_grad) for t in head(*args, **kwargs)]


def logits_of(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
) -> Tensor:
    """Plain PyTorch's logits [..., V]: the GEMM in the dtype of its operands, the rest in float32 or float64."""
    z = F.linear(input, linear_weight, linear_bias)
    z = (z if z.dtype == torch.float64 else z.float()) * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def oracle(*args: Any, **kwargs: Any) -> Tensor:
    """`linear_cross_entropy` from whole logits, in float64 where its inputs are."""
    loss: Tensor = references.cross_entropy(*args, **kwargs)[0]
    return loss


def stats_oracle(
    input: Tensor, linear_weight: Tensor, target: Tensor | None = None, *, topk: int = 1, **kwargs: Any
) -> dict[str, Tensor]:
    """Every statistic of `linear_token_stats`, from whole logits."""
    names = ["entropy", "lse", "mean_logit", "sum_sq_prob", *(["logprob"] if target is not None else [])]
    values = references.token_stats(input, linear_weight, target, (*names, "topk"), topk=topk, **kwargs)
    stats = dict(zip((*names, "topk_values"), values, strict=True))
    ignore_index = kwargs.pop("ignore_index", -100)
    z = logits_of(input, linear_weight, **kwargs)
    stats |= {"argmax": z.argmax(-1), "topk_ids": z.topk(topk).indices}
    if target is not None:
        several = target if target.dim() == input.dim() else target[..., None]
        stats["is_top1"] = (several == z.argmax(-1, keepdim=True)).view(target.shape) & (target != ignore_index)
    return stats


def in_float64(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with every floating tensor in float64, as leaves where they were."""
    return {
        name: value.detach().double().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in kwargs.items()
        if name != "options"
    }


def divergence_oracle(*args: Any, **kwargs: Any) -> Tensor:
    """`linear_divergence` from whole logits, for a teacher of as many classes or fewer, or its top k."""
    value: Tensor = references.divergence(*args, **kwargs)[0]
    return value


def rotary_oracle(x: Tensor, cos: Tensor, sin: Tensor, pairs: str = "halves") -> Tensor:
    """Heads [B, H, T, d], r values of each by a matrix of r x r for each position."""
    short = pairs in ("short", "short_interleaved", "trailing")
    r = cos.shape[-1] * (2 if short else 1)
    i = torch.arange(r, device=x.device)
    row, partner, first, entry = i, (i + r // 2) % max(r, 1), i < r // 2, i
    if pairs not in ("halves", "short", "backwards"):
        partner, first = i ^ 1, i % 2 == 0
    if pairs in ("repeated", "deinterleaved", "short_interleaved", "trailing"):
        entry = i // 2
    if pairs == "short":
        entry = i % max(r // 2, 1)
    if pairs == "deinterleaved":
        row = i // 2 + (r // 2) * (i % 2)
    cos, sin = cos[..., entry].to(x.dtype), sin[..., entry].to(x.dtype) * (-1 if pairs == "backwards" else 1)
    turn = torch.zeros(*cos.shape, r, dtype=x.dtype, device=x.device)  # of each value, from each value
    turn[..., row, i] = cos
    turn[..., row, partner] = torch.where(first, -sin, sin)
    start = x.shape[-1] - r if pairs == "trailing" else 0
    before, middle, after = x.tensor_split((start, start + r), -1)
    return torch.cat((before, torch.einsum("btij,bhtj->bhti", turn, middle), after), -1)


def mlp(
    N: int | tuple[int, ...], D: int, F_: int, *, dtype: torch.dtype = torch.float32, seed: int = 0, bias: bool = True
) -> list[Tensor | None]:
    """Return random hidden states [..., D], the three weights and the three biases of a gated MLP, as leaves."""
    g = torch.Generator().manual_seed(seed)
    leading = (N,) if isinstance(N, int) else N
    shapes = ((*leading, D), (F_, D), (F_, D), (D, F_), (F_,), (F_,), (D,))
    scales = (1.0, *(2 / max(D, 1) ** 0.5,) * 2, 1 / max(F_, 1) ** 0.5, 1.0, 1.0, 1.0)
    leaves: list[Tensor | None] = [
        (scale * torch.randn(*shape, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    return leaves if bias else [*leaves[:4], None, None, None]


def mlp_slack(dtype: torch.dtype, leaves: Sequence[Tensor | None]) -> float:
    """Return how far beyond 1.3 times plain PyTorch's an error of what `mlp` returns may be.

    Of a few numbers plain PyTorch may be lucky with all; the wide dtypes have no sums that are wider.
    """
    few = all(t is None or t.numel() < 1000 for t in leaves[1:])
    if dtype in (torch.float64, torch.float32):
        return torch.finfo(dtype).eps * (20 if few else 6)
    return torch.finfo(dtype).eps * (4 if few else 0.1)


def sets_oracle(
    input: Tensor, linear_weight: Tensor, target: Tensor, mask: Tensor, ignore_index: int = -100, **kwargs: Any
) -> dict[str, Tensor]:
    """Every statistic over sets of classes, ``mask`` [..., V], from whole logits that are -inf elsewhere."""
    z = logits_of(input, linear_weight, **kwargs).masked_fill(~mask, -torch.inf)
    empty = ~mask.any(-1)
    lse = z.logsumexp(-1).masked_fill(empty, -torch.inf)
    logp = (z - lse.masked_fill(empty, 0)[..., None]).masked_fill(~mask, 0)
    p = logp.exp() * mask
    several = target if target.dim() > lse.dim() else target[..., None]
    y, kept = several.clamp(0, z.shape[-1] - 1), several != ignore_index
    inside = mask.gather(-1, y)
    argmax = z.argmax(-1).masked_fill(empty, -1)
    return {
        "logprob": logp.gather(-1, y).masked_fill(~inside, -torch.inf).masked_fill(~kept, 0).view(target.shape),
        "entropy": -(p * logp).sum(-1),
        "lse": lse,
        "argmax": argmax,
        "sum_sq_prob": p.detach().square().sum(-1),
        "is_top1": ((y == argmax[..., None]) & kept).view(target.shape),
        "outside": (kept & ~inside).sum(),
    }


def mask_of_ids(ids: Tensor, V: int) -> Tensor:
    """Return which of V classes are among ids [..., K], of which -1 is none."""
    mask = torch.zeros(*ids.shape[:-1], V + 1, dtype=torch.bool, device=ids.device)
    return mask.scatter_(-1, torch.where(ids < 0, V, ids), True)[..., :V]


def gemm_flop(*calls: Callable[[], Any]) -> list[int]:
    """Return what the GEMMs that really run take in each call, inside operators, too."""
    from torch.autograd.profiler import profile, record_function

    with profile(use_kineto=True, record_shapes=True) as profiler:  # whose own list of events takes seconds to make
        for i, call in enumerate(calls):
            with record_function(f"call {i}"):
                call()
    flop = [0] * len(calls)
    events = profiler.kineto_results.events()
    starts = sorted(event.start_ns() for event in events if event.name().startswith("call "))
    for event in events:
        if event.name() in ("aten::mm", "aten::addmm"):
            (rows, depth), (_, columns) = event.shapes()[event.name() == "aten::addmm" :][:2]
            at = bisect(starts, event.start_ns()) - 1
            flop[at] += 2 * rows * depth * columns * (rows > 1)  # a bias's sum may be a product of one row
    return flop


def counted_flop(*calls: Callable[[], Any]) -> list[int]:
    """Return what PyTorch's own counter says."""
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton where there is one

    counters = [FlopCounterMode(display=False) for _ in calls]
    for call, counter in zip(calls, counters, strict=True):
        with counter:
            call()
    return [int(counter.get_total_flops()) for counter in counters]
