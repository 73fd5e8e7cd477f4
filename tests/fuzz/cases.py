"""The random argument sets: for each function a table of options, and the program that a choice of them makes.

A case is a plain dict: a seed and one value for each option. The first value of each is the simplest, which is where
`machine.shrink` goes. `program_of` writes the case as Python, and the machine runs just what it wrote.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Case = dict[str, Any]

DTYPES = ["float64", "float32", "bfloat16", "float16", "autocast bfloat16", "autocast float16"]
LAYOUTS = ["contiguous", "transposed", "padded", "strided", "offset", "expanded"]
WAYS = ["once", "twice", "checkpoint", "subset", "two uses", "hooks", "no_grad", "reentrant"]
LEADING = [(3,), (), (1,), (0,), (2, 3), (7,), (2, 1, 4), (3, 0), (13,), (1, 1)]
UPSTREAM = [
    "one",
    "random",
    "some 0",
    "0",
    2.0**-14,
    2.0**-7,
    2.0**8,
    2.0**16,
    -1.0,
    "nan where ignored",
    "inf where ignored",
]


@dataclass
class Program:
    """A case as code: `setup` makes the tensors named in `tensors`, and both expressions return tuples of them."""

    setup: list[str]
    tensors: list[str]
    ours: str
    reference: str
    autocast: str | None = None
    checks: list[str] = field(default_factory=list)  # expressions of (t, got, notes) that have to hold


class Writer:
    """Collects the lines of a program; each tensor is drawn in float64 and then brought to its dtype and layout."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.lines = [f"g = torch.Generator().manual_seed({case['seed']})"]
        self.names: list[str] = []
        kind = case.get("dtype", "float32")
        self.autocast = kind.removeprefix("autocast ") if kind.startswith("autocast") else None
        self.dtype = "float32" if self.autocast else kind

    def line(self, text: str) -> None:
        self.lines.append(text)

    def value(self, name: str, text: str, trained: str | None = None, layout: str = "contiguous") -> None:
        """Write a tensor; with ``trained`` it is `done`."""
        self.line(f"{name} = {text}")
        self.names.append(name)
        if trained is not None:
            self.done(name, trained, layout)

    def leaf(self, name: str, shape: tuple[int, ...], scale: str = "1.0", *done: str) -> None:
        self.value(name, f"{scale} * torch.randn({shape}, generator=g, dtype=torch.float64)", *done)

    def done(self, name: str, trained: str, layout: str = "contiguous") -> None:
        """Bring a leaf to its dtype and layout; it needs a gradient where the case's ``trained`` is a word of this."""
        laid = {
            "contiguous": name,
            "transposed": f"{name}.mT.contiguous().mT" if "bias" not in name else name,
            "padded": f"F.pad({name}, (0, 3))[..., :-3]",
            "strided": f"torch.stack(({name}, {name}), -1)[..., 0]",
            "offset": f"F.pad({name}.flatten(), (1, 0))[1:].view({name}.shape)",
            "expanded": f"{name}.flatten()[:1].expand({name}.shape) if {name}.numel() else {name}",
        }[layout]
        self.line(f"{name} = {name}.to(torch.{self.dtype})")
        if layout != "contiguous":
            laid = f"{laid} if {name}.dim() > {int(layout == 'transposed')} else {name}"
            self.line(f"{name} = ({laid}).detach()")
        if self.case["trained"] in trained.split():
            self.line(f"{name}.requires_grad_()")


def call(*args: str, **kwargs: Any) -> str:
    """Return arguments as text; strings stand for expressions, None is left out."""
    words = [*args, *(f"{k}={v}" for k, v in kwargs.items() if v is not None)]
    return ", ".join(words)


def options_text(case: Case) -> str | None:
    given = {
        k: case[k] for k in ("workspace_mib", "accumulate", "backend", "gradient") if case.get(k) not in (None, "auto")
    }
    return f"lowtide.HeadOptions({', '.join(f'{k}={v!r}' for k, v in given.items())})" if given else None


def of_head(w: Writer, function: str, reference: str, *args: str, **given: Any) -> Program:
    """Return the program of a function that gives one tensor."""
    words = call(*args, **given)
    ours = f"(lowtide.{function}({call(words, options=options_text(w.case))}),)"
    return Program(w.lines, w.names, ours, f"{reference}({words})", w.autocast)


OF_INPUT, OF_WEIGHT, OF_BIAS = "all input", "all head weight", "all head bias"  # what is trained, and them with it
HEAD: dict[str, list[Any]] = {
    "leading": LEADING,
    "D": [4, 16, 1, 33, 0],
    "V": [5, 2, 33, 130, 1],
    "dtype": DTYPES,
    "logits": ["usual", "confident", "wrong", "huge", "equal"],
    "gap": [40, 8, 12, 16, 82, 100],
    "linear_bias": [False, True],
    "ruled_out": ["none", "some"],
    "layout": LAYOUTS,
    "weight_layout": LAYOUTS[:5],
    "trained": ["all", "input", "head", "weight", "bias", "nothing"],
    "way": WAYS,
    "upstream": UPSTREAM,
    "softcap": [None, 3.0, 30.0],
    "logit_scale": [1.0, 0.5, "tensor", "trained", 7],
    "workspace_mib": [None, 1e-6, 2e-3, 0.02],
    "accumulate": ["auto", "float32", "input"],
    "gradient": ["auto", "recompute", "forward"],
    "backend": ["auto", "torch"],
}
TARGETS: dict[str, list[Any]] = {
    "ignored": ["none", "some", "all", "all but one"],
    "ignore_index": [-100, 1, 1000],
    "target_dtype": ["int64", "int32", "uint8"],
    "poison": [None, "nan", "inf"],
}


def write_head(case: Case, w: Writer, *, K: int | None = None) -> dict[str, str | None]:
    """Write hidden states, weight, bias, scale and targets; return the names of those that there are."""
    D, V, leading = case["D"], case["V"], tuple(case["leading"])
    w.leaf("input", (*leading, D))
    w.leaf("linear_weight", (V, D), "0.0" if case["logits"] == "equal" else f"{2 / max(D, 1) ** 0.5:.3g}")
    if case["linear_bias"]:
        w.leaf("linear_bias", (V,), "0.0" if case["logits"] == "equal" else "1.0")
        infinite = case.get("label_smoothing") or "mean_logit" in case.get("want", ())  # the value, whatever the scale
        ruled_out = case["ruled_out"] == "some" and V > 2 and not (infinite and case["logit_scale"] == "trained")
        if ruled_out:
            w.line("linear_bias[2] = -math.inf")
    if "ignored" in case:
        shape = leading if K is None else (*leading, K)
        highest = min(V, 128) if case["target_dtype"] == "uint8" else V
        ignore = case["ignore_index"] if case["target_dtype"] != "uint8" else 200
        w.value("target", f"torch.randint(0, {highest}, {shape}, generator=g)")
        if case["linear_bias"] and ruled_out:
            w.line("target[target == 2] = 0")
        if case["logits"] in ("confident", "wrong") and K is None and D > 0:
            sign = "" if case["logits"] == "confident" else "-"
            w.line("chosen = linear_weight[target]")
            w.line(
                f"input = input + {sign}{case['gap']} * chosen / chosen.square().sum(-1, keepdim=True).clamp(min=0.01)"
            )
        if case["ignored"] == "some":
            w.line(f"target[torch.rand({shape}, generator=g) < 0.4] = {ignore}")
        elif case["ignored"] == "all":
            w.line(f"target.fill_({ignore})")
        elif case["ignored"] == "all but one":
            w.line(f"target.view(-1)[1:] = {ignore}")
        w.line(f"target = target.to(torch.{case['target_dtype']})")
    if case["logits"] == "huge":
        w.line("input = 30 * input")
    if case.get("poison") and "ignored" in case and K is None:
        shifted = case.get("shift") and case["leading"]  # then a token's target is the next one
        rows = ("[..., :-1, :]", "[..., 1:]") if shifted else ("", "")
        poison = "nan" if case.get("softcap") else case["poison"]  # a cap makes numbers of infinity
        w.line(f"input{rows[0]}[target{rows[1]} == {ignore}] = math.{poison}")
    w.done("input", OF_INPUT, "padded" if case.get("poison") and case["layout"] == "expanded" else case["layout"])
    w.done("linear_weight", OF_WEIGHT, case["weight_layout"])
    if case["linear_bias"]:
        w.done("linear_bias", OF_BIAS)
    scale: str | None = f"{case['logit_scale']!r}" if case["logit_scale"] != 1.0 else None
    if case["logit_scale"] in ("tensor", "trained"):
        w.value("logit_scale", "torch.tensor(0.8)")
        if case["dtype"] == "float64":
            w.line("logit_scale = logit_scale.double()")
        if case["logit_scale"] == "trained":
            w.line("logit_scale.requires_grad_()")
        scale = "logit_scale"
    return {
        "linear_bias": "linear_bias" if case["linear_bias"] else None,
        "softcap": None if case["softcap"] is None else repr(case["softcap"]),
        "logit_scale": scale,
        "ignore_index": f"{ignore}" if "ignored" in case and ignore != -100 else None,
    }


def cross_entropy(case: Case) -> Program:
    w = Writer(case)
    given = write_head(case, w)
    leading, V = tuple(case["leading"]), case["V"]
    if case["weight"]:
        w.value("weight", f"torch.rand({V}, generator=g) + 0.1")
        if case["weight"] == "some 0":
            w.line("weight[0] = 0")
    if case["token_weight"]:
        w.value("token_weight", f"2 * torch.rand({leading}, generator=g)")
    mean = case["reduction"] == "mean"
    items = {"tensor": "num_items", "0": "num_items", None: None}.get(case["num_items"], repr(case["num_items"]))
    if mean and case["num_items"] in ("tensor", "0"):
        nothing_kept = case["ignored"] == "all" or 0 in leading
        w.value("num_items", "torch.tensor(0)" if case["num_items"] == "0" and nothing_kept else "torch.tensor(11)")
    given |= {
        "weight": "weight" if case["weight"] else None,
        "reduction": repr(case["reduction"]),
        "label_smoothing": case["label_smoothing"] or None,
        "z_loss": case["z_loss"] or None,
        "token_weight": "token_weight" if case["token_weight"] else None,
        "num_items": items if mean else None,
        "shift": True if case["shift"] and leading else None,
    }
    return of_head(w, "linear_cross_entropy", "cross_entropy", "input", "linear_weight", "target", **given)


def module(case: Case) -> Program:
    w = Writer(case)
    D, V, leading, of = case["D"], case["V"], tuple(case["leading"])[:1], tuple(case["out_features"])
    K = 1
    for size in of:
        K *= size
    case = {**case, "leading": leading}
    w.leaf("input", (*leading, D), "1.0", OF_INPUT, case["layout"])
    w.leaf("linear_weight", (V * K, D), f"{2 / max(D, 1) ** 0.5:.3g}", OF_WEIGHT)
    if case["linear_bias"]:
        w.leaf("linear_bias", (V * K,), "1.0", OF_BIAS)
    w.value("target", f"torch.randint(0, {V}, {(*leading, *of)}, generator=g)")
    ignore = case["ignore_index"]
    if case["ignored"] == "some":
        w.line(f"target[torch.rand(target.shape, generator=g) < 0.4] = {ignore}")
    elif case["ignored"] == "all":
        w.line(f"target.fill_({ignore})")
    if case["weight"]:
        w.value("weight", f"torch.rand({V}, generator=g) + 0.1")
    given = {
        "weight": "weight" if case["weight"] else None,
        "reduction": repr(case["reduction"]),
        "ignore_index": str(ignore),
        "label_smoothing": case["label_smoothing"] or None,
    }
    biased = case["linear_bias"]
    w.line(
        f"module = lowtide.nn.LinearCrossEntropyLoss({D}, {V}, {call(out_features=of, bias=biased, **given)},"
        f" dtype=torch.{w.dtype}, {call(options=options_text(case))})"
    )
    state = "{'linear.weight': linear_weight" + (", 'linear.bias': linear_bias" if case["linear_bias"] else "") + "}"
    ours = f"(torch.func.functional_call(module, {state}, (input, target)),)"
    bias = call(linear_bias="linear_bias" if case["linear_bias"] else None, **given)
    reference = f"several_outputs(input, linear_weight, target, {of}, {bias})"
    return Program(w.lines, w.names, ours, reference, w.autocast)


def logprobs(case: Case) -> Program:
    w = Writer(case)
    given = write_head(case, w, K=case["K"])
    return of_head(w, "linear_logprobs", "token_stats", "input", "linear_weight", "target", **given)


FLOATS = ("logprob", "entropy", "lse", "mean_logit", "sum_sq_prob")


def stats(case: Case) -> Program:
    w = Writer(case)
    with_target = not {"logprob", "is_top1"}.isdisjoint(case["want"])
    given = write_head(case if with_target else {k: v for k, v in case.items() if k not in TARGETS}, w, K=case["K"])
    dead = with_target and case["poison"] and case["K"] is None and case["D"] > 0
    if dead:
        w.value("dead", f"target == {given['ignore_index'] or -100}")
    topk = min(3, case["V"]) if case["topk"] else None
    floats = [name for name in case["want"] if name in FLOATS]
    args = call("input", "linear_weight", "target" if with_target else "None", **given)
    options = call(want=tuple(case["want"]), topk=topk, options=options_text(case))
    fields = "".join(f"s.{name}, " for name in floats) + ("s.topk.values, " if topk else "")
    others = [name for name in case["want"] if name not in FLOATS]
    fields += "".join(f"s.{name}, " for name in others) + ("s.topk.ids, " if topk else "")
    ours = f"(lambda s: ({fields}))(lowtide.linear_token_stats({args}, {options}))"
    names = (*floats, "topk") if topk else tuple(floats)
    reference = f"token_stats({args}, {call(want=names, topk=topk, dead='dead' if dead else None)})"
    checks = []
    first = len(names)
    for i, name in enumerate(others):
        if name == "argmax":
            checks.append(f"highest(notes, t, got[{first + i}][..., None], 1)")
        else:
            checks.append(f"got[{first + i}].dtype == torch.bool and got[{first + i}].shape == t['target'].shape")
    if topk:
        checks.append(f"highest(notes, t, got[{first + len(others)}], {topk})")
    return Program(w.lines, w.names, ours, reference, w.autocast, checks)


def divergence(case: Case) -> Program:
    w = Writer(case)
    case = {**case, "logit_scale": 1.0, "ruled_out": "none"}
    given = write_head(case, w)
    given.pop("logit_scale")
    given.pop("ignore_index")
    leading, V = tuple(case["leading"]), case["V"]
    if case["mask"] != "none":
        w.value("mask", f"torch.rand({leading}, generator=g) < {0.6 if case['mask'] == 'some' else -1}")
        given["mask"] = "mask"
    teacher = ["None", "None"]
    if case["teacher"].startswith("topk"):
        K = min(3, V)
        w.line(f"whole = torch.randn({(*leading, V)}, generator=g, dtype=torch.float64).log_softmax(-1)")
        w.value("ids", f"whole.topk({K}, -1).indices")
        w.value("logprobs", "whole.gather(-1, ids)")
        if case["dtype"] != "float64":
            w.line("logprobs = logprobs.float()")
        given["teacher_topk"] = f"(ids, logprobs, {case['teacher'].split()[1]!r})"
    else:
        teacher = ["teacher_input", "teacher_weight"]
        D2, V2 = case["D"] + 2, V + 3 if case["teacher"] == "larger" else V
        w.leaf("teacher_input", (*leading, D2), "1.0", "", case["layout"])
        w.leaf("teacher_weight", (V2, D2), f"{2 / D2**0.5:.3g}", "")
        w.line(f"teacher_weight.requires_grad_({case['seed'] % 2 == 0})  # no gradient goes to a teacher")
        if case["teacher"] == "bias":
            w.leaf("teacher_bias", (V2,), "1.0", "")
            given["teacher_bias"] = "teacher_bias"
        if case["softcap"] and case["teacher"] == "same":
            given["teacher_softcap"] = "5.0"
    if case["poison"] and case["mask"] != "none":
        w.lines = [line for line in w.lines if line != "input.requires_grad_()"]
        w.line("input = input.clone()")
        w.line(f"input[~mask] = math.{case['poison']}")
        if case["trained"] in ("all", "input"):
            w.line("input.requires_grad_()")
    if case["temperature"] == "tensor":
        w.value("temperature", "torch.tensor(1.7)")
    mean = case["reduction"] == "mean"
    given |= {
        "kind": repr(case["kind"]),
        "beta": case["beta"] if case["kind"] == "jsd" else None,
        "temperature": {"tensor": "temperature", 1: None}.get(case["temperature"], repr(case["temperature"])),
        "reduction": repr(case["reduction"]),
        "num_items": case["num_items"] if mean else None,
    }
    return of_head(w, "linear_divergence", "divergence", "input", "linear_weight", *teacher, **given)


FUNCTIONS = {
    "entropy": ("lambda z: torch.special.entr(z.softmax(-1)).sum(-1)", 0, ()),
    "nll": ("lambda z, y: z.logsumexp(-1) - z.gather(-1, y[:, None])[:, 0]", 1, ()),
    "margin": ("lambda z, a, p: (a[:, None] * z * p).softmax(-1).square()", 2, ("p",)),
    "in place": ("lambda z: z.clone().mul_(2).logsumexp(-1)", 0, ()),
    "several axes": ("lambda z: torch.stack((z.logsumexp(-1), z.mean(-1)), -1)", 0, ()),
}


def apply(case: Case) -> Program:
    w = Writer(case)
    case = {**case, "ruled_out": "none"}
    given = write_head(case, w)
    given.pop("ignore_index")
    leading, V = tuple(case["leading"]), case["V"]
    fn, kind, params = FUNCTIONS[case["fn"]]
    tokens = []
    if kind == 1:
        w.value("y", f"torch.randint(0, {V}, {leading}, generator=g)")
        tokens = ["y"]
    elif kind == 2:
        number = "float64" if case["dtype"] == "float64" else "float32"
        for name, shape in (("a", leading), ("p", V)):
            drawn = f"torch.rand({shape}, generator=g).to(torch.{number})"
            w.value(name, f"{drawn}.requires_grad_({case['trained'] == 'all'})")
        tokens = ["a"]
    if case["mask"] != "none":
        w.value("mask", f"torch.rand({leading}, generator=g) < {0.6 if case['mask'] == 'some' else -1}")
        given["mask"] = "mask"
    given["params"] = "(p,)" if params else None
    w.line(f"fn = {fn}")
    args = call("input", "linear_weight", *tokens, **given)
    extra = call(options=options_text(case))
    if case["out"] == "sum":
        names = ", ".join(("z", *("y", "a", "p")[kind - 1 : kind and kind + (kind == 2)]))
        w.line(f"summed = lambda {names}: fn({names}).sum()")
        ours = f"(lowtide.linear_apply(summed, {args}, out='sum'{', ' if extra else ''}{extra}),)"
        return Program(w.lines, w.names, ours, f"(apply(fn, {args})[0].sum(),)", w.autocast)
    ours = f"(lowtide.linear_apply(fn, {args}{', ' if extra else ''}{extra}),)"
    return Program(w.lines, w.names, ours, f"apply(fn, {args})", w.autocast)


def swiglu(case: Case) -> Program:
    w = Writer(case)
    D, F_, leading = case["D"], case["F"], tuple(case["leading"])
    w.leaf("input", (*leading, D), "30.0" if case["logits"] == "huge" else "1.0", OF_INPUT, case["layout"])
    for name, shape in (("gate_weight", (F_, D)), ("up_weight", (F_, D)), ("down_weight", (D, F_))):
        trained = OF_WEIGHT if name != "up_weight" else "all head"
        w.leaf(name, shape, f"{1 / max(shape[1], 1) ** 0.5:.3g}", trained, case["weight_layout"])
    biases = {"gate_bias": F_, "up_bias": F_, "down_bias": D} if case["linear_bias"] else {}
    for name, size in biases.items():
        w.leaf(name, (size,), "1.0", OF_BIAS)
    weights = ("gate_weight", "up_weight", "down_weight")
    args = call("input", *weights, **{n: n for n in biases}, activation=repr(case["activation"]))
    # a tile's part of a gradient may pass fp16's range
    tile = None if "float16" in case["dtype"] and case["logits"] == "huge" else case["tile_tokens"]
    ours = f"(lowtide.swiglu_mlp({args}, {call(checkpoint_level=case['level'], tile_tokens=tile)}),)"
    return Program(w.lines, w.names, ours, f"swiglu({args})", w.autocast)


def rms_norm(case: Case) -> Program:
    w = Writer(case)
    D, leading = max(case["D"], 1), tuple(case["leading"])
    scale = {"huge": "100.0", "equal": "0.0"}.get(case["logits"], "1.0")
    w.leaf("input", (*leading, D), scale, OF_INPUT, case["layout"])
    given: dict[str, Any] = {"eps": "1e-6" if case["seed"] % 3 else "0.1"}
    if case["trained"] != "nothing" or case["seed"] % 2:
        w.leaf("weight", (D,), "1.0", OF_WEIGHT)
        if case["weight_dtype"] == "float32" and w.dtype != "float64":
            w.line(f"weight = weight.detach().float().requires_grad_({case['trained'] in OF_WEIGHT.split()})")
    weight = "weight" if "weight" in w.names else "None"
    given |= {"offset": case["offset"] or None, "rounding": repr(case["rounding"])}
    if case["residual"]:
        w.leaf("residual", (*leading, D), "1.0", "all")
        args = call(**given)
        ours = f"lowtide.layers.add_rms_norm(input, residual, {weight}, {args})"
        return Program(w.lines, w.names, ours, f"rms_norm(input, {weight}, residual=residual, {args})")
    args = call("input", weight, **given)
    return Program(w.lines, w.names, f"(lowtide.layers.rms_norm({args}),)", f"rms_norm({args})")


def rotary(case: Case) -> Program:
    w = Writer(case)
    B, T, d = case["B"], case["T"], case["d"]
    r = max(2, d // 4 * 2) if case["partial"] else d
    for name, heads in (("q", case["heads"]), ("k", 1)):
        shape = (B, heads, T, d) if case["unsqueeze_dim"] == 1 else (B, T, heads, d)
        w.leaf(name, shape, "1.0", "all input" if name == "q" else "all", case["layout"])
    table = "float64" if w.dtype == "float64" else case["table"]
    for name in ("cos", "sin"):
        w.value(name, f"torch.randn({(1 if case['one_table'] else B, T, r)}, generator=g).to(torch.{table})")
    args = call("q", "k", "cos", "sin", unsqueeze_dim=case["unsqueeze_dim"] if case["unsqueeze_dim"] != 1 else None)
    return Program(w.lines, w.names, f"lowtide.layers.rotary({args})", f"rotary({args})")


WANTS = [
    ["logprob"], ["entropy"], ["lse"], ["mean_logit"], ["logprob", "entropy", "lse", "argmax"],
    ["logprob", "is_top1"], ["entropy", "sum_sq_prob"], ["lse", "mean_logit", "argmax"],
    ["logprob", "entropy", "lse", "mean_logit", "sum_sq_prob", "argmax", "is_top1"], ["argmax"],
]  # fmt: skip
PLAIN = {k: HEAD[k] for k in ("leading", "layout", "trained", "way", "upstream")}
OF_OTHERS = ("softcap", "logit_scale", "logits", "gap", "ruled_out", "weight_layout")  # no options of the module
TABLES: dict[str, tuple[Callable[[Case], Program], dict[str, list[Any]]]] = {
    "linear_cross_entropy": (
        cross_entropy,
        HEAD | TARGETS | {
            "reduction": ["mean", "sum", "none"],
            "weight": [False, True, "some 0"],
            "label_smoothing": [0.0, 0.1, 1.0],
            "z_loss": [0.0, 1e-2],
            "token_weight": [False, True],
            "num_items": [None, 7, 2.5, "tensor", "0"],
            "shift": [False, True],
        },
    ),
    "LinearCrossEntropyLoss": (
        module,
        {k: v for k, v in HEAD.items() if k not in OF_OTHERS} | {
            "out_features": [(), (2,), (3, 1, 2)],
            "reduction": ["mean", "sum", "none"],
            "weight": [False, True],
            "label_smoothing": [0.0, 0.1],
            "ignored": ["none", "some", "all"],
            "ignore_index": [-100, 1],
        },
    ),
    "linear_logprobs": (logprobs, HEAD | TARGETS | {"K": [None, 1, 3]}),
    "linear_token_stats": (stats, HEAD | TARGETS | {"K": [None, 1, 3], "want": WANTS, "topk": [False, True]}),
    "linear_divergence": (
        divergence,
        {k: v for k, v in HEAD.items() if k not in ("logit_scale", "gap", "ruled_out")} | {
            "kind": ["forward_kl", "reverse_kl", "jsd", "tv"],
            "beta": [0.5, 0.1, 0.0, 1.0],
            "temperature": [1, 2.0, 0.5, "tensor"],
            "teacher": ["same", "bias", "larger", "topk bucket", "topk renormalise", "topk drop"],
            "mask": ["none", "some", "all"],
            "poison": [None, "nan", "inf"],
            "reduction": ["none", "sum", "mean"],
            "num_items": [None, 7],
        },
    ),
    "linear_apply": (apply, HEAD | {"fn": list(FUNCTIONS), "out": ["token", "sum"], "mask": ["none", "some", "all"]}),
    "swiglu_mlp": (
        swiglu,
        {k: v for k, v in HEAD.items() if k in (*PLAIN, "D", "dtype", "linear_bias", "weight_layout")} | {
            "F": [6, 16, 1, 33],
            "logits": ["usual", "huge"],
            "activation": ["silu", "gelu_tanh"],
            "level": [1, 0],
            "tile_tokens": [None, 1, 2, 5],
        },
    ),
    "rms_norm": (
        rms_norm,
        PLAIN | {
            "D": [4, 16, 1, 33],
            "dtype": DTYPES[:4],
            "logits": ["usual", "huge", "equal"],
            "offset": [0.0, 1.0],
            "rounding": ["after_weight", "before_weight"],
            "weight_dtype": ["same", "float32"],
            "residual": [False, True],
        },
    ),
    "rotary": (
        rotary,
        {
            "B": [1, 2, 0], "T": [3, 1, 5, 0], "heads": [1, 2, 3], "d": [4, 2, 8, 6], "dtype": DTYPES[:4],
            "partial": [False, True], "one_table": [False, True], "table": ["float32", "bfloat16"],
            "unsqueeze_dim": [1, 2], "layout": LAYOUTS, "trained": ["all", "input", "nothing"], "way": WAYS,
            "upstream": ["one", "random", "0", 2.0**-14],
        },
    ),
}  # fmt: skip


def tables() -> dict[str, tuple[Callable[[Case], Program], dict[str, list[Any]]]]:
    """Return `TABLES` with those of the losses."""
    from fuzz import loss_cases

    return TABLES | {
        "losses of tokens": (loss_cases.tokens, loss_cases.TOKENS),
        "losses of pairs": (loss_cases.pairs, loss_cases.PAIRS),
    }


# What seldom meets by chance: confident tokens in fp16 under a loss scale, and nothing to learn from.
THEMES: list[dict[str, list[Any]]] = [
    {"dtype": ["float16", "autocast float16"], "logits": ["confident", "wrong"], "upstream": UPSTREAM[4:8]},
    {"ignored": ["all", "all but one"], "mask": ["all"], "upstream": UPSTREAM[:8], "num_items": [None, "0", "tensor"]},
]


def draw(name: str, seed: int) -> Case:
    """Return a random case: about half of its options are the simplest, so that failures are seen one at a time too."""
    choose = random.Random(f"{name} {seed}")
    simple = choose.choice((0.2, 0.5, 0.8))
    case: Case = {"function": name, "seed": seed}
    table = tables()[name][1]
    for option, values in table.items():
        case[option] = values[0] if choose.random() < simple else choose.choice(values)
    if choose.random() < 0.25:
        for option, wanted in choose.choice(THEMES).items():
            if not (possible := [v for v in wanted if v in table.get(option, ())]):
                continue
            case[option] = choose.choice(possible)
    return case


def program_of(case: Case) -> Program:
    return tables()[case["function"]][0](case)
