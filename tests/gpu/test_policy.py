"""What layers keep, on a GPU: the same to the bit, the bytes, the copies beside the computing, and no leak."""

from __future__ import annotations

import copy
import functools
import gc
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.conftest import no_waits, requested_bytes
from gpu.policy_runs import DETERMINISTIC, differences, model_and_ids
from lowtide.errors import UnsupportedError
from lowtide.measure.child import run_child
from lowtide.measure.timing import peak_above, time_side_by_side
from lowtide.memory import ActivationPolicy, apply_policy, copies, offload, remove_policy
from memory.models import CountAttention, Plain, step
from support import alone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

KEEPS = ("attention", "input")


@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_same_to_the_bit(backend: str, dropout: bool) -> None:
    """With dropout inside attention and after it, and offloaded or not: kernels that are called once move no mask."""
    ended = run_child(differences, backend, dropout=dropout, env=DETERMINISTIC)
    assert ended.returncode == 0, ended.stderr
    for case, (unlike, calls) in ended.value.items():
        assert unlike == [], case
        assert calls == {"attention 1": 7, "input 1": 14, "input 3": 3 * 7 - 3}[case.rpartition(" ")[0]], case


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_every_fused_attention_is_kept(backend: str) -> None:
    model, ids = model_and_ids(4, 256, 700)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        want = step(model, ids)
        apply_policy(model, ActivationPolicy(keep="attention"))
        with CountAttention() as counted:
            got = step(model, ids)
    assert counted.calls == 4
    assert torch.equal(got[0], want[0])
    for name, gradient in got[1].items():  # attention's backward adds up in any order
        assert (gradient - want[1][name]).norm() <= 1e-2 * want[1][name].norm(), name


def test_the_math_path_is_refused() -> None:
    model, ids = model_and_ids(4, 256, 100)
    apply_policy(model, ActivationPolicy(keep="attention"))
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(UnsupportedError, match="fused attention operator"):
        step(model, ids)


def live_after_forward(model: Plain, ids: torch.Tensor) -> int:
    gc.collect()  # what other tests have left
    torch.cuda.synchronize()
    before = requested_bytes()
    loss = model(ids)
    live = requested_bytes() - before
    del loss
    return live


@pytest.mark.parametrize("keep", KEEPS)
def test_bytes_that_stay_after_forward(keep: Any) -> None:
    tokens, D, layers = 4096, 512, 9
    model, ids = model_and_ids(layers, D, tokens)
    live = {}
    for offloaded in (False, True):
        apply_policy(model, ActivationPolicy(keep=keep, offload=offloaded))
        step(model, ids)
        live[offloaded] = live_after_forward(model, ids)
    kept = 2 * D + (2 * D + 4 * D // 64) * (keep == "attention")
    assert live[False] >= layers * tokens * kept
    moved = (layers - offload.ON_DEVICE) * tokens * kept
    assert abs(live[False] - live[True] - moved) < 64 * 1024, (live, moved)


def test_peak_is_lower_and_the_copies_cost_little() -> None:
    """A step of a model whose layers compute for longer than their copies take."""
    layers, tokens, D = 8, 32768, 1024
    model, ids = model_and_ids(layers, D, tokens)
    steps = {}
    for offloaded in (False, True):
        own = copy.deepcopy(model)
        apply_policy(own, ActivationPolicy(keep="attention", offload=offloaded))
        steps[offloaded] = functools.partial(zero_and_step, own, ids)
    named = {str(offloaded): step for offloaded, step in steps.items()}
    times = {name: t.median_ms for name, t in time_side_by_side(named, "cuda", warm=2, reps=5).items()}
    peaks = {offloaded: peak_above(step, "cuda") for offloaded, step in steps.items()}
    moved = (layers - offload.ON_DEVICE) * tokens * (4 * D + 4 * D // 64)
    assert peaks[True] < peaks[False] - 0.5 * moved, (peaks, moved)  # gradients have grown where the peak is then
    assert not alone() or times["True"] < 1.15 * times["False"], times


def zero_and_step(model: Plain, ids: torch.Tensor) -> None:
    model.zero_grad()
    model(ids).backward()


@pytest.mark.parametrize("keep", KEEPS)
def test_a_hundred_steps_leak_nothing(keep: Any) -> None:
    model, ids = model_and_ids(6, 128, 512)
    report = apply_policy(model, ActivationPolicy(keep=keep, offload=True))
    step(model, ids)
    gc.collect()
    gc.disable()
    try:
        host, live = report.host_bytes, []
        for k in range(100):
            part = ids[:, : 512 - 13 * (k % 20)]
            model(part) if k % 7 == 6 else model(part).backward()
            model.zero_grad()
            live.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert report.host_bytes == host > 0
    assert max(live[50:]) <= max(live[:50])
    remove_policy(model)
    assert report.host_bytes == 0


@pytest.mark.parametrize(
    ("keep", "every", "offloaded"), [("attention", 1, False), ("attention", 1, True), ("input", 2, True)]
)
def test_no_host_synchronisation(keep: Any, every: int, offloaded: bool) -> None:
    model, ids = model_and_ids(6, 128, 512)
    apply_policy(model, ActivationPolicy(keep=keep, every=every, offload=offloaded))
    model(ids).backward()
    with no_waits():
        model(ids).backward()


def test_a_graph_that_goes_while_its_copies_run() -> None:
    """Its memory may not serve others before its copies have ended: what they write to would be overwritten."""
    model, ids = model_and_ids(6, 1024, 8192)
    apply_policy(model, ActivationPolicy(keep="input", offload=True))
    want = step(model, ids)[0]
    for _ in range(5):
        loss = model(ids)
        torch.autograd.grad(loss, [model.head.weight], retain_graph=True)  # backward goes no further than the head
        del loss
        fresh = torch.full((8192, 1024), 3.0, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(step(model, ids)[0], want)
        assert bool((fresh == 3).all())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the compiler's own doing
def test_inside_torch_compile() -> None:
    """Attention's kernel is called once there as well."""
    model, ids = model_and_ids(3, 128, 512)
    stock = step(model, ids)
    for keep, calls in (("attention", 3), ("input", 6)):
        torch._dynamo.reset()
        apply_policy(model, ActivationPolicy(keep=keep))
        compiled = torch.compile(model)
        compiled(ids).backward()
        model.zero_grad()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as seen:
            loss = compiled(ids)
            loss.backward()
            torch.cuda.synchronize()
        names = [event.name for event in seen.events()]
        ran = sum("attention" in n and n.startswith("aten::_scaled") and "backward" not in n for n in names)
        assert ran == calls, (keep, sorted({n for n in names if "attention" in n}))
        assert abs(loss.item() - stock[0].item()) < 1e-2


def test_a_refused_lock_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    side = copies.Side(torch.device("cuda"))
    runtime = torch.cuda.cudart()

    class Twice:
        """Locks what it is asked to, and then once more, which the driver refuses."""

        def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
            assert int(runtime.cudaHostRegister(pointer, nbytes, flags)) == 0
            code = int(runtime.cudaHostRegister(pointer, nbytes, flags))
            runtime.cudaHostUnregister(pointer)
            return code

    monkeypatch.setattr(torch.cuda, "cudart", Twice)
    with pytest.raises(UnsupportedError, match="CUDA error 712"):
        side.pin(10_000)
    assert (torch.ones(3, device="cuda") + 1).tolist() == [2, 2, 2]  # a launch that looks for errors


def test_backward_on_another_stream() -> None:
    """Copies that are slow beside a stream that is not the one forward ran on: nothing is overwritten."""
    model, ids = model_and_ids(4, 256, 700)
    apply_policy(model, ActivationPolicy(keep="input", offload=True))
    want = step(model, ids)
    other = torch.cuda.Stream()
    for _ in range(3):
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(ids) if isinstance(model, Plain) else model(input_ids=ids, labels=ids).loss
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            loss.backward()
            junk = [torch.full((700 * 256,), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(40)]
        torch.cuda.current_stream().wait_stream(other)
        del junk
        assert torch.equal(loss, want[0])
        for name, p in model.named_parameters():
            if p.grad is not None:
                assert (p.grad - want[1][name]).norm() <= 1e-2 * want[1][name].norm(), name
