"""The loss as users write it: value and gradients against float64, the memory of each form, whole steps with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench import harness, loss_peers, step, ways
from lowtide.bench.chunked_losses import (
    IGNORED,
    ToGradient,
    checkpointed,
    gradients_in_forward,
    projected_first,
    reduced,
    softmax_in_place,
    token_losses,
)
from lowtide.bench.harness import CannotError, Peer
from lowtide.bench.loss_peers import PEERS, loss_on
from lowtide.bench.task import relative_error
from lowtide.bench.train_config import StepBenchConfig
from lowtide.bench.way import CHUNKED, GPU_ALONE, HEADS, TORCHTUNE, Way
from lowtide.cli import main
from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.measure.timing import peak_above
from lowtide.train.shapes import SHAPES

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def in_forward(chunks: int, to_gradient: ToGradient) -> Loss:
    return lambda x, w, y: gradients_in_forward(chunks, to_gradient, x, w, y)


def by_triton() -> ToGradient:
    return partial(pytest.importorskip("lowtide.bench.chunk_kernel").gradient_in_place, ignored=IGNORED)


def by_autograd(form: Any, chunks: int) -> Loss:
    return lambda x, w, y: reduced(form(chunks, token_losses, x, w, y), y, "mean")


FORMS: dict[str, Callable[[int], Loss]] = {
    "checkpoint": lambda chunks: by_autograd(checkpointed, chunks),
    "torchtune": lambda chunks: by_autograd(projected_first, chunks),
    "forward": lambda chunks: in_forward(chunks, softmax_in_place),
    "forward-triton": lambda chunks: in_forward(chunks, by_triton()),
}


def problem(N: int, D: int, V: int, dtype: torch.dtype, *, ignored: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(D, N).to(dtype).T  # not contiguous
    w, y = (3 * torch.randn(V, D) / D**0.5).to(dtype), torch.randint(0, V, (N,))
    y[:ignored] = IGNORED
    return x.detach().requires_grad_(), w.requires_grad_(), y


def naive(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.T).to(torch.promote_types(x.dtype, torch.float32)), y)


def found(loss: Loss, x: Tensor, w: Tensor, y: Tensor, upstream: float = 0.7) -> tuple[Tensor, Tensor, Tensor]:
    x, w = (leaf.detach().requires_grad_() for leaf in (x, w))
    value = loss(x, w, y)
    (value * upstream).backward()
    assert x.grad is not None
    assert w.grad is not None
    return value.detach()[None], x.grad, w.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("N", "chunks", "ignored"), [(37, 8, 0), (37, 1, 11), (5, 16, 2)])
@pytest.mark.parametrize("form", FORMS)
def test_value_and_gradients(form: str, N: int, chunks: int, ignored: int, dtype: torch.dtype) -> None:
    x, w, y = problem(N, 24, 301, dtype, ignored=ignored)
    true = found(naive, x.double(), w.double(), y)
    baseline = found(naive, x, w, y)
    got = found(FORMS[form](chunks), x, w, y)
    for exact, same_dtype, value in zip(true, baseline, got, strict=True):
        error = relative_error(value, exact)
        assert error <= 3 * relative_error(same_dtype, exact) + 8 * torch.finfo(torch.float32).eps, form
    for gradient, leaf in zip(got[1:], (x, w), strict=True):
        assert gradient.dtype == leaf.dtype
    assert not got[1][:ignored].any()


def test_what_the_kernel_writes_is_the_softmax_of_long_rows_too() -> None:
    kernel = by_triton()
    z, y = 4 * torch.randn(3, 9001), torch.tensor([9000, IGNORED, 0])
    losses = torch.full((3,), torch.nan)
    exact = z.double().softmax(1)
    exact[[0, 2], y[[0, 2]]] -= 1
    exact[1] = 0
    expected = F.cross_entropy(z.double(), y, reduction="none")
    assert kernel(z, y, torch.tensor(0.25), losses) is z
    assert relative_error(z, exact / 4) < 1e-5
    assert relative_error(losses[:, None], expected[:, None]) < 1e-6


@pytest.mark.parametrize(("form", "chunk_logits"), [("forward", 2.3), ("checkpoint", 4.5)])
def test_one_chunk_of_logits_at_a_time(form: str, chunk_logits: float) -> None:
    N, V, chunks = 128, 4096, 8
    x, w, y = problem(N, 8, V, torch.float32)
    run = partial(found, FORMS[form](chunks), x, w, y)
    run()
    assert peak_above(run, "cpu") <= 4 * V * (chunk_logits * N / chunks + 3 * 8)


def test_torchtune_saves_all_logits_in_their_dtype() -> None:
    N, V = 128, 4096
    x, w, y = problem(N, 8, V, torch.bfloat16)
    run = partial(found, FORMS["torchtune"](16), x, w, y)
    run()
    assert peak_above(run, "cpu") >= 2 * N * V


def test_peers_of_the_mean_say_so() -> None:
    head = SimpleNamespace(setting=SimpleNamespace(reduction="none", wide=False), device=torch.device("cpu"))
    for name in ("forward-8", "auto-chunker"):
        with pytest.raises(CannotError, match="no reduction none"):
            loss_peers.LOSSES[name](head)  # type: ignore[arg-type]
    head.setting = SimpleNamespace(reduction="mean", wide=True)
    with pytest.raises(CannotError, match="autocast"):
        loss_peers.LOSSES["forward-8"](head)  # type: ignore[arg-type]


def test_a_package_that_is_missing_comes_with_what_to_install() -> None:
    def build(_: object) -> object:
        raise ModuleNotFoundError("No module named 'quack'")

    with pytest.raises(CannotError, match=r"ModuleNotFoundError: No module named 'quack'\. pip install 'a\[b\]'"):
        Peer("quack", build, "a", "a[b]").built(None)
    assert PEERS["liger-sm90"].install == "liger-kernel[cutedsl]"
    assert PEERS["liger-sm90"].package == "liger-kernel"
    assert PEERS["quack"].install == "quack-kernels"


def test_a_peer_that_ran_once_is_able() -> None:
    config = SimpleNamespace(requested=lambda: {"a", "b", "c"})
    unable = {"failed": "no", "unsupported": True}
    rows = [{"name": "a", **unable}, {"name": "a"}, {"way": "b", **unable}, {"name": "c", "failed": "broken"}]
    assert harness.cannot_run(config, rows) == {"b": "no"}  # type: ignore[arg-type]


@pytest.mark.parametrize("operators", [[], ["_linear_cross_entropy_batch_chunked"]])
def test_each_call_switches_the_cute_kernel(operators: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    off: set[str] = set()
    switched: list[str] = []

    def switch(change: Callable[[str], None], *names: str) -> None:
        switched.extend(names)
        for name in names:
            change(name)

    native = SimpleNamespace(
        get_dsl_operations=lambda _: [*operators, "topk"],
        is_operation_disabled=off.__contains__,
        enable_operations=partial(switch, off.discard),
        disable_operations=partial(switch, off.add),
    )
    monkeypatch.setitem(sys.modules, "torch.backends.python_native", native)
    monkeypatch.setattr(torch.nn, "LinearCrossEntropyOptions", SimpleNamespace, raising=False)
    monkeypatch.setattr(F, "linear_cross_entropy", lambda *_, **__: sorted(off), raising=False)
    monkeypatch.setattr(loss_peers, "needs_cuda", lambda _: None)
    x, w, y = problem(3, 2, 5, torch.float32)
    without = loss_on("torch", w)
    if not operators:
        with pytest.raises(CannotError, match=r"Install torch 2\.15 or newer"):
            loss_on("torch-cutedsl", w)
        assert without(x, w, y, "mean") == []
        return
    with_it = loss_on("torch-cutedsl", w)
    for loss in (without, without, with_it, with_it, without):
        assert loss(x, w, y, "mean") == ([] if loss is with_it else operators)
    assert switched == 3 * operators
    del loss, without
    assert not off, "on again"


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.slow
def test_inductors_chunks_are_counted() -> None:
    x, w, y = problem(2048, 64, 2000, torch.float32)
    x = x.contiguous()  # else it does not chunk
    loss = loss_on("auto-chunker", w)
    got, true = found(lambda *args: loss(*args, "mean"), x, w, y), found(naive, x, w, y)
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(got, true, strict=True))
    for _ in range(2):  # again, and for another number of tokens
        few = problem(64, 64, 2000, torch.float32)
        with pytest.raises(CannotError, match="has not chunked"):
            loss(*few, "mean")
        assert not torch.compiler.config.force_disable_caches
    assert relative_error(loss(x, w, y, "mean").detach()[None], true[0]) < 1e-5


@pytest.mark.parametrize(
    ("name", "impl", "policy"),
    [
        ("torch-cutedsl-all", "torch-cutedsl", "all"), ("torchtune-16", "torchtune-16", "input"),
        ("torchtune-1:all", "torchtune-1", "all"), ("checkpoint-8-all", "checkpoint-8", "all"),
        ("forward-triton-8:attention", "forward-triton-8", "attention"),
        ("checkpoint-compile-8-input-offload", "checkpoint-compile-8", "input-offload"), ("stock-all", "stock", "all"),
    ],
)  # fmt: skip
def test_ways_by_name(name: str, impl: str, policy: str) -> None:
    way = Way.named(name)
    assert (way.impl, way.policy) == (impl, policy)
    assert way.compiles_layers == (impl in TORCHTUNE)


def test_ways_that_are_none() -> None:
    for wrong in ("torchtune-3", "forward", "torchtune-8-attention", "torchtune-8:2xall"):
        with pytest.raises(ArgumentValueError):
            Way.named(wrong)
    assert {*CHUNKED, "quack", "liger-sm90", "torch", "auto-chunker", "trl"} <= set(HEADS) <= set(PEERS)
    assert {f"{head}{saved}" for head in HEADS for saved in ("", "-all")} <= set(StepBenchConfig.known["ways"])


@pytest.mark.parametrize("name", ["checkpoint-8", "forward-8-all", "torchtune-8", "torchtune-2-all", "trl", "torch"])
def test_a_step_with_the_loss_is_the_same_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "trl":
        pytest.importorskip("trl")
    if name == "torch" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("an older torch")
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    rows = {}
    for way in ("stock", name):
        sizes = {"tokens": ("33",), "model": "lowtide-small", "batch": 2, "warm": 1, "reps": 1}
        config = StepBenchConfig(**sizes, dtype="float32", device="cpu")  # type: ignore[arg-type]
        (rows[way],) = step.rows_of(way, config)
        assert "failed" not in rows[way], rows[way]
    assert rows[name]["losses"] == pytest.approx(rows["stock"]["losses"], rel=1e-4)
    layers = SHAPES["lowtide-small"]["num_hidden_layers"]
    ours = [function for function in compiled if function.__name__ in ("forward", "token_losses")]
    assert len(ours) == (1 + layers if name.startswith("torchtune") else 0)


def test_a_way_that_does_not_run_here_says_why(tmp_path: Path) -> None:
    command = "bench step --tokens 16 --model lowtide-small --policy all --device cpu --warm 0 --reps 1 --peer"
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    config = StepBenchConfig(tokens=("16",), model="lowtide-small", dtype="float32", device="cpu")
    for name in GPU_ALONE:
        (row,) = step.rows_of(name, config)
        assert row["unsupported"], name
        assert "GPUs only" in row["failed"] or "pip install" in row["failed"], row
    assert main([*command.split(), "forward-triton-8", "--output", str(tmp_path)]) == 1


def test_a_model_with_capped_logits_is_refused(tmp_path: Path) -> None:
    shape = {**SHAPES["lowtide-small"], "model_type": "gemma2", "vocab_size": 99, "head_dim": 32}
    shape["final_logit_softcapping"] = 0.01
    file = tmp_path / "gemma2.json"
    file.write_text(json.dumps(shape))
    with pytest.raises(UnsupportedError, match="scaled, capped or biased"):
        ways.build_way(Way.named("checkpoint-8"), str(file), torch.float32, torch.device("cpu"), seed=0)
