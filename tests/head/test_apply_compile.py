"""linear_apply with compile=True: fn alone is compiled, once for any number of rows; and inside a compiled model."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from lowtide import HeadOptions, linear_apply, plan_head
from lowtide.errors import UnsupportedError
from lowtide.head.function import function as apply_function
from lowtide.head.lengths import evenly
from lowtide.head.matmul import slices
from support import assert_same_gradients, head

# torch.compile warns of what it does itself, when inductor first loads and when it follows an autograd.Function
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def focal(z: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
    logp = -F.cross_entropy(z, y, reduction="none")
    return -((1 - logp.exp()) ** gamma) * logp


def focal_sum(z: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
    return focal(z, y, gamma).sum()


FUNCTIONS = {"token": focal, "sum": focal_sum}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    apply_function.compiled.cache_clear()


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Compile with this in place of inductor, and count the graphs."""
    counting = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    return counting


@pytest.mark.parametrize("out", FUNCTIONS)
def test_inductor_compiles_pieces_of_unequal_size_once(out: str) -> None:
    """Forward and backward, for pieces of 1 row and more, and of a row more or less."""
    from torch._dynamo.utils import counters

    counters.clear()
    rows: set[int] = set()
    fn = FUNCTIONS[out]
    _, w, b, _ = head(1, 8, 33)
    gamma = torch.tensor(1.5, requires_grad=True)
    for N, workspace_mib in (*((N, 0.02) for N in (23, 24, 1, 2, 3, 0)), (57, 0.03), (64, None)):
        x, _, _, y = head(N, 8, 33)
        options = HeadOptions(workspace_mib=workspace_mib)
        rows |= {part.stop - part.start for part in _pieces(N, 8, 33, options)}
        loss = linear_apply(fn, x, w, y, linear_bias=b, params=(gamma,), out=out, compile=True, options=options)
        assert_same_gradients(loss.sum(), fn(F.linear(x, w, b), y, gamma).sum(), (x, w, b, gamma), bound=1e-5)
    assert len(rows) > 3
    assert apply_function.compiled.cache_info().currsize == 1
    assert counters["stats"]["unique_graphs"] == 1
    assert sum(counters["graph_break"].values()) == 0
    assert counters["aot_autograd"]["ok"] == counters["aot_autograd"]["total"] == 1


def _pieces(N: int, D: int, V: int, options: HeadOptions) -> list[slice]:
    plan = plan_head(N, D, V, torch.float32, "cpu", options, function=True)
    lengths = [part.stop - part.start for part in slices(N, plan.chunk_rows)]
    return [piece for C in lengths for piece in slices(C, evenly(C, plan.piece_rows))]


def test_masks_and_leading_axes_compile_once_too(counter: CompileCounterWithBackend) -> None:
    _, w, _, _ = head(1, 8, 33)
    for leading in ((21,), (3, 40), (2, 5, 9)):
        x, _, _, y = head(leading, 8, 33)
        a = torch.rand(*leading, 33)
        for mask in (None, torch.rand(leading) < 0.7):
            got = linear_apply(
                _weighted, x, w, y, a, mask=mask, compile=True, options=HeadOptions(workspace_mib=0.05)
            )  # fmt: skip
            want = _weighted(F.linear(x, w).view(-1, 33), y.flatten(), a.reshape(-1, 33)).view(leading)
            want = want if mask is None else want.where(mask, 0)
            torch.testing.assert_close(got, want)
            assert counter.frame_count == 1, "token arguments are copies in one call and views in another"


def _weighted(z: Tensor, y: Tensor, a: Tensor) -> Tensor:
    return (z.log_softmax(-1) * a).sum(-1) + y


def test_a_function_is_compiled_once() -> None:
    module = torch.nn.Softmax(-1)
    for fn in (focal, module, partial(focal)):
        assert apply_function.compiled(fn) is apply_function.compiled(fn)
    assert apply_function.compiled(module.forward) is apply_function.compiled(module.forward), (
        "made anew by each access"
    )


def test_keyword_defaults_survive_compiling(counter: CompileCounterWithBackend) -> None:
    def fn(z: Tensor, power: int = 2, *, factor: float = 3.0) -> Tensor:
        return (z**power).sum(-1) * factor

    x, w, _, _ = head(9, 8, 33)
    torch.testing.assert_close(linear_apply(fn, x, w, compile=True), 3 * F.linear(x, w).square().sum(-1))
    assert counter.frame_count == 1


def test_a_closed_over_tensor_is_noticed_when_compiled_too(counter: CompileCounterWithBackend) -> None:
    x, w, _, _ = head(9, 8, 33)
    outside = torch.rand(5, 2, requires_grad=True)
    for closed in (outside, outside.exp()):
        with pytest.raises(ValueError, match=r"shape \[5, 2\].*params"):
            linear_apply(lambda z, closed=closed: z.sum(-1) * closed.sum(), x, w, compile=True)


def test_what_cannot_be_compiled_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_graph: object, _inputs: object) -> None:
        raise RuntimeError("no compiler\nfound")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    x, w = torch.randn(9, 4), torch.randn(7, 4)
    with pytest.raises(UnsupportedError, match=r"^compile: .* no compiler. Leave compile=True out") as raised:
        linear_apply(lambda z: z.logsumexp(-1), x, w, compile=True)
    assert "\n" not in str(raised.value)
