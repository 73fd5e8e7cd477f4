"""Log-probabilities over sets of classes: targets outside, empty sets, what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from head.kernel_plans import use_set_kernels
from lowtide import HeadOptions, TokenStats, linear_logprobs, linear_token_stats
from lowtide.errors import LowtideError
from lowtide.measure.allocations import track_allocations
from promises import promise
from support import counted_flop, every_pair, head, in_float64, mask_of_ids, relative_error, sets_oracle

pytestmark = [promise("options"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # the interpreter's NumPy
WANT = ("logprob", "entropy", "lse", "argmax", "sum_sq_prob", "is_top1")
FORMS = ("padded", "shared")
N, D, V, K = 17, 24, 61, 9


@pytest.fixture(params=[False, True], ids=["torch", "kernels"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str] | None:
    """With kernels, in Triton's interpreter, in tiles smaller than a row and a set: the names of those called."""
    return use_set_kernels(monkeypatch) if request.param else None


def sets_of(form: str) -> tuple[Tensor, Tensor]:
    """Return sets with repetitions, pads among the ids and an empty one, in one form; and bool [N, V]."""
    ids = torch.randint(0, V, (N, K))
    ids[:, 3] = ids[:, 0]
    ids[torch.rand(N, K) < 0.3] = -1
    ids[4] = -1
    ids[0, 1:3] = torch.tensor([5, 5])
    ids = ids[:3].reshape(-1) if form == "shared" else ids
    return ids, mask_of_ids(ids.expand(N, -1), V)


def targets(mask: Tensor, T: int | None) -> Tensor:
    """Return classes most of which are in the sets, some outside, some ignored."""
    y = torch.multinomial(mask.double() + 0.02, T or 1, replacement=True)
    y[torch.rand(y.shape) < 0.2] = -100
    y[0] = mask[0].nonzero()[0, 0]
    return y if T else y[:, 0]


def total(stats: dict[str, Tensor]) -> Tensor:
    """Return one number that is finite where a target is outside of its set, or a set is empty."""
    chosen = [stats[name] for name in ("logprob", "entropy", "lse") if name in stats]
    return torch.stack([((i + 1) * x.masked_fill(x == -torch.inf, 0).sin()).sum() for i, x in enumerate(chosen)]).sum()


def found(stats: TokenStats) -> dict[str, Tensor]:
    return {name: value for name, value in stats._asdict().items() if value is not None}


@every_pair(
    form=FORMS,
    T=[None, 3],
    dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16],
    more=[{}, {"softcap": 1.5}, {"logit_scale": 0.7}, {"softcap": 2.0, "logit_scale": torch.tensor(-1.3)}],
    options=[HeadOptions(), HeadOptions(workspace_mib=1e-3)],
)
def test_values_and_gradients(
    form: str, T: int | None, dtype: torch.dtype, more: dict[str, Any], options: HeadOptions, kernels: list[str] | None
) -> None:
    """NaN in all other rows of the weight and in their bias: they are not read."""
    if kernels is not None and dtype != torch.float32:
        pytest.skip("the interpreter's products in bfloat16 are wrong")
    (x, w, b, _), (support, mask) = head(N, D, V, dtype=dtype), sets_of(form)
    y = targets(mask, T)
    true = in_float64({"input": x, "linear_weight": w, "linear_bias": b})
    want = sets_oracle(target=y, mask=mask, **true, **more)
    exact = torch.autograd.grad(total(want), list(true.values()))
    with torch.no_grad():
        w[~mask.any(0)], b[~mask.any(0)] = torch.nan, torch.nan
    got = found(linear_token_stats(x, w, y, want=WANT, linear_bias=b, support=support, options=options, **more))
    bound = {torch.float64: 1e-11, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert set(got) == set(want)
    for name, value in want.items():
        finite = value != -torch.inf
        assert torch.equal(got[name] != -torch.inf, finite), name
        if value.is_floating_point():
            assert relative_error(got[name][finite], value[finite]) < bound, name
        elif name == "outside" or bound < 1e-4:
            assert torch.equal(got[name], value), name
    for g, e in zip(torch.autograd.grad(total(got), [x, w, b]), exact, strict=True):
        assert relative_error(g, e) < 3 * bound
    if kernels is not None and "softcap" not in more:
        assert set(kernels) == {"score", "input_grad", "weight_grad"}


@promise("layouts")
def test_shapes_and_empty_sets() -> None:
    """Leading axes, none at all, one target beside several, sets of length 0 and tokens that are not there."""
    x, w, _, y = head((2, 3, 5), D, V)
    ids = torch.randint(0, V, (2, 3, 5, 4), dtype=torch.int32)
    whole = linear_logprobs(x, w, ids.long(), support=ids)
    assert whole.shape == (2, 3, 5, 4)
    flat = linear_logprobs(x.view(30, D), w, ids.view(30, 4).long(), support=ids.view(30, 4))
    assert torch.equal(flat.view(2, 3, 5, 4), whole)
    one = linear_logprobs(x[0, 0, 0], w, ids[0, 0, 0, 1].long(), support=ids[0, 0, 0])
    torch.testing.assert_close(one, whole[0, 0, 0, 1])
    for empty in (ids[..., :0], ids.new_zeros(0), torch.full((5,), -1)):
        stats = linear_token_stats(x, w, y, want=("logprob", "entropy", "lse", "argmax"), support=empty)
        assert (stats.lse == -torch.inf).all()
        assert (stats.logprob == -torch.inf).all()
        assert (stats.entropy == 0).all()
        assert (stats.argmax == -1).all()
        assert stats.outside == 30
        assert not any(g.any() for g in torch.autograd.grad(total(found(stats)) + stats.lse.exp().sum(), [x, w]))
    for support in (ids[:0], ids[0, 0, 0]):
        value = linear_logprobs(x[:0], w, y[:0], support=support)
        assert value.shape == (0, 3, 5)
        assert not torch.autograd.grad(value.sum(), w)[0].any()
    assert list(found(linear_token_stats(x, w, want=("entropy",), support=ids))) == ["entropy"]


@promise("memory")
def test_no_memory_of_the_vocabulary_and_no_gemm() -> None:
    """Frozen, in 2 MiB beside a weight of 40; and the bound of the options."""
    x, w, _, _ = head(64, 512, 20000)
    ids = torch.randint(0, 20000, (64, 40))
    for mib in (2, 8):
        with track_allocations() as seen:
            linear_logprobs(x, w.detach(), ids, support=ids, options=HeadOptions(workspace_mib=mib)).sum().backward()
        saved_and_gradient = x.grad.nbytes + 64 * 40 * 30
        assert seen.peak_bytes - saved_and_gradient < mib * 2**20
        x.grad = None
    (x, w, _, _), (support, _) = head(N, D, V), sets_of("padded")
    run = lambda: linear_token_stats(x, w, want=("entropy",), support=support).entropy.sum().backward()  # noqa: E731
    assert counted_flop(run) == [4 * 2 * N * K * D]


IDS = torch.zeros(N, 2).long()
ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"support": torch.full((N, 2), V)}, IndexError, "support: expected ids from 0 to 60"),
    ({"support": torch.full((N, 2), -2)}, IndexError, "support: expected ids"),
    ({"support": torch.tensor([1, V])}, IndexError, "support: expected ids"),
    ({"support": torch.zeros(N, 2)}, TypeError, "support: expected an integer dtype"),
    ({"support": torch.zeros(N, V, dtype=torch.bool)}, TypeError, "pass the ids where it is True"),
    ({"support": torch.zeros(N - 1, 2, dtype=torch.long)}, ValueError, "support: expected shape"),
    ({"support": torch.tensor(3)}, ValueError, "support: expected shape"),
    ({"support": (IDS,)}, TypeError, "support: expected a tensor of ids"),
    ({"support": IDS, "want": ("mean_logit",)}, ValueError, "want: expected"),
    ({"support": IDS, "topk": 2}, ValueError, "want: expected"),
    ({"support": IDS, "options": HeadOptions(backend="exp")}, RuntimeError, "backend: expected"),
    ({"support": IDS, "options": HeadOptions(gradient="forward")}, RuntimeError, "gradient: "),
    ({"support": IDS, "target": torch.full((N,), V)}, IndexError, "target: expected"),
    ({"support": torch.zeros(3).long(), "target": torch.full((N,), V)}, IndexError, "target: expected class indices"),
    ({"want": ("outside",)}, ValueError, "want: expected names"),
]


@promise("errors")
@pytest.mark.parametrize(("kwargs", "kind", "text"), ERRORS, ids=lambda value: "")
def test_errors(kwargs: dict[str, Any], kind: type[Exception], text: str) -> None:
    x, w, _, y = head(N, D, V)
    with pytest.raises(LowtideError, match=text) as error:
        linear_token_stats(x, w, **({"target": y} | kwargs))
    assert isinstance(error.value, kind)
