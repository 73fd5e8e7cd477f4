"""The head's functions side by side: how each is called with random arguments, and what plain PyTorch makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from contract.function import NARROW, WIDE, Arguments, Function, Mode, flat, near, total, trained  # noqa: F401
from lowtide import (
    HeadOptions,
    TokenStats,
    linear_apply,
    linear_contrastive,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_token_stats,
    plan_divergence,
)
from lowtide.head.token_stats import WANTS, TopK
from support import (
    divergence_oracle,
    head,
    logits_of,
    mask_of_ids,
    oracle,
    sets_oracle,
    stats_oracle,
)

DIFFERENTIABLE = ("logprob", "entropy", "lse", "mean_logit")
KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.3), ("jsd", 0.5), ("jsd", 0.0), ("jsd", 1.0), ("tv", 0.5)]
TAILS = ("bucket", "renormalise", "drop")
OF_SETS = tuple(name for name in WANTS if name not in ("mean_logit", "topk"))
LEAVES = ("input", "linear_weight", "linear_bias")  # what every function differentiates

# what each option may be; the first is the plain one
COMMON: dict[str, list[Any]] = {
    "linear_bias": [True, False],
    "ignored": ["none", "some", "all but one"],
    "softcap": [None, 3.0],
    "leading": [(2, 7), (), (13,), (2, 1, 5), (1, 3)],
    "workspace_mib": [None, 1e-6, 0.004],
    "gradient": ["auto", "recompute"],
    "accumulate": ["auto", "float32", "input"],
    "ignored_tokens": ["auto", "compute"],
}
LAYOUT = ("leading", "workspace_mib", "gradient", "accumulate", "ignored_tokens")  # options that change no number
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
    tx, tw, tb, _ = head(
        y.shape, choice["teacher_D"], U, dtype=x.dtype, seed=choice["seed"] + 7, bias=choice["teacher_bias"]
    )
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
        "row": ((logp[:, :, None] * matrix).sum(1), [logp[:, :2, None].expand(-1, -1, 3)]),
        "argmax": z.argmax(-1),
        "right": z.argmax(-1) == y,
        "detached": chosen.detach(),
    }


def in_place(z: Tensor, y: Tensor, a: Tensor, temperature: Tensor, matrix: Tensor) -> dict[str, Any]:
    z /= temperature
    return everything(z, y, a, torch.ones_like(temperature), matrix)


def one_sum(*args: Tensor) -> Tensor:
    found = everything(*args)
    return found["token"].square().sum() + (found["row"][0] / 10).square().sum()


def several_sums(*args: Tensor) -> tuple[Tensor, ...]:
    found = everything(*args)
    return (
        found["token"].square().sum(),
        (found["row"][0] / 10).square().sum(),
        found["right"].sum(),
        found["detached"].sum(),
    )


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

    def spread(leaf: Tensor) -> Tensor:
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


def of_contrastive(choice: Arguments) -> Arguments:
    g, D, dtype, P, masked = (choice[name] for name in ("g", "D", "dtype", "P", "mask"))
    Q = math.prod(choice["leading"])
    K = Q + choice["more_keys"]
    wide = torch.promote_types(dtype, torch.float32)
    kwargs: Arguments = {
        name: (torch.randn(size, D, generator=g, dtype=torch.float64) / max(D / 8, 1) ** 0.5).to(dtype).requires_grad_()
        for name, size in (("queries", Q), ("keys", K))
    }
    if P is not None:
        y = torch.randint(K, (Q, max(P, 1)), generator=g)
        y[torch.rand(y.shape, generator=g) < 0.3] = -1
        y[3:4], y[4:6], y[:1, :1] = -1, 0, K - 1  # none at all; one key for two queries, and several times for one
        kwargs["positives"] = y[:, 0] if P == 0 else y
    if masked is not None:
        mask = torch.rand(Q, K, generator=g) < (2 if masked == "all" else 0.6)
        kwargs["mask"] = mask.T.contiguous().T if masked == "transposed" else mask
    scale = choice["temperature"]
    if isinstance(scale, str):
        scale = torch.tensor(0.7, dtype=wide, requires_grad=scale == "trained")
    options = HeadOptions(**{name: choice[name] for name in ("workspace_mib", "gradient", "ignored_tokens")})
    return kwargs | {"temperature": scale, "symmetric": choice["symmetric"], "options": options}


def contrastive_oracle(
    queries: Tensor, keys: Tensor, positives: Tensor | None = None, *, temperature: Any = 1.0,
    mask: Tensor | None = None, symmetric: bool = False,
) -> Tensor:  # fmt: skip
    """The loss from all similarities, and the times that each key is a query's positive."""
    y = torch.arange(len(queries), device=queries.device) if positives is None else positives
    times = F.one_hot(y.view(len(queries), -1) + 1, len(keys) + 1).sum(1)[:, 1:]
    z = (queries @ keys.T).to(torch.promote_types(queries.dtype, torch.float32)) / temperature
    masked = torch.zeros_like(times, dtype=torch.bool) if mask is None else mask & (times == 0)

    def one_way(z: Tensor, times: Tensor, masked: Tensor) -> Tensor:
        nll = z.masked_fill(masked, -torch.inf).logsumexp(1, keepdim=True) - z
        some = times.sum(1) > 0
        return ((nll * times).sum(1)[some] / times.sum(1)[some]).mean()

    loss = one_way(z, times, masked)
    return (loss + one_way(z.T, times.T, masked.T)) / 2 if symmetric else loss


def on_a_head(own: Callable[..., Arguments]) -> Callable[[Arguments], Arguments]:
    """Return what draws hidden states, weight and bias, and with them a function's own arguments."""

    def draw(choice: Arguments) -> Arguments:
        size = (choice[name] for name in ("leading", "D", "V"))
        x, w, b, y = head(*size, dtype=choice["dtype"], seed=choice["seed"], bias=choice["linear_bias"])
        common = {"input": x, "linear_weight": w, "linear_bias": b, "softcap": choice["softcap"]}
        options = HeadOptions(**{name: choice[name] for name in LAYOUT[1:]})
        return common | own(choice, x, w, y, choice["g"]) | {"options": options}

    return draw


OF_HEADS: Arguments = {
    "sizes": {"D": 9, "V": 23},
    "large": {"D": 40, "V": 211},
    "instead": r"(linear|cross_entropy\(|fn\()",
    "cast": ("input", "linear_weight", "teacher_input", "teacher_weight"),
    "saved": ("linear_weight", "teacher_weight", "weights", "temperature"),
}
FUNCTIONS = {
    "linear_cross_entropy": Function(
        name="linear_cross_entropy",
        run=linear_cross_entropy,
        truth=oracle,
        draw=on_a_head(of_cross_entropy),
        options=TARGETS | {
            "weight": [False, True],
            "label_smoothing": [0.0, 0.1, 1.0],
            "z_loss": [0.0, 1e-2],
            "token_weight": [False, True],
            "num_items": [None, 7, 2.5, "tensor"],
            "shift": [False, True],
            "reduction": ["mean", "sum", "none"],
            "ignored_tokens": ["auto", "compute", "skip", "drop"],
        },
        busy={"weight": True, "label_smoothing": 0.1, "z_loss": 0.1, "token_weight": True, "shift": True,
              "softcap": 3.0, "logit_scale": "trained"},
        **OF_HEADS,
        tolerance=near(1e-13, 5e-6, 8e-3, 8e-4),
    ),
    "linear_logprobs": Function(
        name="linear_logprobs",
        run=linear_logprobs,
        truth=lambda **kwargs: stats_oracle(**kwargs)["logprob"],
        draw=on_a_head(of_statistics),
        options=TARGETS | {"targets": [1, 3]},
        busy={"softcap": 3.0, "logit_scale": "trained"},
        **OF_HEADS,
        tolerance=near(1e-12, 1e-5),
    ),
    "linear_token_stats": Function(
        name="linear_token_stats",
        run=linear_token_stats,
        truth=statistics_oracle,
        draw=on_a_head(of_statistics),
        options=TARGETS | {"targets": [1, None, 3, 40], "want": [WANTS]},
        busy={"softcap": 3.0, "logit_scale": "trained"},
        **OF_HEADS,
        tolerance=near(1e-12, 1e-5),
    ),
    "linear_divergence": Function(
        name="linear_divergence",
        run=linear_divergence,
        truth=divergence_oracle,
        draw=on_a_head(of_divergence),
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
        **OF_HEADS,
        tolerance=near(1e-11, 2e-5),
        rounding=200,
        plan=plan_divergence,
    ),
    "linear_apply": Function(
        name="linear_apply",
        run=applied,
        truth=apply_oracle,
        draw=on_a_head(of_apply),
        options=TARGETS | {
            "ignored": ["none", "some", "all but one", "all"],
            "leading": [(2, 7), (), (1,), (13,), (2, 1, 5), (0,), (3, 0)],
            "out": ["token", "sum", "sums", "token, in place"],
            "args": ["trained", "fixed", "strided"],
        },
        busy={"softcap": 3.0, "logit_scale": "trained"},
        **OF_HEADS,
        tolerance=near(1e-12, 1e-5, times=3),
    ),
    "linear_contrastive": Function(
        name="linear_contrastive",
        run=linear_contrastive,
        truth=contrastive_oracle,
        draw=of_contrastive,
        options={
            "leading": [(21,), (5,), (1,)],
            "more_keys": [0, 19],
            "P": [None, 0, 1, 3],
            "temperature": [1.0, 0.3, "tensor", "trained"],
            "mask": [None, "some", "all", "transposed"],
            "symmetric": [False, True],
            "workspace_mib": [None, 2e-3],
            "gradient": ["auto", "recompute"],
            "ignored_tokens": ["auto", "compute"],
            "reduction": ["mean"],  # there is no other
        },
        sizes={"D": 8},
        large={"D": 64},
        busy={"temperature": "trained", "P": 0, "mask": "some"},
        tolerance=near(1e-12, 2e-6, times=3),
        instead=r"(queries @ keys\.T|linear\()",
        cast=("queries", "keys"),
        saved=("queries", "keys"),
        rounding=50,
    ),
}  # fmt: skip


def arguments(
    name: str, dtype: torch.dtype = torch.float64, seed: int = 0, D: int = 9, V: int = 23, **choice: Any
) -> Arguments:
    """Return random arguments of a function by its name."""
    return FUNCTIONS[name].arguments(dtype, seed, D=D, V=V, **choice)


def mode(name: str, choice: Arguments | None = None, **when: bool) -> Mode:
    return Mode(FUNCTIONS[name], choice or {}, **when)


MODES = {
    "mean": mode("linear_cross_entropy", stored=True),
    "mean-recomputed": mode("linear_cross_entropy", {"gradient": "recompute"}),
    "each": mode("linear_cross_entropy", {"reduction": "none"}, stored_where_frozen=True),
    "logprobs": mode("linear_logprobs", stored_where_frozen=True),
    "logprobs-of-several": mode("linear_logprobs", {"targets": 3}),
    "statistics": mode("linear_token_stats", {"want": WANTS, "targets": 3}),
    "sets": mode("linear_token_stats", {"want": OF_SETS, "targets": 3, "support": 4}),
    "forward_kl": mode("linear_divergence", {"teacher_lacks": 3}),
    "reverse_kl-mean": mode("linear_divergence", {"kind": ("reverse_kl", 0.5), "reduction": "mean"}, stored=True),
    "jsd": mode("linear_divergence", {"kind": ("jsd", 0.3)}),
    "jsd-sum": mode("linear_divergence", {"kind": ("jsd", 0.3), "reduction": "sum"}, stored=True),
    "tv": mode("linear_divergence", {"kind": ("tv", 0.5)}),
    "top-k": mode("linear_divergence", {"kind": ("jsd", 0.3), "tail": "bucket"}),
    "top-k-mean": mode("linear_divergence", {"tail": "drop", "reduction": "mean"}, stored=True),
    "apply": mode("linear_apply"),
    "apply-sum": mode("linear_apply", {"out": "sum"}, stored=True),
    "apply-sum-recomputed": mode("linear_apply", {"out": "sum", "gradient": "recompute", "workspace_mib": 1e-6}),
}
CONTRASTIVE = {
    "contrastive": mode("linear_contrastive", stored=True),
    "contrastive-of-several": mode("linear_contrastive", {"P": 3, "symmetric": True, "mask": "some"}),
}


def counting(kwargs: Arguments) -> Tensor:
    """Return which tokens are not ignored: bool [...]."""
    leading = kwargs["input"].shape[:-1]
    if "mask" in kwargs:
        everything = torch.ones(leading, dtype=torch.bool, device=kwargs["input"].device)
        return everything if kwargs["mask"] is None else kwargs["mask"]
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
