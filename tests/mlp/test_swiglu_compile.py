"""swiglu_mlp under torch.compile, on fake and meta tensors, and as registered operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lowtide import nn, swiglu_mlp
from mlp.calls import call
from support import mlp

# torch.compile warns of what it does itself, when it follows an autograd.Function and when inductor first loads
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]


@pytest.mark.parametrize(
    ("backend", "level", "frozen"),
    [
        ("eager", 1, False),
        *(("aot_eager", level, frozen) for level in (0, 1) for frozen in (False, True)),
        *(pytest.param("inductor", level, True, marks=pytest.mark.slow) for level in (0, 1)),
        ("inductor", 0, False),
        ("inductor", 1, False),
    ],
)
def test_compiles_whole_and_agrees(backend: str, level: int, frozen: bool) -> None:
    leaves = mlp((2, 5), 7, 11, dtype=torch.float32 if backend == "inductor" else torch.bfloat16)
    for leaf in leaves[1:]:
        leaf.requires_grad_(not frozen)
    trained = leaves[: 1 if frozen else 7]

    def step(*leaves: Tensor) -> Tensor:
        return (call([leaves[0] * 2, *leaves[1:]], checkpoint_level=level, tile_tokens=4) * 3).sum()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    loss, expected = compiled(*leaves), step(*leaves)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, trained), torch.autograd.grad(expected, trained))


def test_any_number_of_tokens_compiles_twice_at_most() -> None:
    _, *rest = mlp(1, 7, 11)
    compiled = torch.compile(lambda x: call([x, *rest]), fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for tokens in (5, 6, 9, 17):
        x = torch.randn(tokens, 7)
        torch.testing.assert_close(compiled(x), call([x, *rest]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize(("level", "tile"), [(0, 3), (1, None)])
def test_compiled_with_every_size_and_number_a_variable(level: int, tile: int | None) -> None:
    """dynamic=True makes variables of sizes, and of the level, the tile and whatever else is a number."""
    module = nn.SwiGLU(7, 11, checkpoint_level=level)
    module.tile_tokens = tile
    for step in (module, lambda x: swiglu_mlp(x, *module.parameters(), checkpoint_level=level, tile_tokens=tile)):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
        for tokens in (5, 8):
            x = torch.randn(tokens, 7, requires_grad=True)
            leaves = (x, *module.parameters())
            got, expected = (torch.autograd.grad(f(x).square().sum(), leaves) for f in (compiled, step))
            torch.testing.assert_close(got, expected)


def test_autocast_inside_a_compiled_function() -> None:
    leaves = mlp((2, 5), 7, 11)

    def step(*leaves: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(leaves, checkpoint_level=0)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got, expected = compiled(*leaves), step(*leaves)
    assert got.dtype == torch.bfloat16
    upstream = torch.randn(2, 5, 7).bfloat16()
    for g, e in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        assert g.dtype == torch.float32
        torch.testing.assert_close(g, e)


def test_a_step_on_fake_tensors_and_on_meta() -> None:
    for level in (0, 1):
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = [torch.randn(t.shape, requires_grad=True) for t in mlp((2, 5), 7, 11)]
            call(fake, checkpoint_level=level).sum().backward()
        meta = [t.detach().to("meta").requires_grad_() for t in mlp((2, 5), 7, 11)]
        call(meta, checkpoint_level=level).sum().backward()
        for leaves in (fake, meta):
            assert all(t.grad.shape == t.shape for t in leaves)
