"""Calls repeated from a record: the same bits, new memory, freed as soon as before; and what is never repeated."""

import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.head.call import CrossEntropyArgs
from lowtide.replay import facts, program
from lowtide.replay import replayed as replaying
from lowtide.replay.checked import Checked
from lowtide.replay.replayed import Replayed


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "DEVICES", frozenset({"cpu"}))


class Counted:
    """A function whose Python runs are counted."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function, self.runs = function, 0

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        self.runs += 1
        return self.function(*args)


def views_and_writes(x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Write to views, of one's own memory only; return a view, and new memory."""
    out = x.new_empty(4, *x.shape)
    first, second = out[0], out[1:].view(3, -1)
    torch.mul(x, scale, out=first)
    second.copy_(torch.stack([y, y + 1, first]).view(3, -1))
    left, right = out.unbind()[2].split([1, x.shape[0] - 1])
    left.zero_()
    right.add_(torch.full((), scale))
    unused = x.new_empty(10**6)[3:]
    assert unused.numel()
    return out[2:], (out.sum(0) / out.flatten().amax()).to(torch.float64), x.new_zeros(0)


def drawn(*shape: int, **how: Any) -> Tensor:
    return torch.randn(*shape, **how)


def check_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


def test_the_third_call_runs_no_python_of_the_function_and_gives_the_same_bits() -> None:
    counted = Counted(views_and_writes)
    replayed = Replayed(counted)
    for call in range(5):
        x, y = drawn(7, 5), drawn(7, 5)
        check_same(replayed(x, y, 0.5), views_and_writes(x, y, 0.5))
        assert counted.runs == min(call + 1, 2)


@pytest.mark.parametrize(
    "other",
    [
        lambda: (drawn(6, 5), drawn(6, 5), 0.5),
        lambda: (drawn(7, 5), drawn(7, 5), 0.25),
        lambda: (drawn(5, 7).t(), drawn(7, 5), 0.5),
        lambda: (drawn(7, 5, dtype=torch.float64), drawn(7, 5, dtype=torch.float64), 0.5),
        lambda: (drawn(36)[1:].view(7, 5), drawn(7, 5), 0.5),
    ],
    ids=["shape", "scalar", "strides", "dtype", "address"],
)
def test_other_facts_are_another_call(other: Callable[[], tuple[Any, ...]]) -> None:
    counted = Counted(views_and_writes)
    replayed = Replayed(counted)
    for _ in range(3):
        replayed(drawn(7, 5), drawn(7, 5), 0.5)
    for calls in range(1, 4):
        args = other()
        check_same(replayed(*args), views_and_writes(*args))
        assert counted.runs == 2 + min(calls, 2)


def test_the_precision_of_float32_gemms_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(views_and_writes)
    replayed = Replayed(counted)
    for name, runs in (("highest", 2), ("high", 4), ("highest", 4), ("high", 4)):
        monkeypatch.setattr(facts, "matmul_precision", lambda name=name: name)
        for _ in range(3):
            replayed(drawn(7, 5), drawn(7, 5), 0.5)
        assert counted.runs == runs


def test_results_are_new_each_time_and_nothing_else_stays() -> None:
    replayed = Replayed(views_and_writes)
    args = drawn(7, 5), drawn(7, 5), 0.5
    results = [replayed(*args) for _ in range(4)]
    results[3][0].zero_()
    check_same(results[2], views_and_writes(*args))
    gone = [weakref.ref(x) for x in (*args[:2], *results[3])]
    del args, results
    gc.collect()
    assert not any(x() is not None for x in gone)


def test_memory_is_freed_after_its_last_use() -> None:
    sizes = []

    def chain(x: Tensor) -> tuple[Tensor, ...]:
        for _ in range(6):
            x = x * 2
        return (x,)

    replayed = Replayed(chain)
    x = drawn(2**18)
    for _ in range(3):
        with torch.profiler.profile(profile_memory=True) as profiled:
            replayed(x)
        now = highest = 0
        for event in profiled.profiler.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                highest = max(highest, now)
        sizes.append(highest)
    assert 0 < sizes[2] <= sizes[0] <= 2.1 * x.nbytes


def number_of(x: Tensor) -> tuple[Tensor, ...]:
    return (x * x.sum().item(),)


def size_of(x: Tensor) -> tuple[Tensor, ...]:
    return (x[x > 0],)


def kept_from_before(x: Tensor) -> tuple[Tensor, ...]:
    return (x + KEPT,)


def counted_up(x: Tensor) -> tuple[Tensor, ...]:
    return (torch.where(COUNT.add_(1) > 0, x, -x),)


KEPT, COUNT = torch.ones(3), torch.tensor(0.0)


@pytest.mark.parametrize("function", [number_of, size_of, kept_from_before, counted_up])
def test_what_depends_on_numbers_or_on_other_tensors_is_never_repeated(
    function: Callable[[Tensor], tuple[Tensor, ...]],
) -> None:
    counted = Counted(function)
    replayed = Replayed(counted)
    for call in range(4):
        x = drawn(3)
        check_same(replayed(x), function(x))
        assert counted.runs == call + 1


def test_one_tensor_as_two_arguments() -> None:
    replayed = Replayed(views_and_writes)
    x = drawn(7, 5)
    for args in [(x, x, 0.5)] * 3 + [(drawn(7, 5), drawn(7, 5), 0.5)] * 3 + [(x, x, 0.5)]:
        check_same(replayed(*args), views_and_writes(*args))


def test_a_number_on_the_host_is_read_each_time() -> None:
    def scaled(x: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        return (x * torch.empty((), dtype=x.dtype).fill_(number),)

    counted = Counted(scaled)
    replayed = Replayed(counted)
    for call in range(5):
        x = drawn(3)
        check_same(replayed(x, torch.tensor(float(call))), (x * call,))
    assert counted.runs == 2


def test_an_error_is_raised_each_time_and_another_call_works() -> None:
    def fails(x: Tensor, wrong: bool) -> tuple[Tensor, ...]:
        if wrong:
            raise ValueError("wrong")
        return (x + 1,)

    replayed = Replayed(fails)
    for _ in range(4):
        with pytest.raises(ValueError, match="wrong"):
            replayed(drawn(3), True)
    for _ in range(4):
        x = drawn(3)
        check_same(replayed(x, False), (x + 1,))


def test_autocast_does_not_reach_a_repeated_call() -> None:
    def product(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", enabled=False):
            return (x @ x,)

    replayed = Replayed(product)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            x = drawn(5, 5)
            (got,) = replayed(x)
            assert got.dtype == torch.float32


def test_from_several_threads() -> None:
    replayed = Replayed(views_and_writes)
    wrong: list[Any] = []

    def many(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x, y = (torch.randn(7, 5, generator=generator) for _ in range(2))
            try:
                check_same(replayed(x, y, 0.5), views_and_writes(x, y, 0.5))
            except AssertionError as error:
                wrong.append(error)

    threads = [threading.Thread(target=many, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_small_buffers_are_one_allocation_and_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches alone get them, as pointers."""
    launched: list[tuple[int, ...]] = []

    def compute(x: Tensor) -> tuple[Tensor, ...]:
        tape = facts.RECORDING.tape
        small, smaller, out = x.new_empty(100), x.new_empty(3, dtype=torch.int64), x.new_empty(5)
        if tape is not None:
            tape.launched(lambda *args: launched.append(args), (1, 1, 1, None, small, (smaller[1:], 7), out, x))
        return (out,)

    monkeypatch.setattr(program, "_stream_of", lambda device: 11)
    replayed = Replayed(compute)
    x = drawn(8)
    for _ in range(3):
        (out,) = replayed(x)
    ((*grid, stream, small, (smaller, seven), to, of),) = launched
    assert (grid, stream, seven) == ([1, 1, 1], 11, 7)
    assert (to, of) == (out.data_ptr(), x.data_ptr())
    assert abs(smaller - 8 - small) == 512


def test_checks_run_once_for_like_arguments() -> None:
    made = CrossEntropyArgs
    counted = Counted(lambda x, y, number, name: (made(x, weight=y), made(y), number, name))
    checked = Checked(counted)
    for _ in range(4):
        x, y = drawn(3, requires_grad=True), drawn(4)
        first, second, number, name = checked(x, y, 1, "a")
        assert first.target is x
        assert first.weight is y
        assert second.target is y
        assert (number, name, counted.runs) == (1, "a", 1)
    for again, args in enumerate([(x.detach(), y, 1, "a"), (x, y, True, "a"), (x, y, 1.0, "a"), (x, y, 1, "b")]):
        assert checked(*args)[2] is args[2]
        assert counted.runs == 2 + again
    with torch.no_grad():
        checked(x, y, 1, "a")
    assert counted.runs == 6
    for _ in range(2):
        assert checked(x, y, [], "a")[2] == []
    assert counted.runs == 8


def test_what_checks_make_anew_is_made_each_time() -> None:
    checked = Checked(lambda x, number: (CrossEntropyArgs(x * 2, weight=torch.tensor(number)),))
    for _ in range(3):
        x = drawn(3)
        ((target, weight, *_),) = checked(x, 2.0)
        assert torch.equal(target, x * 2)
        assert weight == 2


def test_an_argument_of_a_wrong_kind_is_named_each_time() -> None:
    x, w, y = drawn(3, 4), drawn(5, 4), torch.tensor([1, 2, 3])
    lowtide.linear_cross_entropy(x, w, y, softcap=1)
    for _ in range(3):
        with pytest.raises(TypeError, match="softcap"):
            lowtide.linear_cross_entropy(x, w, y, softcap=True)
        with pytest.raises(TypeError, match="softcap"):
            lowtide.linear_cross_entropy(x, w, y, softcap=[1])  # type: ignore[arg-type]
        lowtide.linear_cross_entropy(x, w, y, softcap=1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_of_the_head(reduction: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: without dropping ignored tokens, which would count them, or looking at targets."""
    monkeypatch.setattr("lowtide.head.call.Head.drops_tokens", False)
    monkeypatch.setattr("lowtide.head.terms.cross_entropy.looks_at_numbers", lambda device: False)
    written = Counted(replaying.program_of)
    monkeypatch.setattr(replaying, "program_of", written)
    options: list[dict[str, Any]] = [{}, {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "logit_scale": 0.5}]
    for more in options:
        for items in (None, 3.0, torch.tensor(5.0)) if reduction == "mean" else (None,):
            results = []
            for call in range(4):
                torch.manual_seed(7 if call != 2 else 8)
                x, w = (drawn(*s).to(dtype).requires_grad_() for s in ((2, 7, 6), (11, 6)))
                y = torch.randint(0, 11, (2, 7))
                y[0, :3] = -100
                loss = lowtide.linear_cross_entropy(x, w, y, reduction=reduction, num_items=items, **more)
                loss.backward(torch.ones_like(loss))
                results.append((loss.detach(), x.grad, w.grad))
            check_same(results[3], results[0])
            assert not torch.equal(results[2][0], results[0][0])
    assert written.runs


def test_small_buffers_share_memory_where_their_uses_do_not_overlap() -> None:
    """A launch's buffers lie in one allocation, which is no larger than what is in use at a time."""
    sizes = [700, 5000, 1200, 5000, 300]  # bytes of a chain of launches: each reads one buffer and writes the next
    steps = []
    for i, size in enumerate(sizes):
        made = program.Value(i, program.Pointer(i, 0))
        kwargs = {"dtype": torch.uint8, "device": torch.device("cpu")}
        steps.append(program.Step(function=torch.empty, args=((size,),), kwargs=kwargs, results=made, writes=False))
        read = (program.Pointer(i - 1, 0),) * (i > 0)
        steps.append(program.Step(function=drawn, args=(*read, program.Pointer(i, 0)), launch=True))
    places, size = program._arena(steps, set())
    rounded = [-(-n // program.ALIGNMENT) * program.ALIGNMENT for n in sizes]
    assert size == max(a + b for a, b in itertools.pairwise(rounded))
    ends = [(places[i], places[i] + n) for i, n in enumerate(rounded)]
    assert all(end <= begin or last <= start for (start, end), (begin, last) in itertools.pairwise(ends))
