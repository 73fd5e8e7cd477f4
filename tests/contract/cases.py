"""The head's functions side by side: how each is called with random arguments, and what plain PyTorch makes of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from lowtide import (
    HeadOptions,
    HeadPlan,
    TokenStats,
    linear_apply,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_token_stats,
    plan_divergence,
    plan_head,
)
from lowtide.head.token_stats import WANTS, TopK
from support import (
    divergence_oracle,
    head,
    in_float64,
    logits_of,
    mask_of_ids,
    oracle,
    relative_error,
    sets_oracle,
    stats_oracle,
)

Arguments = dict[str, Any]
DIFFERENTIABLE = ("logprob", "entropy", "lse", "mean_logit")
KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.3), ("jsd", 0.5), ("jsd", 0.0), ("jsd", 1.0), ("tv", 0.5)]
TAILS = ("bucket", "renormalise", "drop")
OF_SETS = tuple(name for name in WANTS if name not in ("mean_logit", "topk"))
LEAVES = ("input", "linear_weight", "linear_bias")  # what every function differentiates
WIDE = (torch.float64, torch.float32)
NARROW = (torch.bfloat16, torch.float16)

# what each option may be; the first is the plain one
COMMON: dict[str, list[Any]] = {
    "linear_bias": [True, False],
    "ignored": ["none", "some", "all but one"],
    "softcap": [None, 3.0],
    "leading": [(2, 7), (), (13,), (2, 1, 5), (1, 3)],
    "workspace_mib": [None, 1e-6, 0.004],
    "gradient": ["auto", "recompute"],
    "accumulate": ["auto", "float32", "input"],
}
LAYOUT = ("leading", "workspace_mib", "gradient", "accumulate")  # options that change no number
TARGETS: dict[str, list[Any]] = {
    **COMMON,
    "ignored": ["none", "some", "a class", "all but one"],
    "logit_scale": [1.0, 0.5, "tensor", "trained"],
}


def scale_of(choice: Arguments, dtype: torch.dtype) -> Any:
    if not isinstance(choice["logit_scale"], str):
        return choice["logit_scale"]
    wide = torch.promote_types(dtype, torch.float32)
    return torch.tensor(0.8, dtype=wide, requires_grad=choice["logit_scale"] == "trained")


def ignoring(y: Tensor, choice: Arguments, g: torch.Generator) -> Arguments:
    """Return targets of which some are ignored."""
    if choice["ignored"] == "some":
        y[torch.rand(y.shape, generator=g) < 0.4] = -100
    elif choice["ignored"] == "all but one":
        y.view(-1)[:-1] = -100
    elif choice["ignored"] == "all":
        y.fill_(-100)
    return {"target": y, "ignore_index": 5 if choice["ignored"] == "a class" else -100}


def mask_of(choice: Arguments, leading: tuple[int, ...], g: torch.Generator) -> Arguments:
    y = ignoring(torch.zeros(leading, dtype=torch.long), choice, g)["target"]
    return {"mask": None if choice["ignored"] == "none" else y == 0}


def of_cross_entropy(choice: Arguments, x: Tensor, w: Tensor, y: Tensor, g: torch.Generator) -> Arguments:
    V = w.shape[0]
    items = {"tensor": torch.tensor(11), "zero": torch.tensor(0.0)}.get(choice["num_items"], choice["num_items"])
    return {
        **ignoring(y, choice, g),
        "weight": torch.rand(V, generator=g) + 0.1 if choice["weight"] else None,
        "reduction": choice["reduction"],
        "label_smoothing": choice["label_smoothing"],
        "z_loss": choice["z_loss"],
        "logit_scale": scale_of(choice, x.dtype),
        "token_weight": torch.rand(y.shape, generator=g) * 2 if choice["token_weight"] else None,
        "num_items": items if choice["reduction"] == "mean" else None,
        "shift": choice["shift"] and x.dim() > 1,
    }


def of_statistics(choice: Arguments, x: Tensor, w: Tensor, y: Tensor, g: torch.Generator) -> Arguments:
    K = choice["targets"]
    if K is not None and K > 1:
        y = torch.randint(0, w.shape[0], (*y.shape, K), generator=g)
    known = ignoring(y, choice, g) | {"logit_scale": scale_of(choice, x.dtype)}
    if "want" not in choice:
        return known
    if choice.get("support"):  # every target is in its set: a -inf has no sine
        more = torch.randint(0, w.shape[0], (*x.shape[:-1], choice["support"]), generator=g)
        of_targets = known["target"].view(*x.shape[:-1], K or 1)
        known["support"] = torch.cat((of_targets.where(of_targets != known["ignore_index"], -1), more), -1)
    want = [n for n in choice["want"] if K is not None or n not in ("logprob", "is_top1")] or ["lse"]
    return (
        known | {"want": want, "topk": min(4, w.shape[0]) if "topk" in want else None} | ({} if K else {"target": None})
    )


def of_divergence(choice: Arguments, x: Tensor, w: Tensor, y: Tensor, g: torch.Generator) -> Arguments:
    V, (kind, beta) = w.shape[0], choice["kind"]
    U = max(1, V - choice.get("teacher_lacks", 0))  # of so many classes
    tx, tw, tb, _ = head(y.shape, choice["teacher_D"], U, dtype=x.dtype, seed=7, bias=choice["teacher_bias"])
    tx, tw, tb = (None if t is None else t.detach() for t in (tx, tw, tb))
    items = {"tensor": torch.tensor(7.5), "zero": torch.tensor(0.0)}.get(choice["num_items"], choice["num_items"])
    caps = {"softcap": choice["softcap"], "teacher_softcap": choice["teacher_softcap"]}
    known: Arguments = {"teacher_input": tx, "teacher_weight": tw, "teacher_bias": tb, **caps}
    if choice["tail"]:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        K = min(choice["topk"], V)
        logprobs, ids = (F.linear(tx, tw, tb).to(wide).log_softmax(-1) - 0.1).topk(K)  # at most 0.9: no digit cancels
        if K > 1:
            logprobs.view(-1, K)[:1, -1], ids.view(-1, K)[:1, -1] = -torch.inf, 10**6  # a place that is not used
        known = {"teacher_input": None, "teacher_weight": None, "teacher_topk": (ids, logprobs, choice["tail"])}
    return {
        **known,
        **mask_of(choice, tuple(y.shape), g),
        "kind": kind,
        "beta": beta,
        "temperature": torch.tensor(1.7) if choice["temperature"] == "tensor" else choice["temperature"],
        "reduction": choice["reduction"],
        "num_items": items if choice["reduction"] == "mean" else None,
    }


def of_apply(choice: Arguments, x: Tensor, w: Tensor, y: Tensor, g: torch.Generator) -> Arguments:
    a = torch.randn(*y.shape, 2, generator=g, dtype=torch.float64).to(x.dtype)
    if choice["args"] == "strided":
        a = a.movedim(-1, 0).contiguous().movedim(0, -1)
    wide = torch.promote_types(x.dtype, torch.float32)
    return {
        "target": y,
        "weights": a.requires_grad_(choice["args"] == "trained"),
        "temperature": torch.tensor(1.3, dtype=wide, requires_grad=True),
        "matrix": torch.randn(w.shape[0], 4, generator=g, dtype=torch.float64).to(x.dtype).requires_grad_(),
        **mask_of(choice, tuple(y.shape), g),
        "logit_scale": scale_of(choice, x.dtype),
        "out": choice["out"],
    }


def everything(z: Tensor, y: Tensor, a: Tensor, temperature: Tensor, matrix: Tensor) -> dict[str, Any]:
    """A function with results of many shapes and dtypes."""
    z = z / temperature
    logp = z.log_softmax(-1)
    chosen = logp.gather(-1, y[:, None])[:, 0]
    return {
        "token": chosen * a[:, 0],
        "row": ((logp[:, :, None] * matrix).sum(1), [None, logp[:, :2, None].expand(-1, -1, 3)]),
        "argmax": z.argmax(-1),
        "right": z.argmax(-1) == y,
        "detached": chosen.detach(),
    }


def in_place(z: Tensor, y: Tensor, a: Tensor, temperature: Tensor, matrix: Tensor) -> dict[str, Any]:
    z /= temperature
    return everything(z, y, a, torch.ones_like(temperature), matrix)


def one_sum(*args: Tensor) -> Tensor:
    found = everything(*args)
    return found["token"].sum() + (found["row"][0] / 10).square().sum()


def several_sums(*args: Tensor) -> tuple[Tensor, ...]:
    found = everything(*args)
    return found["token"].sum(), (found["row"][0] / 10).square().sum(), found["right"].sum(), found["detached"].sum()


def light(z: Tensor, y: Tensor, a: Tensor, temperature: Tensor, matrix: Tensor) -> Tensor:
    """A few numbers of a row, which take several copies of its logits."""
    logp = z.log_softmax(-1)
    found = F.cross_entropy(z, y, reduction="none") - (logp.exp() * logp).sum(-1)  # and the entropy
    return found * a[:, 0] * temperature * matrix.to(z.dtype).square().mean()


APPLIED = {
    "token": everything, "token, in place": in_place, "sum": one_sum, "sums": several_sums, "light token": light,
    "light sum": lambda *args: light(*args).sum(),
}  # fmt: skip


def applied(
    input: Tensor, linear_weight: Tensor, target: Tensor, weights: Tensor, temperature: Tensor, matrix: Tensor,
    out: str = "token", **kwargs: Any,
) -> Any:  # fmt: skip
    return linear_apply(
        APPLIED[out], input, linear_weight, target, weights, params=(temperature, matrix),
        out="sum" if "sum" in out else "token", **kwargs,
    )  # fmt: skip


def apply_oracle(
    input: Tensor, linear_weight: Tensor, target: Tensor, weights: Tensor, temperature: Tensor, matrix: Tensor, *,
    mask: Tensor | None = None, out: str = "token", linear_bias: Tensor | None = None, softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
) -> Any:  # fmt: skip
    """All logits at once; masked rows left out."""
    leading = input.shape[:-1]
    keep = torch.ones(leading, dtype=torch.bool, device=input.device) if mask is None else mask
    z = logits_of(input[keep], linear_weight, linear_bias, softcap, logit_scale)
    rows = APPLIED[out](z, target[keep], weights[keep], temperature, matrix)

    def spread(leaf: Tensor | None) -> Tensor | None:
        if leaf is None:
            return None
        whole = leaf.new_zeros((*leading, *leaf.shape[1:]))
        return whole.masked_scatter(keep.view((*leading, *[1] * (leaf.dim() - 1))), leaf.contiguous())

    return rows if "sum" in out else pytree.tree_map(spread, rows)


def statistics_oracle(*, want: tuple[str, ...], topk: int | None, **kwargs: Any) -> TokenStats:
    if "support" in kwargs:
        ids = kwargs.pop("support").expand(*kwargs["input"].shape[:-1], -1)
        mask = mask_of_ids(ids, kwargs["linear_weight"].shape[0])
        found = sets_oracle(mask=mask, **kwargs)
        return TokenStats(**{name: found[name] for name in (*want, "outside")})
    found = stats_oracle(**kwargs, topk=topk or 1)
    found["topk"] = TopK(found.pop("topk_values"), found.pop("topk_ids"))
    return TokenStats(**{name: found[name] for name in want})


@dataclass(frozen=True)
class Function:
    """One public function: how it is called, plain PyTorch's twin, its options, and how near it has to come."""

    run: Callable[..., Any]
    truth: Callable[..., Any]
    own: Callable[..., Arguments]
    options: dict[str, list[Any]]
    busy: Arguments  # the choice with everything in it
    tolerance: dict[torch.dtype, tuple[float, float]]  # relative errors of values and of gradients
    of_scalars: float = 100.0  # times as much for the gradient of a number: a sum with cancellation
    rounding: float = 0.0  # of gradients, in eps times the upstream's norm: all there is in a saturated row
    plan: Callable[..., HeadPlan] = plan_head


def near(double: float, single: float, bf16: float = 1e-2, fp16: float = 2e-3, times: float = 1.0) -> Any:
    """Return the bounds of each dtype, ``times`` as far for gradients in the wide ones."""
    wide = {dtype: (bound, times * bound) for dtype, bound in ((torch.float64, double), (torch.float32, single))}
    return wide | {torch.bfloat16: (1e-5, bf16), torch.float16: (1e-5, fp16)}


FUNCTIONS = {
    "linear_cross_entropy": Function(
        run=linear_cross_entropy,
        truth=oracle,
        own=of_cross_entropy,
        options=TARGETS | {
            "weight": [False, True],
            "label_smoothing": [0.0, 0.1, 1.0],
            "z_loss": [0.0, 1e-2],
            "token_weight": [False, True],
            "num_items": [None, 7, 2.5, "tensor"],
            "shift": [False, True],
            "reduction": ["mean", "sum", "none"],
        },
        busy={"weight": True, "label_smoothing": 0.1, "z_loss": 0.1, "token_weight": True, "shift": True,
              "softcap": 3.0, "logit_scale": "trained"},
        tolerance=near(1e-13, 5e-6, 8e-3, 8e-4),
    ),
    "linear_logprobs": Function(
        run=linear_logprobs,
        truth=lambda **kwargs: stats_oracle(**kwargs)["logprob"],
        own=of_statistics,
        options=TARGETS | {"targets": [1, 3]},
        busy={"softcap": 3.0, "logit_scale": "trained"},
        tolerance=near(1e-12, 1e-5),
    ),
    "linear_token_stats": Function(
        run=linear_token_stats,
        truth=statistics_oracle,
        own=of_statistics,
        options=TARGETS | {"targets": [1, None, 3, 40], "want": [WANTS]},
        busy={"softcap": 3.0, "logit_scale": "trained"},
        tolerance=near(1e-12, 1e-5),
    ),
    "linear_divergence": Function(
        run=linear_divergence,
        truth=divergence_oracle,
        own=of_divergence,
        options=COMMON | {
            "kind": KINDS,
            "tail": [None, None, None, *TAILS],
            "topk": [4, 12, 1],
            "teacher_D": [14, 1, 9],
            "teacher_bias": [False, True],
            "teacher_softcap": [None, 0.7],
            "temperature": [1.0, 0.5, 3, "tensor"],
            "num_items": [None, 7.5, "tensor"],
            "reduction": ["none", "sum", "mean"],
        },
        busy={"teacher_bias": True, "teacher_softcap": 4.0, "temperature": "tensor", "softcap": 3.0},
        tolerance=near(1e-11, 2e-5),
        rounding=50,
        plan=plan_divergence,
    ),
    "linear_apply": Function(
        run=applied,
        truth=apply_oracle,
        own=of_apply,
        options=TARGETS | {
            "ignored": ["none", "some", "all but one", "all"],
            "leading": [(2, 7), (), (1,), (13,), (2, 1, 5), (0,), (3, 0)],
            "out": ["token", "sum", "sums", "token, in place"],
            "args": ["trained", "fixed", "strided"],
        },
        busy={"softcap": 3.0, "logit_scale": "trained"},
        tolerance=near(1e-12, 1e-5, times=3),
        of_scalars=1.0,
    ),
}  # fmt: skip


def arguments(
    name: str, dtype: torch.dtype = torch.float64, seed: int = 0, D: int = 9, V: int = 23, **choice: Any
) -> Arguments:
    """Return random arguments of a function, everything not chosen plain; float leaves that need gradients."""
    function = FUNCTIONS[name]
    choice = {option: values[0] for option, values in function.options.items()} | choice
    x, w, b, y = head(choice["leading"], D, V, dtype=dtype, seed=seed, bias=choice["linear_bias"])
    g = torch.Generator().manual_seed(seed + 1)
    common = {"input": x, "linear_weight": w, "linear_bias": b, "softcap": choice["softcap"]}
    kept = {name: choice[name] for name in ("workspace_mib", "gradient", "accumulate")}
    return common | function.own(choice, x, w, y, g) | {"options": HeadOptions(**kept)}


@dataclass(frozen=True)
class Mode:
    """A function with some of its options chosen."""

    name: str
    choice: Arguments = field(default_factory=dict)
    stored: bool = False  # gradients are computed in forward
    stored_where_frozen: bool = False  # the same, where the head is frozen

    @property
    def per_token(self) -> bool:
        """Whether each token has a value of its own."""
        plain = self.name in ("linear_logprobs", "linear_token_stats")
        whole = self.choice.get("reduction", "mean" if self.name == "linear_cross_entropy" else "none")
        return plain or (whole == "none" and self.choice.get("out", "token") == "token")

    @property
    def function(self) -> Function:
        return FUNCTIONS[self.name]

    def arguments(self, leading: int | tuple[int, ...] = 9, D: int = 5, V: int = 13, **kwargs: Any) -> Arguments:
        leading = (leading,) if isinstance(leading, int) else leading
        return arguments(self.name, **{"D": D, "V": V, "leading": leading, **self.choice, **kwargs})

    def run(self, kwargs: Arguments) -> dict[str, Tensor]:
        return flat(self.function.run(**kwargs))

    def truth(self, kwargs: Arguments) -> dict[str, Tensor]:
        return flat(self.function.truth(**{k: v for k, v in kwargs.items() if k != "options"}))


MODES = {
    "mean": Mode("linear_cross_entropy", stored=True),
    "mean-recomputed": Mode("linear_cross_entropy", {"gradient": "recompute"}),
    "each": Mode("linear_cross_entropy", {"reduction": "none"}, stored_where_frozen=True),
    "logprobs": Mode("linear_logprobs", stored_where_frozen=True),
    "logprobs-of-several": Mode("linear_logprobs", {"targets": 3}),
    "statistics": Mode("linear_token_stats", {"want": WANTS, "targets": 3}),
    "sets": Mode("linear_token_stats", {"want": OF_SETS, "targets": 3, "support": 4}),
    "forward_kl": Mode("linear_divergence", {"teacher_lacks": 3}),
    "reverse_kl-mean": Mode("linear_divergence", {"kind": ("reverse_kl", 0.5), "reduction": "mean"}, stored=True),
    "jsd": Mode("linear_divergence", {"kind": ("jsd", 0.3)}),
    "jsd-sum": Mode("linear_divergence", {"kind": ("jsd", 0.3), "reduction": "sum"}, stored=True),
    "tv": Mode("linear_divergence", {"kind": ("tv", 0.5)}),
    "top-k": Mode("linear_divergence", {"kind": ("jsd", 0.3), "tail": "bucket"}),
    "top-k-mean": Mode("linear_divergence", {"tail": "drop", "reduction": "mean"}, stored=True),
    "apply": Mode("linear_apply"),
    "apply-sum": Mode("linear_apply", {"out": "sum"}, stored=True),
    "apply-sum-recomputed": Mode("linear_apply", {"out": "sum", "gradient": "recompute", "workspace_mib": 1e-6}),
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
OPERATORS = {name: mode for name, mode in MODES.items() if mode.name != "linear_apply"}  # what is one operator
every_operator = pytest.mark.parametrize("mode", OPERATORS.values(), ids=OPERATORS)


def flat(found: Any) -> dict[str, Tensor]:
    """Return the tensors of any pytree by their places in it."""
    leaves, _ = pytree.tree_flatten_with_path(found)
    return dict(sorted((pytree.keystr(path), leaf) for path, leaf in leaves if leaf is not None))


def trained(kwargs: Arguments) -> list[str]:
    return [name for name, value in kwargs.items() if isinstance(value, Tensor) and value.requires_grad]


def counting(kwargs: Arguments) -> Tensor:
    """Return which tokens are not ignored: bool [...]."""
    leading = kwargs["input"].shape[:-1]
    if "mask" in kwargs:
        return torch.ones(leading, dtype=torch.bool) if kwargs["mask"] is None else kwargs["mask"]
    return (kwargs["target"] != kwargs["ignore_index"]).view(*leading, -1).any(-1)


def of_tokens(kwargs: Arguments, chosen: Tensor, **changes: Any) -> Arguments:
    """Return the arguments for some of the tokens [N] alone."""
    N = kwargs["input"].shape[0]
    cut = {
        k: v[chosen] if isinstance(v, Tensor) and v.shape[:1] == (N,) and k != "linear_weight" else v
        for k, v in kwargs.items()
    }
    if "teacher_topk" in kwargs:
        ids, logprobs, tail = kwargs["teacher_topk"]
        cut["teacher_topk"] = (ids[chosen], logprobs[chosen], tail)
    return cut | changes


def total(found: dict[str, Tensor], through: Callable[[Tensor], Tensor] = torch.sin) -> Tensor:
    """One number to which all differentiable outputs contribute, each with a factor of its own."""
    needed = any(out.requires_grad for out in found.values())
    terms = [(i + 1) * through(out).sum() for i, out in enumerate(found.values()) if out.requires_grad or not needed]
    return torch.stack(terms).sum()


def gradients(mode: Mode, kwargs: Arguments, **total_of: Any) -> list[Tensor]:
    return list(torch.autograd.grad(total(mode.run(kwargs), **total_of), [kwargs[n] for n in trained(kwargs)]))


def true_gradients(mode: Mode, kwargs: Arguments, **total_of: Any) -> list[Tensor]:
    """The same from whole logits in float64."""
    wide = in_float64(kwargs)
    return list(torch.autograd.grad(total(mode.truth(wide), **total_of), [wide[n] for n in trained(kwargs)]))


def check(
    name: str, choice: Arguments, dtype: torch.dtype, seed: int = 0, D: int = 9, V: int = 23, **bounds: Any
) -> None:
    """Compare a function's values and gradients with plain PyTorch's in float64; some outputs get an upstream."""
    function, choose = replace(FUNCTIONS[name], **bounds), random.Random(seed)
    kwargs = arguments(name, dtype, seed, D, V, **choice)
    wide = in_float64(kwargs)
    got, want = flat(function.run(**kwargs)), flat(function.truth(**wide))
    near, near_gradients = function.tolerance[dtype]
    case = (choice, seed)
    assert got.keys() == want.keys()
    for key, e in want.items():
        g = got[key]
        assert g.shape == e.shape, key
        if e.is_floating_point():
            assert g.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), key
            assert relative_error(g, e) <= near or (g.isnan().all() and e.isnan().all()), (key, case)
            assert g.requires_grad == e.requires_grad, (key, case)
        else:
            assert g.dtype == e.dtype
            assert torch.equal(g, e), (key, case)
    used = [key for key in want if want[key].requires_grad and choose.random() < 0.7]
    used = used or [key for key in want if want[key].requires_grad][:1]
    if not used:
        return
    one = choose.random() < 0.3
    torch.manual_seed(seed)
    upstream = [torch.ones_like(want[key]) if one else torch.randn_like(want[key]) for key in used]
    names = trained(kwargs)
    found, true = (
        torch.autograd.grad(
            [outputs[key] for key in used], [leaves[n] for n in names],
            [u.to(outputs[key].dtype) for key, u in zip(used, upstream, strict=True)],
            allow_unused=True, materialize_grads=True,
        )
        for outputs, leaves in ((got, kwargs), (want, wide))
    )  # fmt: skip
    rounding = function.rounding * torch.finfo(got[used[0]].dtype).eps * sum(u.norm().item() for u in upstream)
    for n, g, e in zip(names, found, true, strict=True):
        assert g.dtype == kwargs[n].dtype
        bound = near_gradients * (function.of_scalars if e.dim() == 0 else 1)
        error, norm = relative_error(g, e), e.norm().item() or 1.0
        assert error <= bound + rounding / norm, (n, used, case)
    kept = kwargs.get("mask")
    if kept is not None:
        assert (found[0][~kept] == 0).all()
