"""What cannot be computed is refused with one sentence: the argument, what was expected, what came, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from contract import parts
from lowtide import (
    HeadOptions,
    TeacherTopK,
    linear_apply,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_token_stats,
)
from lowtide.errors import ArgumentValueError, LowtideError
from promises import promise
from support import head

pytestmark = promise("errors")
Bad = tuple[dict[str, Any], type[Exception], str]
x, w, b, y = head((2, 3), 4, 7)
tx, tw, tb, _ = head((2, 3), 5, 7, seed=1)
ids, logprobs = torch.zeros(2, 3, 2, dtype=torch.long), torch.full((2, 3, 2), 0.3).log()
HEAD: dict[str, Any] = {"input": x, "linear_weight": w, "linear_bias": b}
SIDES = ("chosen", "rejected", "ref_chosen", "ref_rejected")
TOPK = {"teacher_input": None, "teacher_weight": None, "teacher_bias": None}


def applied(*, args: tuple[Any, ...] = (), target: Tensor = y, **kwargs: Any) -> Any:
    given = {"fn": lambda z, y: z.sum(-1), **kwargs}
    return linear_apply(given.pop("fn"), given.pop("input"), given.pop("linear_weight"), target, *args, **given)


FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "linear_cross_entropy": (linear_cross_entropy, {**HEAD, "target": y}),
    "linear_logprobs": (linear_logprobs, {**HEAD, "target": y}),
    "linear_token_stats": (linear_token_stats, {**HEAD, "target": y}),
    "linear_divergence": (linear_divergence, {**HEAD, "teacher_input": tx, "teacher_weight": tw, "teacher_bias": tb}),
    "linear_apply": (applied, HEAD),
    **parts.GOOD,
}
LONG = torch.long
OF_ALL: list[Bad] = [
    ({"input": [1.0]}, TypeError, r"^input: expected a torch.Tensor, got list"),
    ({"input": torch.tensor(1.0)}, ValueError, r"^input: expected shape \[..., 4\].*got \[\]"),
    (
        {"input": torch.rand(2, 3, 5)},
        ValueError,
        r"^input: expected shape \[..., 4\], as linear_weight.*got \[2, 3, 5\]",
    ),
    ({"input": torch.ones(2, 3, 4, dtype=LONG)}, TypeError, "^input: expected a floating-point dtype"),
    ({"input": torch.rand(2, 3, 4).bfloat16()}, TypeError, "^linear_weight: expected dtype torch.bfloat16.*autocast"),
    ({"linear_weight": torch.rand(7)}, ValueError, r"^linear_weight: expected shape \[V, D\], got \[7\]"),
    ({"linear_weight": torch.rand(7, 4).half()}, TypeError, "^linear_weight: expected dtype torch.float32"),
    ({"linear_weight": torch.rand(7, 4, device="meta")}, ValueError, "^linear_weight: expected a tensor on cpu"),
    ({"linear_bias": torch.rand(6)}, ValueError, r"^linear_bias: expected shape \[7\].*got \[6\]"),
    ({"linear_bias": torch.rand(7).double()}, TypeError, "^linear_bias: expected dtype torch.float32"),
    ({"softcap": 0}, ValueError, "^softcap: expected a finite number above 0, got 0"),
    ({"options": {"workspace_mib": 3}}, TypeError, "^options: expected lowtide.HeadOptions or None, got dict"),
    ({"options": HeadOptions(backend="exp")}, RuntimeError, "^backend: expected .*'torch'.*, got 'exp'"),
    ({"options": HeadOptions(backend="row")}, RuntimeError, "^backend: expected .*'torch'.*, got 'row'"),
    ({"options": HeadOptions(batch_invariant=True)}, RuntimeError, "^options: expected batch_invariant=False"),
]
OF_SCALED: list[Bad] = [  # all but the divergence
    ({"logit_scale": torch.rand(2)}, ValueError, r"^logit_scale: expected a number or a 0-d tensor, got shape \[2\]"),
    ({"logit_scale": True}, TypeError, "^logit_scale: expected a number or a 0-d tensor, got True"),
]
OF_TARGETS: list[Bad] = [
    ({"target": torch.ones(2, 2, dtype=LONG)}, ValueError, r"^target: expected shape \[2, 3\].*got \[2, 2\]"),
    ({"target": torch.rand(2, 3)}, TypeError, "^target: expected class indices"),
    ({"target": torch.ones(2, 3, dtype=torch.bool)}, TypeError, "^target: expected class indices"),
    ({"target": torch.full((2, 3), 7)}, IndexError, "^target: expected class indices from 0 to 6.*got 7 at position 0"),
    ({"target": torch.full((2, 3), -1)}, IndexError, "^target:.*got -1 at position 0.*ignore_index"),
    ({"ignore_index": 1.5}, TypeError, "^ignore_index: expected an int, got 1.5"),
    ({"ignore_index": None}, TypeError, "^ignore_index: expected an int, got None"),
    ({"ignore_index": 2**63}, ValueError, "^ignore_index: expected an int of 64 bits"),
]
OF_REDUCED: list[Bad] = [
    ({"reduction": "avg"}, ValueError, "^reduction: expected 'mean', 'sum' or 'none', got 'avg'"),
    ({"num_items": 0, "reduction": "mean"}, ValueError, "^num_items: expected a finite number above 0, got 0"),
    ({"num_items": torch.ones(1), "reduction": "mean"}, ValueError, "^num_items: expected a number or a 0-d tensor"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, "^num_items: expected None with reduction='sum', got 3"),
    ({"num_items": 3, "reduction": "none"}, ValueError,
     "^num_items: expected None with reduction='none', got 3. Only a mean is divided."),
    ({"options": HeadOptions(gradient="forward"), "reduction": "none"}, RuntimeError,
     "^gradient: expected 'auto' or 'recompute' with a value for each token"),
]  # fmt: skip
OF_SEVERAL_TARGETS: list[Bad] = [
    ({"target": torch.ones(2, 4, 3, dtype=LONG)}, ValueError, r"^target: expected shape \[2, 3\] or \[2, 3, K\]"),
    ({"target": torch.ones(2, 3, 0, dtype=LONG)}, ValueError, "with K above 0"),
    ({"target": torch.full((2, 3, 2), -1)}, IndexError, "^target:.*got -1 at position 0.*ignore_index"),
    (
        {"options": HeadOptions(gradient="forward")},
        RuntimeError,
        "^gradient: expected 'auto' or 'recompute' with a value for each token",
    ),
]
OWN: dict[str, list[Bad]] = {
    "linear_cross_entropy": [
        *(({"target": torch.rand(2, 3, *more)}, TypeError, "^target: expected class.*linear_apply.*linear_divergence")
          for more in ((), (7,))),
        ({"weight": torch.rand(6)}, ValueError, r"^weight: expected one class weight for each of 7, got shape \[6\]"),
        ({"weight": torch.rand(7, device="meta")}, ValueError, "^weight: expected a tensor on cpu.*got meta"),
        ({"shift": "no"}, TypeError, "^shift: expected True or False, got 'no'"),
        ({"label_smoothing": 1.5}, ValueError, "^label_smoothing: expected a number from 0 to 1, got 1.5"),
        ({"z_loss": float("nan")}, ValueError, "^z_loss: expected a finite number.*got nan"),
        ({"token_weight": torch.rand(3)}, ValueError, r"^token_weight: expected shape \[2, 3\].*got \[3\]"),
        ({"input": torch.rand(4), "target": torch.tensor(1), "shift": True}, ValueError,
         "^input: expected at least two axes"),
        ({"options": HeadOptions(backend="exp")}, RuntimeError, "expected 'auto', 'row' or 'torch', got 'exp'"),
        ({"options": HeadOptions(backend="row")}, RuntimeError, "expected 'auto', 'exp' or 'torch', got 'row'"),
        ({"options": HeadOptions(batch_invariant=True)}, RuntimeError, "expected batch_invariant=False"),
    ],
    "linear_token_stats": [
        ({"want": "entropy"}, TypeError, "^want: expected a sequence of names among 'logprob', .*got 'entropy'"),
        ({"want": ()}, ValueError, "^want: expected names among .*got none"),
        ({"want": ("lse", "perplexity")}, ValueError, "^want: expected names among .*got 'perplexity'"),
        ({"want": ("lse", "topk")}, ValueError, "^topk: expected an int, as want has 'topk', got None"),
        ({"topk": 0}, ValueError, "^topk: expected an int from 1 to 7, the vocabulary, got 0"),
        ({"topk": 2.0}, TypeError, "^topk: expected an int, got 2.0"),
        ({"target": None}, ValueError, "^target: expected class indices, as want has 'logprob', got None"),
        ({"target": None, "want": ("is_top1",)}, ValueError,
         "^target: expected class indices, as want has 'is_top1'"),
        ({"linear_weight": torch.rand(0, 4), "linear_bias": None, "want": ("lse",)}, ValueError,
         "^linear_weight: expected at least one class"),
    ],
    "linear_divergence": [
        ({"teacher_input": torch.rand(2, 3, 4)}, ValueError,
         r"^teacher_input: expected shape \[..., 5\], as teacher_weight"),
        ({"teacher_input": torch.rand(3, 2, 5)}, ValueError,
         r"^teacher_input: expected shape \[2, 3, 5\], as input is"),
        ({"teacher_weight": torch.rand(7, 5).half()}, TypeError,
         "^teacher_weight: .*torch.float32, as teacher_input has"),
        ({"teacher_bias": torch.rand(8)}, ValueError,
         r"^teacher_bias: expected shape \[7\], as teacher_weight is \[7, 5\]"),
        ({"teacher_input": None}, ValueError, "^teacher_input: expected a tensor, as teacher_topk is None, got None"),
        ({"teacher_weight": None}, ValueError, "^teacher_weight: expected a tensor, as teacher_topk is None, got None"),
        ({"teacher_weight": torch.rand(7, 5, device="meta")}, ValueError, "^teacher_weight: expected a tensor on cpu"),
        ({"teacher_input": tx.double(), "teacher_weight": tw.double(), "teacher_bias": None}, TypeError,
         "^teacher_input: expected float64 on both sides or on neither"),
        ({"linear_weight": torch.rand(0, 4), "linear_bias": None}, ValueError,
         "^linear_weight: expected at least one class"),
        ({"teacher_weight": torch.rand(0, 5), "teacher_bias": None}, ValueError,
         "^teacher_weight: expected at least one"),
        ({"kind": "kl"}, ValueError, "^kind: expected 'forward_kl', 'reverse_kl', 'jsd' or 'tv', got 'kl'"),
        ({"beta": 1.5}, ValueError, "^beta: expected a number from 0 to 1, got 1.5"),
        ({"temperature": 0}, ValueError, "^temperature: expected a finite number above 0, got 0"),
        ({"temperature": torch.ones(2)}, ValueError, "^temperature: expected a number or a 0-d tensor"),
        ({"temperature": torch.ones((), requires_grad=True)}, ValueError,
         "^temperature: .*requires no gradient.*detach"),
        ({"mask": torch.ones(2, 3)}, TypeError,
         "^mask: expected dtype torch.bool, True where computed, got torch.float32"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, r"^mask: expected shape \[2, 3\]"),
        ({"teacher_softcap": -1.0}, ValueError, "^teacher_softcap: expected a finite number above 0, got -1.0"),
        ({**TOPK, "teacher_topk": (ids, logprobs), "teacher_softcap": 3.0}, ValueError,
         "^teacher_softcap: expected None with teacher_topk, got a float"),
        ({"teacher_topk": (ids, logprobs)}, ValueError,
         "^teacher_input: expected None with teacher_topk, got a Tensor"),
        ({**TOPK, "teacher_topk": [ids, logprobs]}, TypeError, "^teacher_topk: expected lowtide.TeacherTopK.*got list"),
        ({**TOPK, "teacher_topk": (ids,)}, TypeError, "^teacher_topk: expected lowtide.TeacherTopK.*got a tuple of 1"),
        ({**TOPK, "teacher_topk": (ids, logprobs, "cut")}, ValueError,
         "^teacher_topk.tail: expected 'bucket', .*got 'cut'"),
        ({**TOPK, "teacher_topk": (logprobs, ids)}, TypeError,
         "^teacher_topk.ids: expected an integer dtype, got torch.float"),
        ({**TOPK, "teacher_topk": (ids, ids)}, TypeError, "^teacher_topk.logprobs: expected a floating-point dtype"),
        ({**TOPK, "teacher_topk": (ids[0], logprobs)}, ValueError,
         r"^teacher_topk.ids: expected shape \[2, 3, K\] with K"),
        ({**TOPK, "teacher_topk": (ids[..., :0], logprobs)}, ValueError,
         r"^teacher_topk.ids: .*with K above 0.*\[2, 3, 0\]"),
        ({**TOPK, "teacher_topk": (ids, logprobs[..., :1])}, ValueError,
         r"^teacher_topk.logprobs: expected shape \[2, 3, 2\]"),
        ({**TOPK, "teacher_topk": (ids - 1, logprobs)}, IndexError,
         "^teacher_topk: expected class indices of 0 or more, got -1"),
        ({"options": HeadOptions(backend="exp")}, RuntimeError, "expected 'auto', 'row' or 'torch', got 'exp'"),
        ({"options": HeadOptions(backend="row")}, RuntimeError, "expected 'auto' or 'torch', got 'row'.*NVIDIA"),
        ({"options": HeadOptions(batch_invariant=True)}, RuntimeError, "expected batch_invariant=False"),
    ],
    "linear_apply": [
        ({"fn": lambda z, y: z[1:, 0]}, ValueError, r"^fn: expected results of shape \[\d+, ...\]"),
        ({"fn": lambda z, y: z.sum()}, ValueError, 'out="sum"'),
        ({"fn": lambda z, y: 1.0}, TypeError, "to return tensors, in any pytree, got float"),
        ({"fn": lambda z, y: [z, "a"]}, TypeError, "to return tensors, in any pytree, got str"),
        ({"fn": lambda z, y: z.sum(-1), "out": "sum"}, ValueError, 'out="token"'),
        ({"fn": lambda z, y: z.sum().view(1), "out": "sum"}, ValueError, "Sum over the tokens"),
        ({"fn": lambda z, y: (z > 0).any(), "out": "sum"}, ValueError, "x.sum"),
        ({"fn": lambda z, y: len(z), "out": "sum"}, TypeError, "to return tensors, in any pytree, got int"),
        ({"fn": 3}, TypeError, "^fn: expected a function"),
        ({"params": torch.ones(3)}, TypeError, r"^params: expected a tuple.*params=\(x,\)"),
        ({"args": (1.0,)}, TypeError, r"^token_args\[1\]: expected a torch.Tensor, got float.*params"),
        ({"args": (torch.ones(5),)}, ValueError, r"^token_args\[1\]: expected first axes \[2, 3\]"),
        ({"mask": torch.ones(2, 3)}, TypeError, "^mask: expected a bool tensor"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, ValueError, r"^mask: expected shape \[2, 3\]"),
        ({"out": "mean"}, ValueError, "^out: expected 'token' or 'sum', got 'mean'"),
        ({"compile": 1}, TypeError, "^compile: expected True or False"),
        ({"options": HeadOptions(backend="exp")}, RuntimeError,
         "^backend: expected 'auto' or 'torch', got 'exp'.*not for linear_apply"),
        ({"options": HeadOptions(gradient="forward")}, RuntimeError,
         "^gradient: expected 'auto' or 'recompute' with a value for each token"),
        ({"fn": lambda z, y: (z.sum(), z.square().sum()), "out": "sum", "options": HeadOptions(gradient="forward")},
         RuntimeError, "^gradient: expected 'auto' or 'recompute' unless fn returns one scalar, got 2"),
        ({"linear_weight": torch.rand(0, 4), "linear_bias": None}, ValueError, "at least one class"),
    ],
}  # fmt: skip


def bad_arguments(name: str) -> list[Bad]:
    if name in parts.BAD:
        return parts.BAD[name]
    found = OF_ALL + OWN.get(name, [])
    found += [] if name == "linear_divergence" else OF_SCALED
    found += OF_TARGETS if "target" in FUNCTIONS[name][1] else []
    found += OF_REDUCED if name in ("linear_cross_entropy", "linear_divergence") else []
    return found + (OF_SEVERAL_TARGETS if name in ("linear_logprobs", "linear_token_stats") else [])


@pytest.mark.parametrize(
    ("name", "change", "kind", "text"), [(name, *bad) for name in FUNCTIONS for bad in bad_arguments(name)],
    ids=lambda value: value if isinstance(value, str) and value in FUNCTIONS else "",
)  # fmt: skip
def test_bad_arguments(name: str, change: dict[str, Any], kind: type[Exception], text: str) -> None:
    function, good = FUNCTIONS[name]
    with pytest.raises(kind, match=text) as caught:
        function(**{**good, **change})
    assert isinstance(caught.value, LowtideError)
    assert "\n" not in str(caught.value)


FORMS: dict[str, Callable[[Tensor], Any]] = {  # of a tensor that has at least one axis
    "complex": lambda t: t.to(torch.complex64),
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.view(len(t), -1).to_sparse_csr(),
    "nested": lambda t: torch.nested.nested_tensor([t]),
    "jagged": lambda t: torch.nested.nested_tensor([t[:1], t[1:]], layout=torch.jagged),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "quantised": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.quint8),
    "an object": lambda t: object(),
}
NUMBERS = ("a", 10**400, 1j, torch.ones(2), torch.tensor(1j), [1], object())  # which no argument takes for a number
LOSSES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sft_loss": (lowtide.losses.sft_loss, {"logprob": logprobs, "mask": ids + 1}),
    "dpo_loss": (lowtide.losses.dpo_loss, {f"{side}_logprob": logprobs[0, 0] for side in SIDES}),
}
OF_NUMBERS = {
    "linear_cross_entropy": ("softcap", "logit_scale", "label_smoothing", "z_loss", "num_items"),
    "linear_divergence": ("softcap", "teacher_softcap", "temperature", "beta"), "swiglu_mlp": ("tile_tokens",),
    "rms_norm": ("eps", "offset"), "sft_loss": ("num_items",), "dpo_loss": ("beta", "label_smoothing"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, about the tensors made here
@pytest.mark.parametrize("name", [*FUNCTIONS, *LOSSES])
def test_tensors_of_no_use_and_what_is_no_number_are_named(name: str) -> None:
    function, good = (FUNCTIONS | LOSSES)[name]
    bad = [(argument, change(value.detach().float())) for argument, value in good.items()
           if isinstance(value, Tensor) for change in FORMS.values()]  # fmt: skip
    bad += [(argument, value) for argument in OF_NUMBERS.get(name, ()) for value in NUMBERS]
    for argument, value in bad:
        with pytest.raises(LowtideError, match=f"^{argument}: expected"):
            function(**{**good, argument: value})


def test_the_good_arguments_are_good() -> None:
    for function, good in FUNCTIONS.values():
        function(**good)
    assert linear_token_stats(**HEAD, want=["lse", "entropy"]).lse.isfinite().all()
    assert linear_divergence(**HEAD, **TOPK, teacher_topk=TeacherTopK(ids, logprobs)).isfinite().all()


def test_a_place_without_a_teacher_may_hold_any_id() -> None:
    unused, other = logprobs.clone(), ids.clone()
    unused[..., 1], other[..., 1] = -torch.inf, -1
    first, second = (linear_divergence(**HEAD, **TOPK, teacher_topk=(i, unused)) for i in (ids, other))
    assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # torch.compile's own
def test_a_bad_target_is_named_by_value_and_place() -> None:
    x, w, _, y = head((2, 5), 4, 7)
    y[1, 2] = 99
    with pytest.raises(IndexError, match="got 99 at position 7"):
        linear_cross_entropy(x, w, y)
    with pytest.raises(IndexError, match="got 99"):
        torch.compile(lambda x: linear_cross_entropy(x, w, y), backend="eager")(x)
    y[1, 2] = -7
    assert linear_cross_entropy(x, w, y, ignore_index=-7).isfinite()
    y[:, 0] = 99
    assert linear_cross_entropy(x, w, y, ignore_index=-7, shift=True).isfinite(), "shifted away, it is not looked at"


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"workspace_mib": 0}, ValueError, "workspace_mib: expected a finite number above 0, or None, got 0"),
        *(({"workspace_mib": bad}, ValueError, "workspace_mib") for bad in (-1.5, float("inf"), float("nan"))),
        ({"workspace_mib": "64"}, TypeError, "workspace_mib: expected a number of MiB or None, got '64'"),
        ({"workspace_mib": True}, TypeError, "workspace_mib"),
        ({"accumulate": "bf16"}, ValueError, "accumulate: expected one of 'auto', 'float32', 'input', got 'bf16'"),
        ({"backend": "cuda"}, ValueError, "backend: expected one of 'auto', 'exp', 'row', 'torch', got 'cuda'"),
        ({"gradient": "backward"}, ValueError, "gradient: expected one of 'auto', 'forward', 'recompute'"),
        *(({"skip": bad}, ValueError, "skip: expected a number above 0 and below 1") for bad in (0, 1, float("nan"))),
        ({"skip": "5e-3"}, TypeError, "skip: expected a relative error or None"),
        ({"batch_invariant": 1}, TypeError, "batch_invariant: expected True or False, got 1"),
        *(
            ({"batch_invariant": True, **other}, ValueError, "batch_invariant: expected False with another backend")
            for other in ({"skip": 5e-3}, {"backend": "row"})
        ),
    ],
)
def test_options_are_checked_when_they_are_made(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        HeadOptions(**options)
    assert isinstance(caught.value, LowtideError)


def test_options_are_frozen_and_keyword_only() -> None:
    with pytest.raises(AttributeError):
        HeadOptions().workspace_mib = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        HeadOptions(3)  # type: ignore[misc]


def test_every_error_is_a_lowtide_error_and_a_builtin() -> None:
    for name in set(lowtide.errors.__all__) - {"LowtideError"}:
        kind = getattr(lowtide.errors, name)
        assert issubclass(kind, LowtideError), name
        assert issubclass(kind, (ValueError, TypeError, IndexError, RuntimeError)), name


def test_a_shard_needs_a_process_group() -> None:
    message = r"^group: expected a process group .* Call .*init_process_group first"
    for make in (
        lambda: lowtide.VocabShard.of(torch.randn(3, 4)),
        lambda: lowtide.VocabShard(group=None, first=0, rows=3, vocab=6),
    ):
        with pytest.raises(lowtide.errors.ArgumentValueError, match=message):
            make()


X, W, _, Y = (t if t is None else t.detach() for t in head(4, 8, 11))


@pytest.mark.parametrize(
    "function", [linear_cross_entropy, linear_logprobs, linear_token_stats], ids=lambda function: function.__name__
)
def test_ligers_order_of_arguments_is_seen(function: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentValueError, match=r"^target: .*hidden states come first.*Liger"):
        function(W, X, Y)
    with pytest.raises(ArgumentValueError, match=r"^linear_weight: .*hidden states come first.*Liger"):
        function(W, X.view(2, 2, 8), Y.view(2, 2))
    with pytest.raises(ArgumentValueError) as error:
        function(X, W, Y[:3])
    assert "Liger" not in str(error.value)
