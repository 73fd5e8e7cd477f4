"""A policy through a model's life: found layers, copies, files, patches, sharding, compilation, and every error."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from lowtide.memory import ActivationPolicy, apply_policy, remove_policy
from memory.models import (
    ALL,
    ATTENTION,
    GROUPED,
    INPUT,
    OFFLOADED_INPUT,
    Layer,
    LazySide,
    Plain,
    assert_as_stock,
    assert_same,
    counted_step,
    step,
)


def calls(model: Any, ids: Tensor) -> int:
    """Calls of attention in a step: 5 where its output is saved, 10 where it is recomputed."""
    return counted_step(model, ids)[0]


def test_a_second_policy_replaces_the_first(pair: tuple[Any, Any], ids: Tensor) -> None:
    model, stock = pair
    names = {type(m).__name__ for m in stock.modules()}
    for policy, expected in ((INPUT, 10), (ATTENTION, 5), (INPUT, 10), (ALL, 5)):
        apply_policy(model, policy)
        assert calls(model, ids) == expected
        assert {type(m).__name__ for m in model.modules()} == names
    assert all(type(a) is type(b) for a, b in zip(model.modules(), stock.modules(), strict=True))
    apply_policy(model, INPUT)
    for _ in range(2):
        remove_policy(model)
    for a, b in zip(model.modules(), stock.modules(), strict=True):
        assert type(a) is type(b)
        assert vars(a).keys() == vars(b).keys()


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(
    ("policy", "how"),
    [(OFFLOADED_INPUT, copy.deepcopy), (INPUT, pickled), (OFFLOADED_INPUT, pickled), (GROUPED, pickled)],
)
def test_copies_keep_their_policy(policy: ActivationPolicy, how: Any, model: Any, side: LazySide, ids: Tensor) -> None:
    """With host memory of their own."""
    apply_policy(model, policy)
    want = step(model, ids)
    one = side.pinned
    other = how(model)
    calls, got = counted_step(other, ids)
    assert calls == (13 if policy is GROUPED else 10)
    assert_same(got, want)
    assert (side.pinned == 2 * one > 0) == policy.offload
    remove_policy(model)
    assert counted_step(other, ids)[0] == calls  # another instance
    assert side.pinned == one
    remove_policy(other)
    assert counted_step(other, ids)[0] == 5
    assert side.pinned == 0


@pytest.mark.parametrize("first", ["patch", "policy"])
def test_with_patch_in_either_order(first: str, llama: Any, ids: Tensor) -> None:
    model, stock = llama(), llama()
    lowtide.patch(stock)
    if first == "policy":
        apply_policy(model, ATTENTION)
    report = lowtide.patch(model)
    if first == "patch":
        apply_policy(model, ATTENTION)
    assert_as_stock(model, stock, ids, calls=5)
    assert (report.calls_fused, report.calls_materialised) == (1, 0)
    lowtide.unpatch(model)
    assert calls(model, ids) == 5
    remove_policy(model)
    assert all(type(a) is type(b) for a, b in zip(model.modules(), llama().modules(), strict=True))


def test_caches(llama: Any, ids: Tensor) -> None:
    """An empty one in training is left out, one that holds keys is refused, one in evaluation is filled."""
    model, stock = llama(), llama()
    apply_policy(model, ATTENTION)
    assert_as_stock(model, stock, ids, use_cache=True)
    full = stock(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(UnsupportedError, match="a cache that holds keys"):
        model(input_ids=ids, past_key_values=full)
    apply_policy(model, [ALL, *[INPUT] * 4])  # layer 0 fills the cache that the others get
    assert_as_stock(model, stock, ids, use_cache=True)
    outputs = model.eval()(input_ids=ids, use_cache=True)
    assert outputs.past_key_values.get_seq_length(3) == ids.shape[1]
    want = stock.eval()(input_ids=ids, use_cache=True)
    assert torch.equal(outputs.logits, want.logits)


def chunks(model: Any, ids: Tensor) -> Any:
    first = model(input_ids=ids[:, :6], use_cache=True)
    return model(input_ids=ids[:, 6:], labels=ids[:, 6:], past_key_values=first.past_key_values)


@pytest.mark.parametrize("policy", [INPUT, ATTENTION], ids=["input", "attention"])
def test_a_cache_that_a_recomputing_layer_left_empty_is_not_read(policy: Any, llama: Any, ids: Tensor) -> None:
    model, stock = llama(), llama()
    apply_policy(model, [ALL] * 2 + [policy] * 3)
    with pytest.raises(UnsupportedError, match=r"layers\.2: expected a cache that its own forwards have filled"):
        chunks(model, ids)
    first = model(input_ids=ids[:, :6])  # transformers' default makes a cache, which nobody reads
    first.logits.sum().backward()
    model.eval()
    with torch.no_grad(), pytest.raises(UnsupportedError, match="use_cache=False"):
        model(input_ids=ids[:, 6:], past_key_values=first.past_key_values)
    with torch.no_grad():
        chunks(model, ids)
    apply_policy(model.train(), ALL)
    assert torch.equal(chunks(model, ids).loss, chunks(stock, ids).loss)


def switch(model: Any, way: str, **kwargs: Any) -> None:
    """Switch transformers' checkpointing on or off, by the name that its version has for it."""
    new, old = f"activation_checkpointing_{way}", f"gradient_checkpointing_{way}"
    getattr(model, new if hasattr(model, new) else old)(**kwargs)


def test_transformers_own_checkpointing_is_refused(llama: Any, ids: Tensor) -> None:
    model = llama()
    switch(model, "enable")
    for policy in (INPUT, ATTENTION):
        with pytest.raises(UnsupportedError, match=r"recomputed twice.*gradient_checkpointing_disable"):
            apply_policy(model, policy)
    apply_policy(model, ALL)
    switch(model, "disable")
    apply_policy(model, INPUT)
    switch(model, "enable")
    with pytest.raises(UnsupportedError, match="recomputed twice"):
        step(model, ids)


def test_a_forward_replaced_on_the_instance_is_refused(ids: Tensor) -> None:
    """As accelerate does; replaced after the policy, it calls the policy's."""
    model = Plain()
    block = model.blocks[2]
    block.forward = block.forward
    with pytest.raises(UnsupportedError, match=r"blocks\.2: expected a layer with the forward of its class"):
        apply_policy(model, INPUT)
    apply_policy(model, ALL)
    del block.forward
    apply_policy(model, INPUT)
    block.forward = block.forward
    assert calls(model, ids) == 10


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")  # of the compiler's own doing
@pytest.mark.parametrize(
    ("how", "policy"),
    [
        ("layers in place", INPUT),
        pytest.param("layers wrapped", ATTENTION, marks=pytest.mark.slow),
    ],  # the model itself stands in test_offloads
)
def test_inside_torch_compile(how: str, policy: Any, llama: Any, ids: Tensor) -> None:
    model, stock = llama(num_hidden_layers=2), llama(num_hidden_layers=2)
    layers = model.model.layers
    backend = "aot_eager_decomp_partition"  # the partitioner that decides what is kept, without the code generator
    if how == "layers wrapped":
        for k, layer in enumerate(layers):
            layers[k] = torch.compile(layer, backend=backend)
    report = apply_policy(model, policy)
    assert len(report.policies) == 2
    if how == "layers in place":
        for layer in layers:
            layer.compile(backend=backend)
    got, want = step(model, ids), step(stock, ids)
    torch.testing.assert_close(list(got[1].values()), list(want[1].values()), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got[0], want[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as seen:
        step(model, ids)
    ran = sum(event.name == "aten::_scaled_dot_product_flash_attention_for_cpu" for event in seen.events())
    assert ran == (2 if policy is ATTENTION else 4)


def test_the_report(side: LazySide, llama: Any) -> None:
    report = apply_policy(llama(), [*[OFFLOADED_INPUT] * 3, ATTENTION, ALL])
    assert report.stack == "model.layers"
    said = "model.layers: 3 x input offloaded, 1 x attention, 1 x all; on the GPU all the same: "
    assert str(report) == f"{said}model.layers.1, model.layers.2"
    assert report.host_bytes == 0


def test_layers_are_found_by_structure() -> None:
    model = Plain()
    model.blocks = nn.Sequential(*model.blocks)
    assert apply_policy(model, INPUT).stack == "blocks"
    assert apply_policy(nn.Sequential(nn.Linear(2, 2), model), INPUT).stack == "1.blocks"
    assert apply_policy(nn.ModuleList(model.blocks), INPUT).stack == "ModuleList"
    model.tower = nn.ModuleList(Layer(8, 2, 0.0) for _ in range(3))
    model.many = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))  # nothing inside: heads, not layers
    for block in model.blocks:
        block.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(12))
    report = apply_policy(model, INPUT)
    assert report.stack == "blocks"
    assert report.others == ("tower (3)",)
    assert "not changed: tower (3)" in str(report)


def test_layers_that_are_not_found() -> None:
    twins = nn.ModuleDict({"encoder": Plain(), "decoder": Plain()})
    with pytest.raises(ArgumentValueError, match=r"'encoder\.blocks' and 'decoder\.blocks' of 5 each.*get_submodule"):
        apply_policy(twins, INPUT)
    for name in twins:
        assert apply_policy(twins[name], INPUT).stack == "blocks"
    remove_policy(twins)
    assert not any("_lowtide_policy" in vars(m) for m in twins.modules())
    for model in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ModuleList()):
        with pytest.raises(ArgumentValueError, match="a ModuleList or a Sequential"):
            apply_policy(model, INPUT)
    shared = Plain()
    shared.blocks = nn.ModuleList([shared.blocks[0]] * 3)
    with pytest.raises(ArgumentValueError, match="a ModuleList or a Sequential"):
        apply_policy(shared, INPUT)


def test_arguments() -> None:
    model = Plain()
    with pytest.raises(ArgumentTypeError, match=r"model: expected a torch\.nn\.Module, got str"):
        apply_policy("model", INPUT)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"model: expected a torch\.nn\.Module, got str"):
        remove_policy("model")  # type: ignore[arg-type]
    for wrong in ("input", None, [INPUT, "input"]):
        with pytest.raises(ArgumentTypeError, match=r"policy: expected a lowtide\.memory\.ActivationPolicy"):
            apply_policy(model, wrong)  # type: ignore[arg-type]
    for number in (0, 4, 6):
        with pytest.raises(ArgumentValueError, match=f"policy: expected 5 policies.*got {number}"):
            apply_policy(model, [INPUT] * number)
    for budget in (-1, float("nan"), float("inf")):
        with pytest.raises(ArgumentValueError, match="host_gib: expected a finite number of GiB"):
            apply_policy(model, INPUT, host_gib=budget)
    with pytest.raises(ArgumentTypeError, match="host_gib: expected a number of GiB"):
        apply_policy(model, INPUT, host_gib=[8])  # type: ignore[arg-type]
