"""The losses of `lowtide.losses` as random argument sets, and what they mean in plain PyTorch, from their papers.

A reference casts each tensor once, to float32 at least, and computes there: that is what every loss promises.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from fuzz.cases import LAYOUTS, WAYS, Case, Program, Writer, call

HELD = 80.0  # where log-ratios are held


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


def reduced(values, mask, reduction="token", num_items=None):
    values = values.where(mask, 0)
    n = mask.sum(-1)
    if reduction == "none":
        return (values,)
    if reduction == "sum":
        return (values.sum(),)
    if reduction == "token":
        return (values.sum() / (n.sum().clamp(min=1) if num_items is None else num_items),)
    each = values.sum(-1)
    if reduction == "sequence":
        each = each / n.clamp(min=1)
    return (each.sum() / (max(each.numel(), 1) if num_items is None else num_items),)


def k_estimate(logprob, ref, kind):
    d = ref.detach() - logprob
    if kind == "k1":
        return -d
    return d**2 / 2 if kind == "k2" else torch.expm1(d.clamp(max=HELD)) - d


def token_loss(
    loss, logprob, mask, other=None, ref=None, entropy=None, correction=None, advantage=None, mean_logit=None, lse=None,
    reduction="token", num_items=None, beta=None, kl="k3", entropy_coef=None, gamma=2.0, label_smoothing=0.1, coef=1e-4,
    temperature=1.0, clip_low=0.2, clip_high=0.2, ratio_max=None, ratio_min=0.0, max_length=9, tau_positive=1.0,
    tau_negative=1.05, token_level=False, kind="k2",
):  # fmt: skip
    """One value a token, 0 where masked, reduced; tensors where masked may hold anything."""

    def clean(x):
        return None if x is None else wide(x).where(mask, 0)

    logprob, other, ref = clean(logprob), clean(other), clean(ref)
    terms = (reduction, num_items)
    if loss == "reduce_tokens":
        return reduced(logprob, mask, *terms)
    if loss == "sft_loss":
        return reduced(-logprob, mask, *terms)
    if loss == "dft_loss":
        return reduced(-logprob.exp().detach() * logprob, mask, *terms)
    if loss == "focal_loss":
        tiny = torch.finfo(logprob.dtype).tiny
        return reduced(-((-torch.expm1(logprob)).clamp(min=tiny) ** gamma) * logprob, mask, *terms)
    if loss == "label_smoothed_loss":
        smooth = clean(lse) - clean(mean_logit)
        return reduced((label_smoothing - 1) * logprob + label_smoothing * smooth, mask, *terms)
    if loss == "z_loss":
        return reduced(coef * logprob**2, mask, *terms)
    if loss == "gkd_loss":
        return reduced(temperature**2 * logprob, mask, *terms)
    if loss == "sampled_distillation_loss":
        return reduced(k_estimate(logprob, other, kind), mask, *terms)
    if advantage is not None:
        a = wide(advantage).detach()
        a = (a[..., None].expand(mask.shape) if a.dim() < mask.dim() else a).where(mask, 0)
    if loss == "policy_loss":
        value = other
    elif loss == "reinforce_loss":
        value = -a * logprob
    else:
        d = logprob - other.detach()
        n = mask.sum(-1, keepdim=True).clamp(min=1)
        if loss == "gspo_loss":
            mean = d.sum(-1, keepdim=True) / n
            ratio = mean.clamp(max=HELD).exp().expand(d.shape)
            if token_level:
                ratio = ratio.detach() * (logprob - logprob.detach()).exp()
        else:
            ratio = d.clamp(max=HELD).exp()
        if loss == "cispo_loss":
            value = -ratio.detach().clamp(ratio_min, ratio_max or 5.0) * a * logprob
        elif loss == "sapo_loss":
            tau = torch.where(a > 0, a.new_tensor(tau_positive), a.new_tensor(tau_negative))
            value = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * a
        else:
            first = ratio if ratio_max is None else ratio.clamp(max=ratio_max)
            value = -torch.minimum(first * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)
    if correction is not None:
        value = value * clean(correction).detach()
    if ref is not None:
        value = value + beta * k_estimate(logprob, ref, kl)
    if entropy is not None:
        value = value - entropy_coef * clean(entropy)
    result = reduced(value, mask, *terms)
    return tuple(r / max_length for r in result) if loss == "dr_grpo_loss" else result


def pair_loss(
    loss, chosen, rejected, ref_chosen=None, ref_rejected=None, kind="sigmoid", beta=0.1, label_smoothing=0.0,
    divergence="reverse_kl", alpha=0.5, tau=0.05, chosen_length=None, rejected_length=None, gamma=1.0, nll=None,
    desirable=None, kl=0.0, desirable_weight=1.0, undesirable_weight=1.0, reduction="mean", num_items=None,
):  # fmt: skip
    """One value a pair (for KTO an answer), reduced."""
    chosen, rejected = wide(chosen), wide(rejected)
    e, ls = label_smoothing, F.logsigmoid

    def smoothed(m):
        return -(1 - e) * ls(m) - e * ls(-m)

    if loss == "simpo_loss":
        value = smoothed(beta * (chosen - rejected) - gamma)
    elif loss == "cpo_loss":
        value = smoothed(beta * (chosen - rejected)) + (0 if nll is None else wide(nll))
    elif loss == "orpo_loss":

        def odds(x):
            x = x.clamp(max=-(torch.finfo(x.dtype).tiny ** 0.5))
            return x - torch.log(-torch.expm1(x))

        value = (-chosen if nll is None else wide(nll)) - beta * ls(odds(chosen) - odds(rejected))
    elif loss == "kto_loss":
        gain = beta * (chosen - rejected.detach() - kl)
        value = torch.where(
            desirable, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain)
        )
    else:
        ra, rb = wide(ref_chosen).detach(), wide(ref_rejected).detach()
        a, b = chosen - ra, rejected - rb

        def score(x):
            if divergence == "forward_kl":
                return -torch.expm1((-x).clamp(max=HELD))
            if divergence == "js":
                return math.log(2) + ls(x)
            if divergence == "alpha" and alpha != 1:
                return torch.expm1(((alpha - 1) * x).clamp(max=HELD)) / (alpha - 1)
            return x

        m = beta * (score(a) - score(b))
        if kind in ("ipo", "sigmoid_norm"):
            per_token = score(a) / wide(chosen_length.float()).clamp(min=1) - score(b) / rejected_length.float().clamp(
                min=1
            )
        if kind == "sigmoid":
            value = smoothed(m)
        elif kind == "robust":
            value = (-(1 - e) * ls(m) + e * ls(-m)) / (1 - 2 * e)
        elif kind == "hinge":
            value = (1 - m).clamp(min=0)
        elif kind == "ipo":
            value = (per_token - 1 / (2 * beta)) ** 2
        elif kind == "sigmoid_norm":
            value = -ls(beta * per_token)
        elif kind == "exo_pair":
            value = m.sigmoid() * (ls(m) - math.log1p(-e)) + (-m).sigmoid() * (ls(-m) - math.log(e))
        elif kind == "nca_pair":
            value = -ls(beta * a) - (ls(-beta * a) + ls(-beta * b)) / 2
        elif kind == "bco_pair":
            value = -ls(beta * a) - ls(-beta * b)
        elif kind == "sppo_hard":
            value = (a - 1 / (2 * beta)) ** 2 + (b + 1 / (2 * beta)) ** 2
        elif kind == "apo_zero":
            value = torch.sigmoid(-beta * a) + torch.sigmoid(beta * b)
        elif kind == "apo_down":
            value = torch.sigmoid(beta * a) + torch.sigmoid(-beta * (a - b))
        elif kind == "discopop":
            value = -torch.sigmoid(-m / tau) * ls(m) + (ls(m / tau) - m).exp()
        else:
            x, y = (chosen - rejected, ra - rb) if kind == "aot" else (a, b)
            value = smoothed(beta * (x.flatten().sort().values - y.flatten().sort().values)).view(x.shape)
    if reduction == "none":
        return (value,)
    return (
        value.sum()
        if reduction == "sum"
        else value.sum() / (max(value.numel(), 1) if num_items is None else num_items),
    )


POLICY = [
    "ppo_loss",
    "grpo_loss",
    "dr_grpo_loss",
    "bnpo_loss",
    "dapo_loss",
    "gspo_loss",
    "cispo_loss",
    "sapo_loss",
    "reinforce_loss",
]
ALONE = ["sft_loss", "dft_loss", "focal_loss", "label_smoothed_loss", "z_loss", "gkd_loss", "sampled_distillation_loss"]


def draw_tokens(w: Writer, case: Case, name: str, text: str, trained: str = "") -> None:
    """Write a tensor of tokens, which holds anything where it is masked."""
    w.value(name, text)
    if case["poison"] and case["mask"] != "none":
        w.line(f"{name} = {name}.masked_fill(~mask, math.{case['poison']})")
    w.done(name, trained, "contiguous" if name != "logprob" else case["layout"])


def tokens(case: Case) -> Program:
    w, loss, shape = Writer(case), case["loss"], tuple(case["shape"])
    kept = {"none": 2, "some": 0.6, "all": -1}[case["mask"]]
    w.value("mask", f"torch.rand({shape}, generator=g) < {kept}")
    if case["mask"] == "some" and shape and shape[0] > 1:
        w.line("mask[0] = False")
    normal = f"torch.randn({shape}, generator=g, dtype=torch.float64)"
    base = f"{normal}.abs()" if loss in ("z_loss", "gkd_loss") else f"-({normal}.abs() + 1e-3)"
    draw_tokens(w, case, "logprob", f"{base} * {case['spread']}", "all input")
    mine: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    both: dict[str, Any] = {"reduction": repr(case["reduction"])}
    args = ["logprob"]
    if loss in POLICY:
        if loss != "reinforce_loss":
            draw_tokens(w, case, "other", f"logprob.detach().double() + {case['spread']} * {normal}")
            args.append("other")
            theirs["other"] = "other"
        per_token = case["per_token"] and (loss != "gspo_loss" or case["token_level"])
        a = shape if per_token else shape[:-1]
        w.value("advantage", f"torch.randn({a}, generator=g, dtype=torch.float64).to(torch.{w.dtype})")
        args.append("advantage")
        theirs["advantage"] = "advantage"
        if case["kl"]:
            draw_tokens(w, case, "ref", f"logprob.detach().double() + 0.3 * {normal}")
            mine["ref_logprob"], theirs["ref"], both["beta"], both["kl"] = "ref", "ref", case["beta"], repr(case["kl"])
        if case["entropy"]:
            draw_tokens(w, case, "entropy", f"{normal}.abs()", "all")
            both["entropy"], both["entropy_coef"] = "entropy", 0.3
        if case["correction"]:
            draw_tokens(w, case, "correction", f"{normal}.abs()")
            both["correction"] = "correction"
        if loss in ("ppo_loss", "grpo_loss", "dr_grpo_loss", "bnpo_loss", "dapo_loss", "gspo_loss"):
            both["clip_low"], both["clip_high"] = 0.2, 0.28
            if loss != "gspo_loss":
                both["ratio_max"] = case["ratio_max"]
        if loss == "dr_grpo_loss":
            both["max_length"] = 7
        if loss == "gspo_loss":
            both["token_level"] = case["token_level"]
        if loss == "sapo_loss":
            both["tau_positive"], both["tau_negative"] = 0.9, 1.3
        if loss == "cispo_loss":
            both["ratio_min"], both["ratio_max"] = 0.3, 3.0
    elif loss == "label_smoothed_loss":
        draw_tokens(w, case, "mean_logit", normal, "all")
        draw_tokens(w, case, "lse", f"{normal} + 5", "all")
        args += ["mean_logit", "lse"]
        theirs |= {"mean_logit": "mean_logit", "lse": "lse"}
        both["label_smoothing"] = case["number"] / 4
    elif loss == "sampled_distillation_loss":
        draw_tokens(w, case, "other", f"logprob.detach().double() + {case['spread']} * {normal}")
        args.append("other")
        theirs["other"] = "other"
        both["kind"] = repr(case["kl"] if case["kl"] in ("k2", "k3") else "k2")
    else:
        both |= {
            "focal_loss": {"gamma": case["number"]},
            "z_loss": {"coef": case["number"]},
            "gkd_loss": {"temperature": case["number"]},
        }.get(loss, {})
    if case["num_items"] is not None and case["reduction"] not in ("none", "sum"):
        both["num_items"] = "torch.tensor(5)" if case["num_items"] == "tensor" else case["num_items"]
    ours = f"(lowtide.losses.{loss}({', '.join(args)}, mask, {call(**mine, **both)}),)"
    reference = f"token_loss({loss!r}, logprob, mask, {call(**theirs, **both)})"
    return Program(w.lines, w.names, ours, reference)


def pairs(case: Case) -> Program:
    w, loss, shape = Writer(case), case["loss"], tuple(case["shape"])
    normal, spread = f"torch.randn({shape}, generator=g, dtype=torch.float64)", case["spread"]
    for name, trained in (("chosen", "all input"), ("rejected", "all")):
        w.value(name, f"-({normal}.abs() + 1e-3) * {spread}", trained, case["layout"])
    both: dict[str, Any] = {"reduction": repr(case["reduction"]), "beta": case["beta"]}
    mine: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    args = ["chosen", "rejected"]
    if case["num_items"] is not None and case["reduction"] == "mean":
        both["num_items"] = "torch.tensor(5)" if case["num_items"] == "tensor" else case["num_items"]
    if loss == "dpo_loss":
        kind = case["kind"]
        for name, of in (("ref_chosen", "chosen"), ("ref_rejected", "rejected")):
            w.value(name, f"{of}.detach().double() + {spread} * {normal}", "")
            args.append(name)
        both["kind"] = repr(kind)
        if kind in ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"):
            both["label_smoothing"] = case["label_smoothing"] or (0.01 if kind == "exo_pair" else 0.0)
        if kind in ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "exo_pair", "discopop"):
            both["divergence"] = repr(case["divergence"])
            both["alpha"] = case["alpha"]
        if kind in ("ipo", "sigmoid_norm"):
            for name in ("chosen_length", "rejected_length"):
                w.value(name, f"torch.randint(0, 9, {shape}, generator=g)")
                both[name] = name
    elif loss == "kto_loss":
        w.value("desirable", f"torch.rand({shape}, generator=g) < 0.5")
        args += ["desirable", "0.3"]
        w.line("rejected = rejected.detach()")
        theirs |= {"desirable": "desirable", "kl": 0.3}
        both |= {"desirable_weight": 1.2, "undesirable_weight": 0.7}
    else:
        if case["nll"] and loss != "simpo_loss":
            one = "torch.randn((), generator=g, dtype=torch.float64)"
            w.value("nll", f"{normal if case['nll'] == 'each' else one}.abs()", "all")
            mine["chosen_nll"], theirs["nll"] = "nll", "nll"
        elif loss == "cpo_loss":
            mine["chosen_nll"] = "None"
        if loss != "orpo_loss":
            both["label_smoothing"] = case["label_smoothing"]
        if loss == "simpo_loss":
            both["gamma"] = 0.6
    ours = f"(lowtide.losses.{loss}({', '.join(args)}, {call(**mine, **both)}),)"
    refs = [] if loss != "dpo_loss" else args[2:]
    reference = f"pair_loss({loss!r}, {', '.join(['chosen', 'rejected', *refs])}, {call(**theirs, **both)})"
    return Program(w.lines, w.names, ours, reference)


COMMON: dict[str, list[Any]] = {
    "dtype": ["float64", "float32", "bfloat16", "float16"],
    "layout": LAYOUTS[:5],
    "trained": ["all", "input", "nothing"],
    "way": WAYS,
    "upstream": ["one", "random", "0", 2.0**-14, 2.0**16],
    "num_items": [None, 7, 2.5, "tensor"],
}
TOKENS = COMMON | {
    "loss": [*ALONE, *POLICY],
    "shape": [(2, 3), (1, 1), (3, 7), (0, 4), (3, 0), (2, 2, 3), (5,)],
    "spread": [0.3, 3.0, 40.0],
    "mask": ["none", "some", "all"],
    "poison": [None, "nan", "inf"],
    "reduction": ["token", "sequence", "sequence_sum", "sum", "none"],
    "per_token": [False, True],
    "kl": [None, "k1", "k2", "k3"],
    "beta": [0.04, 2.0],
    "entropy": [False, True],
    "correction": [False, True],
    "ratio_max": [None, 2.0],
    "token_level": [False, True],
    "number": [2.0, 0.5, 1.0, 0.0001],
}
PAIRS = COMMON | {
    "loss": ["dpo_loss", "simpo_loss", "cpo_loss", "orpo_loss", "kto_loss"],
    "shape": [(3,), (1,), (), (0,), (2, 3)],
    "spread": [1.0, 10.0, 200.0],
    "kind": [
        "sigmoid",
        "robust",
        "hinge",
        "ipo",
        "sigmoid_norm",
        "exo_pair",
        "nca_pair",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "discopop",
        "aot",
        "aot_unpaired",
    ],
    "beta": [0.1, 2.0],
    "label_smoothing": [0.0, 0.1],
    "divergence": ["reverse_kl", "forward_kl", "js", "alpha"],
    "alpha": [0.5, 1.0, 2.0],
    "nll": [None, "each", "one"],
    "reduction": ["mean", "sum", "none"],
}
