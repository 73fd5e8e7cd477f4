"""What the tests of this folder share: a model of no library, a step, a count of kernels, a host beside the host."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.memory import ActivationPolicy, attention
from lowtide.memory.policy import Keep

VOCAB = 61
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 5, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


ALL, ATTENTION, INPUT = (ActivationPolicy(keep=keep) for keep in get_args(Keep))
GROUPED = ActivationPolicy(keep="input", every=3)
OFFLOADED_ATTENTION, OFFLOADED_INPUT = (dataclasses.replace(policy, offload=True) for policy in (ATTENTION, INPUT))


class Layer(nn.Module):
    """A decoder layer of no library: attention by SDPA, an MLP, dropout after both."""

    def __init__(self, D: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.heads = heads
        self.dropout = dropout

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))
        x = x + nn.functional.dropout(y, self.dropout, self.training)
        return x + nn.functional.dropout(self.mlp(x), self.dropout, self.training)


class Plain(nn.Module):
    """A model of no library."""

    def __init__(self, layers: int = 5, D: int = 24, heads: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(Layer(D, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(D, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@torch.library.custom_op("lowtide_test_flash_attn::fwd", mutates_args=())
def fwd(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Stand in for a flash-attn package: an operator of its own name, with dropout inside.

    The last of what it returns is what the fused kernels return as well: a mask that was not requested, of no size.
    """
    mask = torch.rand(q.shape) >= dropout_p
    out = nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True).to(q.dtype)
    return torch.where(mask, out, 0).contiguous(), mask.to(q.dtype), q.new_empty(0)


class Flash(torch.autograd.Function):
    """Attention of such a package, with a backward that depends on everything that was saved."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, mask, _ = torch.ops.lowtide_test_flash_attn.fwd(q, k, v, 0.4)
        ctx.save_for_backward(q, k, v, out, mask)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, mask = ctx.saved_tensors
        return gradient * mask * k, gradient * out * q, gradient * mask * v


class CountAttention(TorchDispatchMode):
    """Counts the calls of attention's fused forward that reach a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += attention.is_attention(func)
        return func(*args, **(kwargs or {}))


def loss_of(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids) if isinstance(model, Plain) else model(**{"input_ids": ids, "labels": ids, **kwargs}).loss


def layers_of(model: Any) -> Any:
    return model.blocks if isinstance(model, Plain) else model.model.layers


def stack_of(*layers: nn.Module) -> Any:
    """A module of these layers alone."""
    holder = nn.Module()
    holder.blocks = nn.ModuleList(layers)
    return holder


def step(model: Any, ids: Tensor, seed: int = 3, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """One forward and backward from a fixed random state: the loss and every gradient."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = loss_of(model, ids, **kwargs)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def counted_step(model: Any, ids: Tensor, seed: int = 3, **kwargs: Any) -> tuple[int, Any]:
    """`step`, with how often it calls attention: once per layer that saves its output, else twice."""
    with CountAttention() as counted:
        results = step(model, ids, seed, **kwargs)
    return counted.calls, results


def assert_as_stock(
    model: Any, stock: Any, ids: Tensor, *, calls: int | None = None, seeds: int = 1, **kwargs: Any
) -> None:
    """Steps of both are the same to the bit, and those of the first call attention so often."""
    for seed in range(seeds):
        counted, got = counted_step(model, ids, seed, **kwargs)
        assert calls in (None, counted)
        assert_same(got, step(stock, ids, seed, **kwargs))


def assert_same(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]) -> None:
    """To the bit."""
    assert torch.equal(got[0], want[0])
    assert got[1].keys() == want[1].keys()
    assert len(got[1]) > 0
    for name, gradient in got[1].items():
        assert torch.equal(gradient, want[1][name]), name


class LazySide:
    """Host memory beside the host: every copy is made as late as a wait for it allows, and everything is counted.

    What is used without waiting for its copy is NaN; what is freed while its copy is under way is counted as lost.
    """

    def __init__(self) -> None:
        self.pinned = 0
        self.copies = 0
        self.begun_back = 0
        self.finished = 0
        self.lost = 0
        self.under_way: list[list[Any]] = []  # copies: one that was made is empty
        self._lock = threading.RLock()

    def pin(self, nbytes: int) -> Tensor:
        self.pinned += nbytes
        return torch.full((nbytes,), 255, dtype=torch.uint8)  # NaN in every dtype

    def unpin(self, memory: Tensor) -> None:
        self.pinned -= memory.numel()

    def copy_out(self, host: Tensor, tensor: Tensor) -> Any:
        self.copies += 1
        return self._later(tensor, lambda t: host.copy_(t))

    def copy_back(self, tensor: Tensor, host: Tensor) -> Any:
        self.begun_back += 1
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else 99)
        return self._later(tensor, lambda back: back.data.copy_(host))

    def stream(self) -> str:
        return "the only one"

    def wait(self, event: Any, stream: str) -> None:
        event()

    def used_on(self, tensor: Tensor, stream: str) -> None:
        """Nothing is on another stream."""

    def finish(self, event: Any) -> None:
        self.finished += 1
        event()

    def _later(self, tensor: Tensor, run: Callable[[Tensor], object]) -> Callable[[], None]:
        pending = [run]
        self.under_way.append(pending)

        def on_death(_: object) -> None:
            self.lost += len(pending)

        device = weakref.ref(tensor, on_death)

        def event() -> None:
            with self._lock:  # threads that write files wait for copies as well
                while pending:
                    with torch.no_grad():
                        alive = device()
                        pending.pop()(alive) if alive is not None else pending.pop()

        return event
