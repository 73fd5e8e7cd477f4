"""What a record cannot repeat is not repeated, and a record keeps no memory of the call that it was made from."""

import gc
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.replay import facts, program, tape
from lowtide.replay.checked import Checked
from lowtide.replay.replayed import Replayed


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "DEVICES", frozenset({"cpu"}))


def turned_after_a_view(x: Tensor) -> tuple[Tensor, ...]:
    turned = x.clone()
    first = turned[0]
    turned.t_()
    return (first + 1,)


def shorter_after_a_view(x: Tensor) -> tuple[Tensor, ...]:
    shorter = x.clone()
    first = shorter[:2]
    shorter.resize_(1, 3)
    return (first * 2,)


def elsewhere_after_a_view(x: Tensor) -> tuple[Tensor, ...]:
    moved = x.clone()
    first = moved[0]
    moved.set_(x * 3)
    return (first + moved,)


def counted_from_the_beginning_of_memory(x: Tensor) -> tuple[Tensor, ...]:
    return (torch.as_strided(x, (2,), (1,), x.storage_offset() + 1) * 1,)


def lists_changed(x: Tensor) -> tuple[Tensor, ...]:
    both = [x.clone(), x + 1]
    torch._foreach_add_(both, 1.0)
    return tuple(both)


@pytest.mark.parametrize(
    "function",
    [
        turned_after_a_view,
        shorter_after_a_view,
        elsewhere_after_a_view,
        counted_from_the_beginning_of_memory,
        lists_changed,
    ],
)
def test_operators_that_move_tensors(function: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    replayed = Replayed(function)
    for call in range(4):
        x = torch.randn(16, 3)[4 * call :][:3]
        for got, expected in zip(replayed(x), function(x), strict=True):
            assert torch.equal(got, expected)


def test_operators_without_results_and_draws_are_repeated() -> None:
    def drawn_after_a_check(x: Tensor) -> tuple[Tensor, ...]:
        torch._assert_async((x > 0).all())
        torch.rand(3)
        return (x + torch.rand(2),)

    replayed, results = Replayed(drawn_after_a_check), []
    for _ in range(4):
        torch.manual_seed(0)
        results += replayed(torch.ones(2))
    assert all(torch.equal(x, results[0]) for x in results)
    with pytest.raises(RuntimeError, match="zero"):
        replayed(-torch.ones(2))


def test_a_recording_keeps_no_memory_and_imports_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither during the recorded call nor after it, without waiting for Python's collector of cycles."""
    pointers: list[int] = []
    made: list[weakref.ref[Any]] = []

    def compute(x: Tensor) -> tuple[Tensor, ...]:
        scratch, out = x.new_empty(100), x.new_empty(5)
        made.append(weakref.ref(scratch))
        if (recording := facts.RECORDING.tape) is not None:
            made.insert(0, weakref.ref(recording))
            given = (SimpleNamespace(base=scratch), SimpleNamespace(base=x), out)
            recording.launched(lambda *args: pointers.append(args[5].base.data_ptr()), (1, 1, 1, None, *given))
            del given
        del scratch
        assert made[-1]() is None
        return (out,)

    monkeypatch.setattr(program, "_stream_of", lambda device: 11)
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # whose import takes seconds, and keeps frames for ever
    replayed = Replayed(compute)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            x = torch.randn(8)
            replayed(x)
            made.append(weakref.ref(x))
    finally:
        gc.enable()
    assert pointers == [x.data_ptr()]
    del x
    assert not any(one() is not None for one in made)


def test_no_call_of_the_loss_keeps_tensors_of_another() -> None:
    """Neither the weight nor the graph before the hidden states, by whichever argument it came."""
    kept: list[weakref.ref[Tensor]] = []
    options: list[dict[str, Any]] = [{"shift": True}, {"linear_bias": torch.ones(11), "weight": torch.ones(11)}]
    options += [{"logit_scale": torch.tensor(0.5), "num_items": torch.tensor(3.0)}, {"token_weight": torch.ones(2, 5)}]
    gc.disable()
    try:
        for more in options:
            for _ in range(4):
                given = {name: x.clone() if isinstance(x, Tensor) else x for name, x in more.items()}
                model, weight = torch.nn.Linear(6, 6), torch.randn(11, 6, requires_grad=True)
                hidden, target = model(torch.randn(2, 5, 6)), torch.randint(0, 11, (2, 5))
                lowtide.linear_cross_entropy(hidden, weight, target, **given).backward()
                tensors = [model.weight, weight, hidden, target, *(x for x in given.values() if isinstance(x, Tensor))]
                kept += map(weakref.ref, tensors)
                del given, model, weight, hidden, target, tensors
        assert not any(one() is not None for one in kept)
    finally:
        gc.enable()


def test_a_checked_tensor_by_itself_is_made_each_time() -> None:
    checked = Checked(lambda x: (x, x.shape))
    for _ in range(3):
        x = torch.randn(3)
        assert checked(x)[0] is x


def test_a_long_call_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MOST_STEPS", 20)
    runs = []

    def chain(x: Tensor, length: int) -> tuple[Tensor, ...]:
        runs.append(length)
        for _ in range(length):
            x = x + 1
        return (x,)

    replayed = Replayed(chain)
    for length in (20, 21):
        for call in range(4):
            assert torch.equal(*replayed(torch.full((3,), float(call)), length), torch.full((3,), float(call + length)))
    assert runs == [20] * 2 + [21] * 4


def test_one_tensor_as_two_arguments_and_then_two() -> None:
    """As in a contrastive loss: of some vectors among themselves, then among others."""
    a, b, y = torch.randn(5, 4), torch.randn(5, 4), torch.arange(5)
    for weight in (a, b, a):
        got = lowtide.linear_cross_entropy(a, weight, y)
        torch.testing.assert_close(got, torch.nn.functional.cross_entropy(a @ weight.T, y))


def test_numbers_checked_in_inference_mode_are_not_saved_for_backward() -> None:
    x, weight, y = torch.randn(5, 4), torch.randn(7, 4, requires_grad=True), torch.arange(5)
    more: dict[str, Any] = {"logit_scale": 0.5, "options": lowtide.HeadOptions(gradient="recompute")}
    with torch.inference_mode(), torch.enable_grad(), pytest.raises(RuntimeError, match="Inference tensors"):
        lowtide.linear_cross_entropy(x, weight, y, **more)
    lowtide.linear_cross_entropy(x, weight, y, **more).backward()
    assert weight.grad is not None
