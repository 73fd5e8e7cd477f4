"""Frozen weights on the host, in layers that are recomputed, wrapped, changed or removed by others."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.errors import UnsupportedError
from lowtide.memory import offload_weights
from memory.frozen import LAYERS, adapted, inputs_trained, is_at_rest
from memory.models import LazySide, Plain, assert_same, loss_of, step

pytestmark = [
    pytest.mark.usefixtures("every_matrix"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft asks by an old name
]


class Checkpointed(Plain):
    """PyTorch's checkpoints around several layers."""

    reentrant = False

    def forward(self, ids: Tensor) -> Tensor:
        def run(x: Tensor, first: int, end: int) -> Tensor:
            for block in self.blocks[first:end]:
                x = block(x)
            return x

        x = self.embed(ids)
        for first, end in ((0, 1), (1, LAYERS)):
            x = checkpoint(run, x, first, end, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layers", [3, None])
def test_checkpoints_of_several_layers(reentrant: bool, layers: int | None, ids: Tensor, side: LazySide) -> None:
    ours = inputs_trained(Checkpointed())
    ours.embed.requires_grad_(True)
    ours.reentrant = reentrant
    stock = copy.deepcopy(ours)
    handle = offload_weights(ours, layers=layers, device="cpu")
    for seed in range(2):
        assert_same(step(ours, ids, seed), step(stock, ids, seed))
        assert is_at_rest(handle)
        if layers is None:
            # forward, the second segment's recompute and backward, and the first's: none is copied twice in a row
            assert side.begun_back <= (seed + 1) * (LAYERS + LAYERS + LAYERS)


class Passing(nn.Module):
    """A layer like T5's: the first makes a bias that trains, and the others pass it on."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(24, 24), nn.Linear(24, 24)
        self.bias = nn.Parameter(torch.randn(24)) if first else None

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = x + self.a(x)
        given = self.bias * 2 if self.bias is not None else bias
        assert given is not None
        x += torch.tanh(self.b(x) + given)  # an output that is written to
        return x, given


class WithBias(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Passing(i == 0) for i in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.embed(ids), None
        for block in self.blocks:
            x, bias = block(x, bias=bias)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def test_outputs_that_are_passed_on(ids: Tensor, side: LazySide) -> None:
    ours = WithBias().requires_grad_(False)
    for p in (ours.embed.weight, ours.blocks[0].bias):
        p.requires_grad_(True)
    stock = copy.deepcopy(ours)
    handle = offload_weights(ours, device="cpu")
    for seed in range(2):
        assert_same(step(ours, ids, seed), step(stock, ids, seed))
        assert is_at_rest(handle)


def test_offloaded_again_by_a_part(llama: Any, ids: Tensor, side: LazySide) -> None:
    """The base before its adapters, and the whole behind them: one handle, so that what is written holds."""
    base = llama().requires_grad_(False)
    stock = adapted(copy.deepcopy(base))
    first = offload_weights(base, device="cpu")
    ours = adapted(base)
    second = offload_weights(ours, device="cpu")
    assert (first.layers, second.layers) == (0, LAYERS)
    for model in (ours, stock):
        model.merge_adapter()
    assert torch.equal(loss_of(ours, ids), loss_of(stock, ids))


def test_weights_have_storages_of_their_own(frozen: Any, side: LazySide) -> None:
    """Savers take weights that share a storage for the same one, and write one of them."""
    handle = offload_weights(frozen, device="cpu")
    params = [p for piece in handle._pieces for p in piece.params]
    assert len({p.untyped_storage().data_ptr() for p in params}) == len(params)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in params)
    accelerate = pytest.importorskip("accelerate")
    state = frozen.state_dict()
    assert accelerate.utils.other.clean_state_dict_for_safetensors(state).keys() == state.keys()


def test_weights_outlive_their_model(ids: Tensor, side: LazySide) -> None:
    model = inputs_trained(Plain())
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    offload_weights(model, device="cpu")
    step(model, ids)
    state = model.state_dict()
    del model
    gc.collect()
    assert side.pinned == 0
    others = [torch.full((n,), 7, dtype=torch.uint8) for n in [expected["blocks.0.qkv.weight"].nbytes * 4] * 50]
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert len(others) == 50


def test_parameters_that_are_set_later(ids: Tensor, side: LazySide) -> None:
    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 0.5

    ours = inputs_trained(Plain())
    stock = copy.deepcopy(ours)
    handle = offload_weights(ours, device="cpu")
    for model in (ours, stock):
        nn.utils.parametrize.register_parametrization(model.blocks[1].out, "weight", Half())
        model.blocks[2].out.weight = nn.Parameter(torch.ones(24, 24), requires_grad=False)
        model.to("cpu")
        assert torch.equal(model.blocks[2].out.weight, torch.ones(24, 24))
    assert ours.state_dict().keys() == stock.state_dict().keys()
    assert_same(step(ours, ids), step(stock, ids))
    assert is_at_rest(handle)


def test_an_adapter_of_reference(llama: Any, ids: Tensor, side: LazySide) -> None:
    """It is offloaded with the frozen rest, and peft sets it to train while it is active: without gradients it runs."""
    peft = pytest.importorskip("peft")
    ours = adapted(llama())
    ours.add_adapter("reference", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    stock = copy.deepcopy(ours)
    handle = offload_weights(ours, device="cpu")
    names = {id(p): name for name, p in ours.named_parameters()}
    assert any("reference" in names[id(p)] for p in handle._pieces[0].params)

    def step_with_reference(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        model.set_adapter("reference")
        with torch.no_grad():
            loss = loss_of(model, ids)
        model.set_adapter("default")
        return loss, step(model, ids)[1]

    for _ in range(2):
        assert_same(step_with_reference(ours), step_with_reference(stock))
        assert is_at_rest(handle)
    ours.set_adapter("reference")
    with pytest.raises(UnsupportedError, match="requires_grad: expected False"):
        step(ours, ids)


@pytest.mark.parametrize("how", ["removed", "again", "the model is gone"])
def test_removed_before_backward(how: str, frozen: Any, ids: Tensor, side: LazySide) -> None:
    ours = copy.deepcopy(frozen)
    handle = offload_weights(ours, device="cpu")
    loss = loss_of(ours, ids)
    if how == "removed":
        handle.remove("cpu")
    elif how == "again":
        offload_weights(ours, device="cpu")
    else:
        del ours
    del handle
    gc.collect()
    assert (side.pinned > 0) == (how == "again"), "a graph holds no host memory"
    with pytest.raises(UnsupportedError, match=r"offload_weights: expected a backward before its removal.*Call rem"):
        loss.backward()
    if how != "the model is gone":
        assert_same(step(ours, ids), step(frozen, ids))


def test_gradients_of_gradients(frozen: Any, ids: Tensor, side: LazySide) -> None:
    stock = copy.deepcopy(frozen)
    offload_weights(frozen, device="cpu")
    with pytest.raises(UnsupportedError, match="create_graph: expected False"):
        loss_of(frozen, ids).backward(create_graph=True)
    assert_same(step(frozen, ids), step(stock, ids))


def test_weights_of_other_kinds_stay(ids: Tensor, side: LazySide) -> None:
    class Other(nn.Parameter):
        """Such as bitsandbytes' 8 bits, whose module has its memory besides."""

    model = inputs_trained(Plain())
    for block in model.blocks:
        block.out.weight = Other(block.out.weight.data, requires_grad=False)
    memory = [block.out.weight.data_ptr() for block in model.blocks]
    offload_weights(model, device="cpu")
    assert [block.out.weight.data_ptr() for block in model.blocks] == memory
