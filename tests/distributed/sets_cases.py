"""Sets of classes on a sharded vocabulary, beside whole logits in float64; each rank scores the ids that it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contract.cases import OF_SETS
from distributed.launch import DEVICE, main
from distributed.sharded import (
    WAYS,
    D,
    V,
    compare,
    exchanged,
    head,
    part_of,
    plain,
    problem,
    same_on_all_ranks,
    shard_of,
)
from head.kernel_plans import use_set_kernels
from lowtide import linear_logprobs, linear_token_stats
from lowtide.errors import TargetIndexError
from support import pairs

OPTIONS: dict[str, list[Any]] = {
    "linear_bias": [True, False],
    "ignored": ["none", "some"],
    "softcap": [None, 3.0],
    "logit_scale": [1.0, "tensor", "trained"],
    "targets": [1, 3],
    "workspace_mib": [None, 1e-3],
    "form": ["padded", "shared"],
    "way": [*WAYS],
}
PLAIN = {"leading": (2, 7), "support": 4, "want": OF_SETS, "gradient": "auto", "accumulate": "auto"}


def of_form(kwargs: dict[str, Any], form: str) -> dict[str, Any]:
    """Return the arguments with one set for all tokens, in which every target is; or as they are."""
    if form == "shared":
        kwargs["support"] = torch.cat((kwargs["support"].reshape(-1), kwargs["support"].new_tensor([-1, 3, 3])))
    return kwargs


def every_option() -> None:
    """By plain PyTorch in float64, tokens whole or spread, and by the kernels."""
    for i, choice in enumerate(pairs(OPTIONS, seed=4)):
        form, way = choice.pop("form"), choice.pop("way")
        kwargs = of_form(problem("linear_token_stats", PLAIN | choice, i), form)
        compare("linear_token_stats", kwargs, [way], (form, choice), i)
        if DEVICE == "cpu" and form == "padded" and i % 3 == 0:
            kwargs = problem("linear_token_stats", PLAIN | choice, i, engine="kernels")
            with pytest.MonkeyPatch.context() as patched:
                used = use_set_kernels(patched)
                compare("linear_token_stats", kwargs, [way], (form, choice), i)
                assert "score" in used


def what_is_exchanged() -> None:
    """A logit for each listed id, and the hidden states' gradient: nothing of the vocabulary; the same on all ranks."""
    x, w, _, y = head((2, 7), D, V)
    ids = torch.cat((y[..., None], torch.randint(V, (2, 7, 5), generator=torch.Generator().manual_seed(0))), -1)
    pw = part_of(w)
    shard = shard_of("local", pw)
    linear_logprobs(x.detach(), pw.detach(), y, support=ids, **shard)  # the first call learns what all can do
    with exchanged() as seen:
        logprob = linear_logprobs(x, pw, y, support=ids, **shard)
        dx, _ = torch.autograd.grad(logprob.sum(), (x, pw))
    assert sum(count for _, count in seen) <= ids.numel() + 1 + x.numel()
    assert same_on_all_ranks(plain(logprob))
    assert same_on_all_ranks(dx)


def errors() -> None:
    """On every rank."""
    x, w, _, y = head((2, 7), D, V)
    pw = part_of(w)
    for support in (torch.full((2, 7, 3), V), torch.full((3,), V)):
        with pytest.raises(TargetIndexError, match=f"ids from 0 to {V - 1}"):
            linear_token_stats(x, pw, y, support=support, **shard_of("local", pw))


if __name__ == "__main__":
    main(vars())
