"""The head as registered operators: opaque to torch.compile, with shapes it can infer, and no autograd of their own.

`torch.ops.lowtide.cross_entropy` computes the loss, and with it the gradients where they can be known by then;
`torch.ops.lowtide.cross_entropy_backward` builds them from the inputs once the upstream gradient is there.
Both begin with the fields of `Call`, declared once: the operators' schemas are made from its annotations.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lowtide.head.call import CrossEntropyArgs, Head, HeadCall, Wanted
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.registration import (
    fake_gradients,
    flop_formula,
    found_gradients,
    head_flop,
    schema_of,
    undisturbed,
    watched,
)
from lowtide.head.stored import StoredGradients, fake_stored_gradients
from lowtide.head.terms import cross_entropy as cross_entropy_terms


class Call(NamedTuple):
    """What `lowtide.linear_cross_entropy` was asked, as plain tensors and scalars; labels already shifted."""

    input: Tensor  # [..., D]
    linear_weight: Tensor  # [V, D]
    target: Tensor  # [...]
    linear_bias: Tensor | None  # [V]
    weight: Tensor | None  # [V]
    token_weight: Tensor | None  # [...]
    num_items: Tensor | None  # scalar
    logit_scale: Tensor | None  # scalar
    dtype: torch.dtype  # of the GEMMs' operands
    reduction: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    workspace_mib: float | None
    accumulate: str
    backend: str

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of logits, losses and sums."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def trained(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the tensors that may get a gradient."""
        return self.input, self.linear_weight, self.linear_bias


class Stored(NamedTuple):
    """What `cross_entropy` returns; what was not asked for is empty."""

    loss: Tensor  # scalar, or [N] with reduction "none"
    input_grad: Tensor  # this and the next six: see `StoredGradients`
    weight_grad: Tensor
    bias_grad: Tensor
    input_factor: Tensor
    weight_factor: Tensor
    kept_tokens: Tensor
    kept_any: Tensor
    lse: Tensor  # [N] each row's logsumexp, where it was to be kept
    miss: Tensor  # [N] and that minus its target's logit

    @property
    def gradients(self) -> StoredGradients:
        """Return the part of it that is gradients."""
        return StoredGradients(*self[1:8])


_CALL = schema_of(Call)
_WANTED = ", ".join(f"bool {name}_grad" for name in Wanted._fields)


@torch.library.custom_op(
    "lowtide::cross_entropy",
    mutates_args=(),
    schema=f"({_CALL}, {_WANTED}, bool keep_rows) -> ({', '.join(['Tensor'] * len(Stored._fields))})",
)
def cross_entropy(*args: Any) -> Stored:
    """Compute the loss, and the gradients that are wanted as if the upstream gradient were 1.

    With ``keep_rows`` also what `cross_entropy_backward` can use to spare itself the row sums.
    """
    *fields, keep_rows = args
    call, wanted = _split(fields)
    with undisturbed(call.input.device):
        return _loss_and_gradients(call, wanted, keep_rows)


@cross_entropy.register_fake
def _(*args: Any) -> Stored:
    *fields, keep_rows = args
    call, wanted = _split(fields)
    N = call.target.numel()
    loss = call.input.new_empty((N,) if call.reduction == "none" else (), dtype=call.wide)
    per_token = call.reduction == "none"
    return Stored(
        loss,
        *fake_stored_gradients(
            wanted, call.input, call.linear_weight, call.wide, per_token=per_token, ignores=any(wanted)
        ),
        lse=loss.new_empty(N if keep_rows else 0),
        miss=loss.new_empty(N if keep_rows else 0),
    )


@torch.library.custom_op(
    "lowtide::cross_entropy_backward",
    mutates_args=(),
    schema=f"({_CALL}, {_WANTED}, Tensor upstream, Tensor lse, Tensor miss) -> (Tensor, Tensor, Tensor)",
)
def cross_entropy_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of input, weight and bias from ``upstream``, a scalar or [N], and what forward kept."""
    *fields, upstream, lse, miss = args
    call, wanted = _split(fields)
    with undisturbed(call.input.device):
        return _gradients(call, wanted, upstream, lse, miss)


@cross_entropy_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *fields, _upstream, _lse, _miss = args
    call, wanted = _split(fields)
    return fake_gradients(wanted, call.input, call.linear_weight, call.wide)


@flop_formula("cross_entropy")
def _(*args: Any) -> int:
    call, wanted = _split(args[:-1])
    return head_flop(call.input, call.linear_weight, wanted)


@flop_formula("cross_entropy_backward")
def _(*args: Any) -> int:
    call, wanted = _split(args[:-3])
    return head_flop(call.input, call.linear_weight, wanted)


def run(*args: Any) -> Stored:
    """Run `cross_entropy`: as an operator where something watches operators, else without that detour (0.15 ms)."""
    if watched(args):
        return Stored(*cross_entropy(*args))
    *fields, keep_rows = args
    call, wanted = _split(fields)
    with torch.no_grad(), undisturbed(call.input.device):
        return _loss_and_gradients(call, wanted, keep_rows)


def run_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run `cross_entropy_backward` in the same way."""
    if watched(args):
        found: tuple[Tensor, Tensor, Tensor] = cross_entropy_backward(*args)
        return found
    *fields, upstream, lse, miss = args
    call, wanted = _split(fields)
    with torch.no_grad(), undisturbed(call.input.device):
        return _gradients(call, wanted, upstream, lse, miss)


def _split(fields: Sequence[Any]) -> tuple[Call, Wanted]:
    return Call(*fields[: len(Call._fields)]), Wanted(*fields[len(Call._fields) :])


def _parts(call: Call, ranks: Ranks | None, gradient: Literal["auto", "recompute"]) -> tuple[Head, CrossEntropyArgs]:
    head = HeadCall(
        input=call.input, linear_weight=call.linear_weight, linear_bias=call.linear_bias, logit_scale=call.logit_scale,
        softcap=call.softcap, dtype=call.dtype, workspace_mib=call.workspace_mib, accumulate=call.accumulate,
        backend=call.backend,
    )  # fmt: skip
    args = CrossEntropyArgs(**{name: getattr(call, name) for name in CrossEntropyArgs._fields})
    return head.head(ranks, gradient), args


def _loss_and_gradients(call: Call, wanted: Wanted, keep_rows: bool, ranks: Ranks | None = None) -> Stored:
    head, args = _parts(call, ranks, "auto")
    values, stored = cross_entropy_terms.forward(head, args, wanted, keep_rows)
    loss = values["loss"]
    if stored is None:
        stored = fake_stored_gradients(
            wanted, call.input, call.linear_weight, call.wide, per_token=call.reduction == "none", ignores=False
        )
    rows = torch.zeros(2, call.target.numel() if keep_rows else 0, dtype=call.wide, device=call.input.device)
    lse, miss = (values.get(name, x).clone() for name, x in zip(("lse", "miss"), rows, strict=True))
    if "own" in values:
        miss = torch.cat((miss, values["own"]))
    return Stored(loss, *stored, lse=lse, miss=miss)


def _gradients(
    call: Call, wanted: Wanted, upstream: Tensor, lse: Tensor, miss: Tensor, ranks: Ranks | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    head, args = _parts(call, ranks, "recompute")
    n = lse.numel()
    known = {"lse": lse, "miss": miss[:n]} | ({"own": miss[n:]} if miss.numel() > n else {})
    into = cross_entropy_terms.backward(head, args, wanted, {"loss": upstream}, known)
    return found_gradients(into, call.input, call.linear_weight, call.wide)
