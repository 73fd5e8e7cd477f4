"""Policies, states on the host and plans, on a GPU: the same to the bit, the bytes, the copies beside the work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from gpu.conftest import ON_GPU, no_waits
from gpu.policy_runs import DETERMINISTIC, differences, model_and_ids
from lowtide.errors import UnsupportedError
from lowtide.measure.child import run_child
from lowtide.memory import ActivationPolicy, apply_policy, offload_optimizer
from memory.models import CountAttention, Plain, step
from promises import promise
from support import alone

pytest.importorskip("transformers")

from lowtide.bench.plan_check import check_plan
from lowtide.plan import plan_memory
from lowtide.plan.config import read_settings

pytestmark = [*ON_GPU, promise("policies")]


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_same_to_the_bit(backend: str) -> None:
    """With dropout inside attention and after it, and offloaded or not: kernels that are called once move no mask."""
    found = run_child(differences, backend, env=DETERMINISTIC)
    assert "failed" not in found, found
    for case, (unlike, calls) in found.items():
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
    assert_close(model, want[1])


def assert_close(model: Plain, gradients: dict[str, torch.Tensor]) -> None:
    """Compare as norms: attention's backward adds up in any order."""
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert (p.grad - gradients[name]).norm() <= 1e-2 * gradients[name].norm(), name


@promise("host")
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


def test_backward_on_another_stream() -> None:
    """Copies that are slow beside a stream that is not the one forward ran on: nothing is overwritten."""
    model, ids = model_and_ids(4, 256, 700)
    apply_policy(model, ActivationPolicy(keep="input", offload=True))
    want = step(model, ids)
    other = torch.cuda.Stream()
    for _ in range(3):
        model.zero_grad()
        loss = model(ids)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            loss.backward()
            junk = [torch.full((700 * 256,), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(40)]
        torch.cuda.current_stream().wait_stream(other)
        del junk
        assert torch.equal(loss, want[0])
        assert_close(model, want[1])


OFFLOADS = pytest.mark.usefixtures("small")
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw-capturable": lambda p: torch.optim.AdamW(p, lr=1e-3, capturable=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for the tests' models."""
    monkeypatch.setattr("lowtide.memory.optimizer.MIN_BYTES", 1024)
    monkeypatch.setattr("lowtide.memory.optimizer.BLOCK_BYTES", 8 * 2**20)


def states(optimizer: Optimizer) -> list[Tensor]:
    return [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]


def step_both(models: tuple[Any, ...], optimizers: tuple[Optimizer, ...]) -> None:
    """Step with the same random gradients: attention's backward adds up in any order."""
    for each in zip(*(model.parameters() for model in models), strict=True):
        gradient = torch.randn_like(each[0])
        for p in each:
            p.grad = gradient.clone()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x.cuda(), y.cuda()) for x, y in zip(a, b, strict=True))


def trained(optimizer: str = "adamw-fused", layers: int = 6, D: int = 512, T: int = 2048, **kwargs: Any) -> Any:
    """Return a model, tokens, its optimizer and the handle, after one step."""
    model, ids = model_and_ids(layers, D, T)
    made = OPTIMIZERS[optimizer](model.parameters())
    handle = offload_optimizer(made, model, **kwargs)
    model(ids).backward()
    made.step()
    made.zero_grad()
    return model, ids, made, handle


@OFFLOADS
@pytest.mark.parametrize(("name", "late"), [*((name, False) for name in OPTIMIZERS), ("adamw-fused", True)])
def test_offloaded_states_are_the_same_to_the_bit(name: str, late: bool) -> None:
    model, ids = model_and_ids(6, 1024, 1024)
    stock = copy.deepcopy(model)
    ours, theirs = (OPTIMIZERS[name](m.parameters()) for m in (model, stock))
    handle = offload_optimizer(ours, model, late=late)
    for _ in range(6):
        model(ids).backward()
        step_both((model, stock), (ours, theirs))
    assert handle.host_bytes >= handle.offloaded_bytes > 0
    assert equal(list(model.parameters()), list(stock.parameters()))
    assert equal(states(ours), states(theirs))


@OFFLOADS
@promise("host")
def test_offloaded_states_do_not_make_the_host_wait() -> None:
    model, ids, optimizer, _ = trained(D=256, T=256)
    model(ids).backward()
    optimizer.step()
    with no_waits():
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()


@OFFLOADS
def test_an_optimizer_that_goes_while_its_copies_run() -> None:
    """Memory that a copy writes to may not serve others before."""
    for _ in range(4):
        model, ids, optimizer, handle = trained(D=1024, T=128)
        model(ids).backward()
        del optimizer, handle
        fresh = [torch.full((2**20,), 3.0, device="cuda") for _ in range(40)]
        assert all(bool((x == 3).all()) for x in fresh)


@OFFLOADS
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_captured_step_is_refused() -> None:
    _, _, optimizer, _ = trained("adamw-capturable", D=256, T=256)
    torch.cuda.synchronize()
    with pytest.raises(UnsupportedError, match="outside of CUDA graphs"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


DTYPE = "bfloat16"  # the temporaries of autocast were never calibrated on a GPU
SETTINGS: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 5,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False,
}  # fmt: skip


@promise("plans")
@pytest.mark.parametrize(("share", "host_gib"), [(0.02, 0), (0.7, 0), (0.3, 4), (1.0, 4)])
def test_a_step_takes_what_is_planned(share: float, host_gib: float) -> None:
    settings = read_settings(SETTINGS)
    front = plan_memory(settings, 8192, 1, host_gib=host_gib, dtype=DTYPE).search.front
    budget = front[0].peak + share * (front[-1].peak - front[0].peak)
    plan = plan_memory(settings, 8192, 1, budget / 2**30, host_gib, dtype=DTYPE)
    checked = check_plan(settings, plan, warm=1, steps=1)
    assert checked["peak_gib"] == pytest.approx(plan.peak_bytes / 2**30, rel=0.03)


@promise("plans")
@pytest.mark.parametrize("late", [False, True])
def test_a_step_with_offloaded_states_takes_what_is_planned(late: bool) -> None:
    """At the leanest and at a middling budget, states that come back with the layers or behind them."""
    settings = read_settings(SETTINGS)
    front = plan_memory(settings, 16384, 1, host_gib=24, dtype=DTYPE).search.front
    found = [one for one in front if one.states and one.late == late]
    for one in (found[0], found[len(found) // 2]):
        plan = plan_memory(settings, 16384, 1, one.peak / 2**30, 24, dtype=DTYPE)
        assert plan.chosen.states > 0
        checked = check_plan(settings, plan, warm=2, steps=2)
        assert checked["peak_gib"] == pytest.approx(plan.peak_bytes / 2**30, rel=0.03)
        assert not alone() or checked["seconds"] == pytest.approx(plan.seconds, rel=0.2)
