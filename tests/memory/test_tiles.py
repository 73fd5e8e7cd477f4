"""Layers in tiles along the sequence: as near to float64 as stock, in the memory of a tile, and what is refused."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from lowtide.measure.allocations import track_allocations
from lowtide.memory import (
    ActivationPolicy,
    apply_policy,
    offload_weights,
    remove_policy,
    tile_attention,
    tiles,
    weights,
)
from lowtide.memory.policy import parse_policies, word_of
from lowtide.models import mlp_part, norm_part, rope_part
from memory.models import VOCAB, Layer, LazySide, Plain, assert_same, counted_step, layers_of, loss_of, stack_of, step
from memory.test_families import FAMILIES, build
from models import type_case
from support import relative_error

KEEPS = ["input", "attention"]
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks by an old name


def tiled(tokens: int, keep: str = "input", **more: Any) -> ActivationPolicy:
    return ActivationPolicy(keep=keep, tile_tokens=tokens, **more)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tiles of the layers that ran in tiles."""
    seen: list[int] = []
    run = tiles.LayerInTiles.run

    def noted(self: Any, *args: Any) -> Any:
        seen.append(len(self._tiles))
        return run(self, *args)

    monkeypatch.setattr(tiles.LayerInTiles, "run", noted)
    return seen


def assert_fair(
    model: Any, stock: Any, *batches: Tensor, floor: float = 1e-14, rounds: float = 2.0, **kwargs: Any
) -> None:
    """Loss and gradients are as near to those in float64 as stock's: within ``rounds`` times its error, or rounding.

    Of several batches an error is the root of their squares' sum: of one, stock's may be small by chance.
    ``floor`` is relative: to the gradient, and a hundredth of it to the largest one, as some are zero but for rounding.
    """
    true, losses, sums, largest = copy.deepcopy(stock).double(), torch.zeros(3).double(), dict[str, Tensor](), 0.0
    for ids in batches:
        loss, got = step(model, ids, **kwargs)
        stock_loss, want = step(stock, ids, **kwargs)
        true_loss, right = step(true, ids, **kwargs)
        losses += torch.stack([loss - true_loss, stock_loss - true_loss, true_loss]) ** 2
        assert got.keys() == want.keys() == right.keys()
        largest += max(float(value.norm()) for value in right.values()) ** 2
        for name, exact in right.items():
            assert got[name].dtype == want[name].dtype
            norms = [each.norm() for each in (got[name] - exact, want[name] - exact, exact)]
            sums[name] = sums.get(name, 0) + torch.stack(norms) ** 2
    error, stock_error, size = losses.sqrt()
    assert error <= rounds * stock_error + max(floor, 2e-7) * size
    for name, squares in sums.items():
        error, stock_error, size = squares.sqrt()
        assert error <= rounds * stock_error + floor * (size + 1e-2 * largest**0.5), name


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 7, 12])
def test_as_stock_in_float64(tokens: int, keep: str, pair: tuple[Any, Any], ids: Tensor, turns: list[int]) -> None:
    model, stock = (each.double() for each in pair)
    apply_policy(model, tiled(tokens, keep))
    assert_fair(model, stock, ids, floor=1e-12)
    assert turns == [-(-13 // tokens)] * len(layers_of(model))
    remove_policy(model)
    assert_fair(model, stock, ids, floor=0.0, rounds=1.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_those_of_stock(dtype: torch.dtype, keep: str, fused: bool, llama: Callable[..., Any]) -> None:
    batches = torch.randint(3, VOCAB, (6, 3, 61))
    model = llama(hidden_size=48, num_attention_heads=6, num_key_value_heads=2).to(dtype)
    stock = copy.deepcopy(model)
    if fused:
        lowtide.patch(model)
    apply_policy(model, tiled(17, keep, mlp_level=1 if fused else None))
    assert_fair(model, stock, *batches, floor=4 * torch.finfo(dtype).eps ** 1.5, rounds=1.5)


@pytest.mark.parametrize("keep", KEEPS)
def test_fused_parts_stay_fused(keep: str, llama: Callable[..., Any], ids: Tensor) -> None:
    """Each tile's graph is made by the fused MLP, norms and rotation."""
    model = llama()
    lowtide.patch(model)
    apply_policy(model, tiled(5, keep))
    step(model, ids)  # with the check of each layer
    with pytest.MonkeyPatch.context() as patched:
        calls: dict[str, int] = dict.fromkeys(["plain_mlp", "checked_rms_norm", "checked_rotary"], 0)

        def counting(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls[name] += torch.is_grad_enabled()
                return stock(*args, **kwargs)

            return call

        parts = ((mlp_part, "plain_mlp"), (norm_part, "checked_rms_norm"), (rope_part, "checked_rotary"))
        for module, name in parts:
            patched.setattr(module, name, counting(name, getattr(module, name)))
        step(model, ids)
    runs = 5 * 3  # tiles of all layers
    assert calls == {"plain_mlp": runs, "checked_rms_norm": 2 * runs + 1, "checked_rotary": runs}  # and the last norm


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "phi3", "gpt2", "opt", "gpt_neox"])
def test_families(name: str, ids: Tensor, turns: list[int]) -> None:
    model = build(name, {**FAMILIES[name][0], "attention_dropout": 0.0} if name != "gpt2" else FAMILIES[name][0])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    model = model if "moe" in name else model.double()  # whose experts know no float64
    stock = copy.deepcopy(model)
    apply_policy(model, tiled(4, "attention"))
    want = step(stock, ids)
    got = step(model, ids)
    assert torch.isclose(got[0], want[0])
    largest = max(gradient.norm() for gradient in want[1].values())
    for parameter, gradient in want[1].items():  # their losses are in float32
        close = 1e-5 * gradient.norm() + 1e-7 * largest
        assert (got[1][parameter] - gradient).norm() <= close, parameter
    assert turns == [4] * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what models of all ages say when they are built
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("part", range(6))
def test_no_type_is_silently_different(part: int, keep: str) -> None:
    """Every type of transformers' causal language models is equal to stock, or refused."""
    found: dict[str, list[str]] = {"equal": [], "refused": []}
    for name in type_case.types("causal")[part::6]:
        try:
            make, extra = type_case._maker("causal", name, 0)
            stock, model = make(), make()
            for each in (stock, model):
                each.train().set_attn_implementation("sdpa")
                for module in each.modules():
                    module.__dict__.update(p=0.0) if isinstance(module, nn.Dropout) else None
            inputs = {name: x for name, x in ({**type_case.batch(0), **extra}).items() if name != "attention_mask"}
            want = type_case._run(stock, inputs)
        except Exception:  # noqa: S112  # of stock, which cannot be built, or not trained with this attention
            continue
        try:
            apply_policy(model, tiled(3, keep))
            got = type_case._run(model, inputs)
        except (UnsupportedError, ArgumentValueError):
            found["refused"].append(name)
            continue
        assert type_case.difference(got, want, type_case._noise(stock, make(), inputs)) is None, name
        found["equal"].append(name)
    assert len(found["equal"]) >= 12
    assert len(found["refused"]) >= 3


def test_shorter_sequences_are_one_tile(pair: tuple[Any, Any], ids: Tensor, turns: list[int]) -> None:
    """They take the way without tiles, to the bit."""
    apply_policy(pair[0], tiled(13))
    assert_fair(*pair, ids, floor=0.0, rounds=1.0)
    assert turns == []


@pytest.mark.parametrize(("keep", "calls"), [("input", 2), ("attention", 1)])
def test_attention_is_computed_again_or_not(keep: str, calls: int, ids: Tensor) -> None:
    """A tile's own keys are one call of the kernel, all before it a second one."""
    model = Plain(layers=3)
    apply_policy(model, tiled(4, keep))
    step(model, ids)  # with the check of each layer
    counted, _ = counted_step(model, ids)
    assert counted == calls * 3 * (4 + 3)


@pytest.mark.parametrize("keep", KEEPS)
def test_backward_of_kernels_reads_one_layout(
    keep: str, pair: tuple[Any, Any], ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the queries: PyTorch plans cuDNN's backward once for all calls like the first."""
    place, seen = ("cpu", SDPBackend.FLASH_ATTENTION), list[bool]()
    forward, backward = tile_attention._KERNELS[place]

    def noted(gradient: Tensor, query: Tensor, *more: Tensor, **how: Any) -> Any:
        seen.append(gradient.stride() == more[2].stride() == torch.empty_like(query).stride())
        return backward(gradient, query, *more, **how)

    monkeypatch.setitem(tile_attention._KERNELS, place, (forward, noted))
    model, _ = pair
    apply_policy(model, tiled(5, keep))
    step(model, ids)
    assert len(ids) > 1
    assert seen
    assert all(seen)


@pytest.mark.parametrize("keep", KEEPS)
def test_dropout_of_backward_is_that_of_forward(keep: str, ids: Tensor) -> None:
    """The gradient is that of the function that forward computed from this random state: by finite differences."""
    model = Plain(layers=2, dropout=0.3).double()
    apply_policy(model, tiled(5, keep))
    _, gradients = step(model, ids, seed=7)
    generator = torch.Generator().manual_seed(5)
    direction = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}

    def loss_at(length: float) -> Tensor:
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in moved.named_parameters():
                p += length * direction[name]
        torch.manual_seed(7)
        return loss_of(moved, ids).detach()

    slope = sum((gradients[name] * direction[name]).sum() for name in direction)
    assert slope == pytest.approx(float(loss_at(1e-5) - loss_at(-1e-5)) / 2e-5, rel=1e-6)


@pytest.mark.parametrize("keep", KEEPS)
def test_autocast(keep: str, llama: Callable[..., Any], ids: Tensor) -> None:
    model = llama()
    stock = copy.deepcopy(model)
    apply_policy(model, tiled(5, keep))

    def run(each: Any) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(each, ids)
        loss.backward()
        return {name: p.grad for name, p in each.named_parameters()}

    _, right = step(copy.deepcopy(stock).double(), ids)
    got, want = run(model), run(stock)
    for name, value in got.items():
        assert value.dtype == torch.float32
        assert relative_error(value, right[name]) <= 1.5 * relative_error(want[name], right[name]) + 1e-3, name


@pytest.mark.parametrize("keep", KEEPS)
def test_frozen_models(keep: str, frozen: Any, ids: Tensor, turns: list[int]) -> None:
    stock = copy.deepcopy(frozen)
    apply_policy(frozen, tiled(6, keep))
    assert_fair(frozen, stock, ids, floor=1e-5)
    assert turns == [3] * 5


@pytest.mark.parametrize("keep", KEEPS)
def test_layers_before_the_first_that_trains(keep: str, ids: Tensor, turns: list[int]) -> None:
    model = Plain(layers=4).double()
    for part in (model.embed, model.blocks[0], model.blocks[1].qkv):
        part.requires_grad_(False)
    stock = copy.deepcopy(model)
    apply_policy(model, tiled(5, keep))
    assert_fair(model, stock, ids, floor=1e-12)
    assert len(turns) == 3


@pytest.mark.parametrize("keep", KEEPS)
def test_offloaded(keep: str, pair: tuple[Any, Any], side: LazySide, ids: Tensor) -> None:
    """What goes to the host is the input, and attention's output with a number per head, of all but two layers."""
    model, stock = (each.double() for each in pair)
    report = apply_policy(model, tiled(4, keep, offload=True))
    for seed in range(3):
        assert_fair(model, stock, ids, floor=1e-12, seed=seed)
    widths = 24 + (24 + 3 if keep == "attention" else 0)
    assert side.pinned >= report.host_bytes >= 3 * ids.numel() * 8 * widths
    assert side.copies == side.begun_back > 0


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_one_input_for_several_layers(
    dropout: float, k: int, offload: bool, side: LazySide, ids: Tensor, turns: list[int]
) -> None:
    """Values are those of layers in tiles that save their inputs each, to the bit."""
    model = Plain(dropout=dropout)
    alone = copy.deepcopy(model)
    apply_policy(model, tiled(5, every=k, offload=offload))
    apply_policy(alone, tiled(5))
    for seed in range(2):
        assert_same(step(model, ids, seed), step(alone, ids, seed))
    assert turns == [3] * 20
    loss = loss_of(model, ids)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("keep", KEEPS)
def test_beside_offloaded_weights(keep: str, monkeypatch: pytest.MonkeyPatch, side: LazySide, ids: Tensor) -> None:
    monkeypatch.setattr(weights, "MIN_BYTES", 128)
    model = Plain(layers=5).double()
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name or "head" in name)
    stock = copy.deepcopy(model)
    apply_policy(model, tiled(5, keep, offload=True))
    handle = offload_weights(model, device="cpu")
    for seed in range(2):
        assert_fair(model, stock, ids, floor=1e-12, seed=seed)
    handle.remove("cpu")


def test_several_graphs_at_a_time_and_one_twice(ids: Tensor) -> None:
    model = Plain().double()
    stock = copy.deepcopy(model)
    apply_policy(model, tiled(5, "attention"))
    found = []
    for each in (model, stock):
        each.zero_grad()
        one, other = loss_of(each, ids), loss_of(each, ids.flip(1))
        other.backward(retain_graph=True)
        one.backward()
        other.backward()
        found.append([p.grad for p in each.parameters()])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_second_derivatives_are_refused(ids: Tensor) -> None:
    model = Plain()
    apply_policy(model, tiled(5))
    found = torch.autograd.grad(loss_of(model, ids), list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        sum(g.square().sum() for g in found).backward()


def test_the_state_of_forward(ids: Tensor) -> None:
    """Backward runs with the modes and modules that forward had, and leaves the present ones."""
    model = Plain(dropout=0.4).double()
    stock = copy.deepcopy(model)
    apply_policy(model, tiled(5))
    for each in (model, stock):
        each.eval()
        loss = loss_of(each, ids)
        each.train()
        for block in each.blocks:
            block.norm = nn.Identity()
        loss.backward()
        assert all(isinstance(block.norm, nn.Identity) for block in each.blocks)
    for got, want in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_weights_that_change_before_backward_are_refused(ids: Tensor) -> None:
    model = Plain()
    apply_policy(model, tiled(5))
    loss = loss_of(model, ids)
    with torch.no_grad():
        model.blocks[1].out.weight += 1
    with pytest.raises(UnsupportedError, match="parameters that are in backward what they were in forward"):
        loss.backward()


def peak(policy: ActivationPolicy, tokens: int) -> int:
    """The most that backward of one frozen layer holds beyond the loss, its input and its output's gradient."""
    D, heads = 64, 4
    torch.manual_seed(0)
    holder = stack_of(Layer(D, heads, 0.0)).requires_grad_(False)
    apply_policy(holder, policy)
    hidden, gradient = (torch.randn(1, tokens, D) for _ in range(2))

    def forward() -> Tensor:
        return holder.blocks[0](hidden.detach().requires_grad_())

    forward().backward(gradient)
    output = forward()
    with track_allocations() as seen:
        output.backward(gradient)
    return seen.peak_bytes


@pytest.mark.parametrize("keep", KEEPS)
def test_backward_holds_what_is_said(keep: str) -> None:
    """Beyond the input and the output's gradient: h of the input's gradient, 2k of keys and values and of theirs."""
    token = 4 * 64
    few, many = (peak(tiled(128, keep), n) for n in (2048, 4096))
    assert (many - few) / 2048 <= 5 * token + 64
    without, at_once = (peak(ActivationPolicy(keep=keep), n) for n in (2048, 4096))
    assert (at_once - without) / 2048 >= 8 * token


@pytest.mark.parametrize("keep", KEEPS)
def test_without_gradients(keep: str, ids: Tensor, llama: Callable[..., Any]) -> None:
    """Equal values in the memory of a tile; at once with padding, with a cache, and in inference mode."""
    model = llama().double()
    stock = copy.deepcopy(model)
    apply_policy(model, tiled(5, keep))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for mode in (torch.no_grad, torch.inference_mode):
        for more in ({}, {"use_cache": False}, {"attention_mask": mask}, {"use_cache": True}):
            with mode():
                got, want = (each.eval()(ids, **more) for each in (model, stock))
            torch.testing.assert_close(got.logits, want.logits)
            if more.get("use_cache"):
                assert got.past_key_values.get_seq_length() == 13
    holder = stack_of(Layer(64, 4, 0.0)).eval()
    x, peaks = torch.randn(1, 4096, 64), []
    for policy in (ActivationPolicy(keep=keep), tiled(256, keep)):
        apply_policy(holder, policy)
        for _ in range(2):
            with torch.no_grad(), track_allocations() as seen:
                holder.blocks[0](x)
        peaks.append(seen.peak_bytes / x.nbytes)
    assert peaks[0] > 5
    assert peaks[1] < 4  # the output, keys and values, and of a tile all


def test_frozen_layers_run_in_tiles(ids: Tensor, turns: list[int]) -> None:
    model = Plain(layers=3)
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    stock = copy.deepcopy(model)
    apply_policy(model, tiled(5))
    assert_fair(model, stock, ids, floor=1e-5)
    assert turns == [3, 3]


class Convolution(Layer):
    """Attention behind a convolution over tokens."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.conv = nn.Conv1d(24, 24, 3, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1e-3 * self.conv(x.mT)[..., :-2].mT)


class OwnPositions(Layer):
    """Positions that the layer counts itself."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turned = torch.arange(q.shape[-2])[:, None] * 0.5
        return super().attend(q * torch.cos(turned), k * torch.cos(turned), v)


class Twice(Layer):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v) - super().attend(k, q, v)


class InBothDirections(Layer):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Dropped(Layer):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True)


class Masked(Layer):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        return nn.functional.scaled_dot_product_attention(q, k, v, mask)


class InMatmuls(Layer):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(~torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril(), -torch.inf)
        return scores.softmax(-1) @ v


class Kept(Layer):
    """One whose values another loss may read."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.norm(x)
        return super().forward(x)


class Drawing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


class Outside(Layer):
    """One that uses a parameter of another module."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.other = [nn.Parameter(torch.ones(24))]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.other[0])


class Two(Layer):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y.mean()


REFUSED = {
    Convolution: "other operations read other tokens too: a convolution",
    OwnPositions: "positions that it counts itself",
    Twice: "got 2 calls",
    InBothDirections: "got attention to later tokens",
    Dropped: "got a dropout of 0.5",
    Masked: "got a mask",
    InMatmuls: "other operations read other tokens too",
    Kept: "writes to its buffers or attributes",
    Drawing: "draws random numbers from Python",
    Outside: "trained tensors which are no parameters of its own",
    Two: "got 2 tensors among 2 values",
}


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_layers_that_are_refused(kind: type[Layer], keep: str) -> None:
    holder = stack_of(kind(24, 3, 0.0))
    apply_policy(holder, tiled(5, keep))
    with pytest.raises(UnsupportedError, match=REFUSED[kind]) as raised:
        holder.blocks[0](torch.randn(2, 13, 24, requires_grad=True))
    assert "blocks.0" in str(raised.value)
    assert "tile_tokens=None" in str(raised.value)


@pytest.mark.parametrize("shape", [[13, 24, 2, 1], [4, 2, 13, 24], [13, 4]])
def test_hidden_states_of_another_shape_are_refused(shape: list[int]) -> None:
    """Also where the second dimension is shorter than a tile: it may be that of sequences."""
    holder = stack_of(nn.TransformerEncoderLayer(24, 3, 40))
    apply_policy(holder, tiled(5))
    with pytest.raises(UnsupportedError, match=re.escape(f"got hidden states {shape}")):
        holder.blocks[0](torch.randn(shape, requires_grad=True))


def test_further_inputs_that_need_a_gradient_are_refused(ids: Tensor) -> None:
    model = Plain()
    apply_policy(model, tiled(5))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer(24, 3, 0.0)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.inner(x * scale)

    holder = stack_of(Scaled())
    apply_policy(holder, tiled(5))
    scale = torch.ones(24)
    assert holder.blocks[0](torch.randn(1, 13, 24), scale).shape == (1, 13, 24)
    with pytest.raises(UnsupportedError, match="further arguments that need a gradient"):
        holder.blocks[0](torch.randn(1, 13, 24), scale.requires_grad_())


def test_padding_and_what_is_recorded_are_refused(llama: Callable[..., Any], ids: Tensor) -> None:
    model = llama()
    apply_policy(model, tiled(5))
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    with pytest.raises(UnsupportedError, match="a mask"):
        loss_of(model, ids, attention_mask=mask)
    model = build("qwen3_moe", {**FAMILIES["qwen3_moe"][0], "attention_dropout": 0.0, "output_router_logits": True})
    apply_policy(model, tiled(5))
    with pytest.raises(UnsupportedError, match="output_router_logits"):
        loss_of(model, ids)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler's own doing
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_layers_are_refused(whole: bool, ids: Tensor) -> None:
    model = Plain()
    apply_policy(model, tiled(5))
    for part in [model] if whole else model.blocks:
        part.compile(backend="eager")
    with pytest.raises(UnsupportedError, match=r"^blocks\.0: expected a layer in eager, with tile_tokens, got one"):
        loss_of(model, ids)


def test_the_math_path_is_refused(ids: Tensor) -> None:
    model = Plain()
    apply_policy(model, tiled(5))
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(UnsupportedError, match="got MATH on cpu"):
        loss_of(model, ids)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_parts_of_layers(ids: Tensor, turns: list[int]) -> None:
    model = Plain(layers=2)
    stock = copy.deepcopy(model)
    apply_policy(model, tiled(5))
    for block in model.blocks:
        block.mlp.compile(backend="eager")
    assert_fair(model, stock, ids, floor=1e-5)
    assert turns == [3, 3]


@pytest.mark.parametrize(
    ("value", "more", "error", "says"),
    [
        (0, {}, ArgumentValueError, "tile_tokens: expected at least 1, or None, got 0"),
        (1.5, {}, ArgumentTypeError, "tile_tokens: expected a whole number, or None, got 1.5"),
        (8, {"keep": "all"}, ArgumentValueError, "tile_tokens: expected None with keep='all', got 8. Take keep='atten"),
    ],
)
def test_values(value: Any, more: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ActivationPolicy(**{"keep": "input", "tile_tokens": value, **more})


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("input in 8192", tiled(8192)),
        ("attention/1 in 16 offloaded", tiled(16, "attention", mlp_level=1, offload=True)),
        ("input in 64 every 2", tiled(64, every=2)),
        ("input/0 by 512 in 4096", tiled(4096, mlp_level=0, mlp_tile_tokens=512)),
    ],
)
def test_words(text: str, policy: ActivationPolicy) -> None:
    assert word_of(policy) == text
    assert parse_policies(text) == policy
    short = (
        text.replace(" by ", "-tile")
        .replace(" in ", "-in")
        .replace(" every ", "-every")
        .replace(" offloaded", "-offload")
    )
    assert parse_policies(short) == policy
    for wrong in ("input in 0", "input in", "all in 8", "input every 2 in 8", "inputin 8"):
        with pytest.raises(ArgumentValueError):
            parse_policies(wrong)
