"""The patch itself: what it replaces, that it can be undone, what it leaves to TRL, and what it refuses."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

import lowtide
from lowtide import HeadOptions
from lowtide.errors import UnsupportedError
from lowtide.trl.patch import StandIn
from promises import promise
from support import Sharded

pytestmark = promise("reported", "reversible")
PLACES = (
    "trl.kernels.ChunkedLogProbFunction",
    "trl.kernels.chunked_logprob.ChunkedLogProbFunction",
    "trl.trainer.utils._ChunkedLogProbFunction",
    "trl.kernels.chunked_divergence.ChunkedDivergenceFunction",
    "trl.trainer.distillation_trainer.ChunkedDivergenceFunction",
)


def held(place: str) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name)


def call(outputs: tuple[str, ...] = ("entropy",), dtype: torch.dtype = torch.float32, **changes: Any) -> list[Any]:
    g = torch.Generator().manual_seed(0)
    arguments = {
        "hidden": torch.randn(5, 4, generator=g).to(dtype),
        "weight": torch.randn(7, 4, generator=g).to(dtype),
        "bias": None,
        "targets": torch.arange(5),
        "temperature": 0.7,
        "chunk_size": 3,
        "softcap": None,
        "logit_scale": 1.0,
        "outputs": outputs,
    }
    return list({**arguments, **changes}.values())


def test_every_module_that_refers_to_them_and_back() -> None:
    before = {place: held(place) for place in PLACES}
    assert all(issubclass(function, torch.autograd.Function) for function in before.values())
    report = lowtide.patch_trl()
    assert sorted(name for names in report.replaced.values() for name in names) == sorted(PLACES)
    for place, stock in before.items():
        assert type(held(place)) is StandIn, place
        assert held(place).stock is stock
        assert place in str(report)
    lowtide.unpatch_trl()
    assert {place: held(place) for place in PLACES} == before
    lowtide.unpatch_trl()


def test_patching_twice_is_patching_once() -> None:
    before = {place: held(place) for place in PLACES}
    report = lowtide.patch_trl()
    first = held(PLACES[0])
    assert lowtide.patch_trl(options=HeadOptions(workspace_mib=3)) is report
    assert held(PLACES[0]) is first
    assert first.options == HeadOptions(workspace_mib=3)
    assert len(report.replaced["ChunkedLogProbFunction"]) == 3
    lowtide.unpatch_trl()
    assert {place: held(place) for place in PLACES} == before
    assert lowtide.patch_trl() is not report


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"outputs": ("log_probs", "median_logit")}, "'median_logit'"),
        ({"temperature": torch.tensor(0.7)}, "temperature is a Tensor"),
        ({"logit_scale": float("inf")}, "logit_scale is not finite"),
        ({"softcap": 0.0}, "final_logit_softcapping is not above 0"),  # TRL caps at 1 there
        ({"bias": torch.ones(7, dtype=torch.float64)}, "weight or bias is not"),
        ({"weight": torch.ones(7, 4).as_subclass(Sharded)}, "weight is a Sharded"),
    ],
)
def test_calls_that_go_to_trl(changes: dict[str, Any], why: str) -> None:
    stock = held(PLACES[0]).apply(*call(**changes))
    report = lowtide.patch_trl()
    for mine, theirs in zip(held(PLACES[0]).apply(*call(**changes)), stock, strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs) or mine.isnan().all()
    assert report.calls_trl == {"ChunkedLogProbFunction": 1}
    assert report.calls_lowtide == {}
    ((reason, times),) = report.why_trl.items()
    assert why in reason
    assert times == 1


DIVERGENCE = {
    "hidden": (5, 4), "weight": (7, 4), "bias": None, "teacher_hidden": (5, 3), "teacher_weight": (7, 3),
    "teacher_bias": None, "beta": 0.5, "temperature": 0.7, "scale": 1.0, "cap": None, "teacher_scale": 1.0,
    "teacher_cap": None,
}  # fmt: skip
HALF = {"teacher_hidden": torch.ones(5, 3).bfloat16(), "teacher_weight": torch.ones(7, 3).bfloat16()}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cap": 0.0}, "student_final_logit_softcapping is not above 0"),  # TRL caps at 1 there
        ({"teacher_scale": 0.5}, "scale their logits differently"),
        ({"beta": 1.5}, "beta is not from 0 to 1"),
        ({"teacher_hidden": torch.ones(5, 3).double(), "teacher_weight": torch.ones(7, 3).double()}, "is float64"),
        ({**HALF, "bias": torch.ones(7).bfloat16()}, "hidden is torch.float32"),
        ({**HALF, "teacher_bias": torch.zeros(7)}, "differ in dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_divergences_that_go_to_trl(changes: dict[str, Any], why: str) -> None:
    g = torch.Generator().manual_seed(0)
    given = {**DIVERGENCE, **changes}.values()
    arguments = [torch.randn(value, generator=g) if isinstance(value, tuple) else value for value in given]
    stock = held(PLACES[3]).apply(*arguments)
    report = lowtide.patch_trl()
    for mine, theirs in zip(held(PLACES[3]).apply(*arguments), stock, strict=True):
        assert torch.equal(mine, theirs)
    assert report.calls_trl == {"ChunkedDivergenceFunction": 1}
    (reason,) = report.why_trl
    assert why in reason


def test_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.kernels import chunked_divergence, chunked_logprob

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, temperature: Any) -> Any: ...

    places = [(chunked_logprob, "ChunkedLogProbFunction"), (chunked_divergence, "ChunkedDivergenceFunction")]
    for module, name in places:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, Other)
            with pytest.raises(UnsupportedError, match=f"{name}: expected arguments"):
                lowtide.patch_trl()
            patch.delattr(module, name)
            with pytest.raises(UnsupportedError, match=rf"{name}: expected as in TRL 1.16, got none in TRL"):
                lowtide.patch_trl()
    # the same arguments with another meaning: a temperature before the cap
    tile = chunked_logprob._torch_transform
    with monkeypatch.context() as patch:
        patch.setattr(chunked_logprob, "_torch_transform", lambda z, s, c, t, has: tile(z * t, s, c, 1.0, has))
        with pytest.raises(UnsupportedError, match=r"to compute what it does in TRL 1\.16"):
            lowtide.patch_trl()
    assert not isinstance(held(PLACES[0]), StandIn)
    lowtide.patch_trl()


def test_without_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)  # type: ignore[arg-type]
    monkeypatch.setattr(
        "lowtide.trl.patch.importlib.import_module",
        lambda name: (_ for _ in ()).throw(ModuleNotFoundError(f"No module named {name!r}", name=name)),
    )
    with pytest.raises(UnsupportedError, match=r"trl: expected TRL 1.16, got none installed. pip install"):
        lowtide.patch_trl()
