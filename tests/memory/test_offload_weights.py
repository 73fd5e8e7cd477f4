"""Frozen weights on the host, with copies that come as late as they may: always the same to the bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from lowtide.memory import ActivationPolicy, apply_policy, offload_weights, pinned, remove_policy, weights
from lowtide.models import patch
from memory.frozen import LAYERS, adapted, hosts, inputs_trained, is_at_rest
from memory.models import LazySide, Plain, assert_as_stock, assert_same, layers_of, loss_of, stack_of, step

pytestmark = [
    pytest.mark.usefixtures("every_matrix"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft asks by an old name
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning"),
]


class OnTheDevice(TorchDispatchMode):
    """GEMMs have no operand in the host's memory."""

    def __init__(self, handle: Any) -> None:
        super().__init__()
        self.hosts = hosts(handle)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            read = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
            assert not read & self.hosts
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [None, 1, 2, 3, 4])
def test_same_to_the_bit(layers: int | None, frozen: Any, ids: Tensor, side: LazySide) -> None:
    stock = copy.deepcopy(frozen)
    handle = offload_weights(frozen, layers=layers, device="cpu")
    n = handle.layers
    assert n == (layers or LAYERS)
    assert is_at_rest(handle)
    for steps in range(1, 4):
        with OnTheDevice(handle):
            got = step(frozen, ids, seed=steps)
        assert_same(got, step(stock, ids, seed=steps))
        assert is_at_rest(handle)
        assert side.finished >= steps * n  # the host has waited for each layer's last copy
        assert side.begun_back == steps * (n + max(0, n - 2))  # the last two are still there for backward
    assert handle.host_bytes == side.pinned > 0
    assert "GiB of host memory" in str(handle)
    handle.remove("cpu")
    handle.remove("cpu")
    before = side.begun_back
    assert_same(step(frozen, ids), step(stock, ids))
    assert side.begun_back == before
    assert side.pinned == 0


def test_two_layers_are_on_the_device_at_a_time(frozen: Any, ids: Tensor, side: LazySide) -> None:
    handle = offload_weights(frozen, device="cpu")
    here: list[list[int]] = []

    def look(*_: Any) -> None:
        here.append([k for k, piece in enumerate(handle._pieces) if piece._here])

    for layer in weights.find_stack(frozen).layers.values():
        layer.register_forward_pre_hook(look)
        layer.register_forward_hook(lambda _, __, outputs: next(iter(parts(outputs))).register_hook(look) and None)
    step(frozen, ids)
    forward = [[0, 1], [1, 2], [2, 3], [3, 4], [3, 4]]
    assert here == [*forward, [3, 4], [2, 3], [1, 2], [0, 1], [0]]


def parts(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def test_offloaded_layers_are_spread() -> None:
    assert weights.offloaded_layers(8, 8) == list(range(8))
    assert weights.offloaded_layers(8, 4) == [1, 3, 5, 7]
    assert weights.offloaded_layers(7, 3) == [2, 4, 6]


@pytest.mark.parametrize("keep", ["input", "attention"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("first", ["policy", "weights"])
def test_beside_a_policy(keep: Any, offload: bool, first: str, frozen: Any, ids: Tensor, side: LazySide) -> None:
    stock = copy.deepcopy(frozen)
    if first == "policy":
        apply_policy(frozen, ActivationPolicy(keep=keep, offload=offload))
    handle = offload_weights(frozen, device="cpu")
    if first == "weights":
        apply_policy(frozen, ActivationPolicy(keep=keep, offload=offload))
    assert_as_stock(frozen, stock, ids, seeds=3)
    assert is_at_rest(handle)
    remove_policy(frozen)
    assert_as_stock(frozen, stock, ids)
    handle.remove("cpu")
    assert_as_stock(frozen, stock, ids)


@pytest.mark.parametrize("reentrant", [False, True])
def test_beside_transformers_checkpoints(reentrant: bool, llama: Any, ids: Tensor, side: LazySide) -> None:
    ours = adapted(llama())
    ours.enable_input_require_grads()
    stock = copy.deepcopy(ours)
    for model in (ours, stock):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    handle = offload_weights(ours, device="cpu")
    for seed in range(3):
        with OnTheDevice(handle):
            got = step(ours, ids, seed)
        assert_same(got, step(stock, ids, seed))
        assert is_at_rest(handle)


@pytest.mark.parametrize("level", [0, 1])
def test_beside_a_patch(level: int, llama: Any, ids: Tensor, side: LazySide) -> None:
    ours, theirs = adapted(llama()), adapted(llama())
    for model in (ours, theirs):
        patch(model)
        apply_policy(model, ActivationPolicy(keep="all", mlp_level=level))
    handle = offload_weights(ours, device="cpu")
    for seed in range(2):
        assert_same(step(ours, ids, seed), step(theirs, ids, seed))
        assert is_at_rest(handle)


def test_no_gradients_and_generation(frozen: Any, ids: Tensor, side: LazySide) -> None:
    stock = copy.deepcopy(frozen)
    handle = offload_weights(frozen, device="cpu")
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            for _ in range(2):
                assert torch.equal(loss_of(frozen, ids), loss_of(stock, ids))
                assert is_at_rest(handle)
    if not isinstance(stock, Plain):
        texts = [model.eval().generate(input_ids=ids, max_new_tokens=4, do_sample=False) for model in (frozen, stock)]
        assert torch.equal(*texts)
    assert_same(step(frozen.train(), ids), step(stock.train(), ids))


def test_several_forwards_before_a_backward(frozen: Any, ids: Tensor, side: LazySide) -> None:
    """Two graphs, the older one's backward first; an evaluation between; one graph twice; one without a backward."""
    stock = copy.deepcopy(frozen)
    handle = offload_weights(frozen, device="cpu")

    def gradients(model: Any) -> dict[str, Tensor]:
        model.zero_grad()
        first, second = loss_of(model, ids), loss_of(model, ids.flip(0))
        with torch.no_grad():
            loss_of(model, ids)
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        loss_of(model, ids)
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    assert_same((torch.zeros(()), gradients(frozen)), (torch.zeros(()), gradients(stock)))
    assert_same(step(frozen, ids), step(stock, ids))
    assert is_at_rest(handle)


@pytest.mark.parametrize("layers", [1, 2, None])
def test_what_is_written_holds(layers: int | None, llama: Any, ids: Tensor, side: LazySide) -> None:
    """Merged adapters, a loaded state, a write through ``.data``: between steps, wherever training has been."""
    ours = adapted(llama())
    stock = copy.deepcopy(ours)
    handle = offload_weights(ours, layers=layers, device="cpu")
    for model in (ours, stock):
        step(model, ids)
        loss_of(model, ids)  # without a backward: two layers' weights are still on the device
        model.merge_adapter()
        model.unmerge_adapter()
        for p in model.parameters():
            if not p.requires_grad:
                p.data.mul_(1.5)
    assert_same(step(ours, ids), step(stock, ids))
    state = {name: value.clone() * 0.5 for name, value in stock.state_dict().items()}
    for model in (ours, stock):
        model.load_state_dict(state)
    assert_same(step(ours, ids), step(stock, ids))
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    for name, value in torch.load(buffer).items():
        assert torch.equal(value, stock.state_dict()[name]), name
    assert is_at_rest(handle)


def test_moves_leave_them_and_casts_are_refused(frozen: Any, ids: Tensor, side: LazySide) -> None:
    stock = copy.deepcopy(frozen)
    handle = offload_weights(frozen, device="cpu")
    frozen.to("cpu").cpu()
    nn.Module._apply(frozen, lambda t: t.clone())
    assert is_at_rest(handle)
    assert_same(step(frozen, ids), step(stock, ids))
    with pytest.raises(UnsupportedError, match=r"torch.float32 as before, .* got a cast. Cast the model before"):
        frozen.double()
    handle.remove("cpu")
    assert_same(step(frozen.double(), ids), step(stock.double(), ids))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_are_stock(how: Callable[[Any], Any], ids: Tensor, side: LazySide) -> None:
    ours = inputs_trained(Plain())
    stock = copy.deepcopy(ours)
    handle = offload_weights(ours, device="cpu")
    step(ours, ids)
    other, before = how(ours), side.begun_back
    assert_same(step(other, ids), step(stock, ids))
    assert_same(step(other.double(), ids), step(copy.deepcopy(stock).double(), ids))
    assert side.begun_back == before
    assert is_at_rest(handle)
    assert_same(step(ours, ids), step(stock, ids))


def test_an_error_in_a_layer(frozen: Any, ids: Tensor, side: LazySide) -> None:
    stock = copy.deepcopy(frozen)
    handle = offload_weights(frozen, device="cpu")
    layer = list(weights.find_stack(frozen).layers.values())[2]
    failing = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(OSError("theirs")))
    with pytest.raises(OSError, match="theirs"):
        step(frozen, ids)
    failing.remove()
    assert_same(step(frozen, ids), step(stock, ids))
    assert is_at_rest(handle)


def test_calling_again_replaces(frozen: Any, ids: Tensor, side: LazySide) -> None:
    stock = copy.deepcopy(frozen)
    first = offload_weights(frozen, device="cpu")
    second = offload_weights(frozen, layers=3, device="cpu")
    assert first.layers == 0
    assert first.host_bytes == 0
    assert second.layers == 3
    del first
    assert side.pinned == second.host_bytes
    assert_same(step(frozen, ids), step(stock, ids))


def test_shared_and_small_weights_stay(ids: Tensor, side: LazySide) -> None:
    model = inputs_trained(Plain())
    model.blocks[3].out.weight = model.blocks[1].out.weight
    stock = copy.deepcopy(model)
    handle = offload_weights(model, device="cpu")
    names = {id(p): name for name, p in model.named_parameters()}
    moved = {names[id(p)] for piece in handle._pieces for p in piece.params}
    assert not any("norm" in name for name in moved)
    assert "blocks.1.out.weight" not in moved
    assert "blocks.2.out.weight" in moved
    assert_same(step(model, ids), step(stock, ids))


@pytest.mark.parametrize("quantise", ["nf4", "fp4"])
def test_weights_in_four_bits(quantise: str, ids: Tensor, side: LazySide) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = inputs_trained(Plain(D=48))
    for block in model.blocks:
        for name in ("0", "2"):
            linear = getattr(block.mlp, name)
            packed = bitsandbytes.nn.Linear4bit(*reversed(linear.weight.shape), quant_type=quantise)
            packed.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type=quantise)
            setattr(block.mlp, name, packed.to("cpu"))
    stock = copy.deepcopy(model)
    handle = offload_weights(model, device="cpu")
    for seed in range(2):
        assert_same(step(model, ids, seed), step(stock, ids, seed))
        assert is_at_rest(handle)
    assert any(p.dtype == torch.uint8 for p in handle._pieces[0].params)


def test_a_layer_that_is_set_to_train_later(frozen: Any, ids: Tensor, side: LazySide) -> None:
    handle = offload_weights(frozen, device="cpu")
    handle._pieces[1].params[0].requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"requires_grad: expected False .* remove\(\)"):
        step(frozen, ids)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler's own doing
def test_compiled_layers(ids: Tensor, side: LazySide) -> None:
    ours = inputs_trained(Plain(layers=3))
    stock = copy.deepcopy(ours)
    handle = offload_weights(ours, device="cpu")
    for block in ours.blocks:
        block.compile(backend="aot_eager")
    for seed in range(2):
        (loss, got), (their_loss, want) = step(ours, ids, seed), step(stock, ids, seed)
        torch.testing.assert_close(loss, their_loss)
        torch.testing.assert_close(got, want)
        assert is_at_rest(handle)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"model": 3}, ArgumentTypeError, "model: expected a torch.nn.Module"),
        ({"model": nn.Linear(3, 3)}, ArgumentValueError, "model: expected a model with a ModuleList"),
        ({"model": Plain()}, ArgumentValueError, "model: expected layers with frozen weights, got none. Add adapters"),
        ({"layers": 0}, ArgumentValueError, "layers: expected at least 1"),
        ({"layers": 6}, ArgumentValueError, "layers: expected at most 5, got 6. None: all"),
        ({"layers": 2.5}, ArgumentTypeError, "layers: expected"),
        ({"device": "gpu"}, ArgumentValueError, "device: expected a device as PyTorch names it: .*, got 'gpu'"),
        ({"host_gib": -1}, ArgumentValueError, "host_gib: expected a finite number"),
        ({"host_gib": 1e-6}, UnsupportedError, r"host_gib: expected .* for the weights of 5 layers.*Offload fewer"),
        ({"model": inputs_trained(Plain()).to("meta")}, UnsupportedError, "embed.weight: expected a whole tensor"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], said: str, side: LazySide) -> None:
    model = inputs_trained(Plain())
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(error, match=said):
        offload_weights(**{"model": model, "device": "cpu", **change})
    assert [p.data_ptr() for p in model.parameters()] == before
    assert side.pinned == 0


def test_a_removal_to_nowhere_changes_nothing(frozen: Any, ids: Tensor, side: LazySide) -> None:
    handle = offload_weights(frozen, device="cpu")
    with pytest.raises(ArgumentValueError, match="device: expected"):
        handle.remove("gpu")
    step(frozen, ids)
    assert is_at_rest(handle)
    assert side.begun_back > 0


def test_there_has_to_be_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="offload"):
        offload_weights(inputs_trained(stack_of(*Plain().blocks)), device="cpu")


def test_layers_of_the_models_here(llama: Any, side: LazySide) -> None:
    model = adapted(llama())
    offload_weights(model, layers=2, device="cpu")
    assert len(layers_of(model.base_model.model)) == LAYERS


def test_weights_on_the_cpu_are_freed_as_they_move(side: LazySide, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with room for one layer beside the model's own memory is enough, for all but an explicit budget."""
    model = inputs_trained(Plain())
    total = offload_weights(model, device="cpu").host_bytes
    vars(model)[weights._HANDLE].remove("cpu")
    layer = total // LAYERS

    monkeypatch.setattr(pinned, "available_bytes", lambda: pinned._LEFT_FREE + 2 * layer)
    assert offload_weights(model, device="cpu").host_bytes == total
    before = {name: value.clone() for name, value in model.state_dict().items()}
    left = iter([2 * layer] * 4 + [0])
    monkeypatch.setattr(pinned, "available_bytes", lambda: pinned._LEFT_FREE + next(left))
    with pytest.raises(UnsupportedError, match="host_gib: expected"):
        offload_weights(model, device="cpu")  # the fourth layer's do not fit: all is as it was before
    assert not any(False for _ in left)
    assert side.pinned == 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert not any(layer._forward_pre_hooks for layer in model.blocks)
    assert [type(layer) for layer in model.blocks] == [type(layer) for layer in Plain().blocks]
