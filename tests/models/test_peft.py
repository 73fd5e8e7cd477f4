"""Models of peft's, patched before and after it: every gradient as without lowtide, by whichever way they run."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from models.conftest import (
    MLP,
    PEFT,
    assert_no_further_from_the_truth,
    assert_same_training,
    expect_calls,
    fused,
    lora,
    set_level,
    types_of,
    wrap,
)
from promises import promise
from support import every_pair

peft = pytest.importorskip("peft")

pytestmark = [
    *PEFT,
    promise("adapters"),
    pytest.mark.filterwarnings("ignore:.*lora_bias=True.* was passed:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*PrefixEncoder.*:FutureWarning"),
]
ORDERS = ["peft first", "patch first"]


@pytest.fixture
def both(pair):
    """A patched peft model, its stock twin, and the report."""

    def both(*configs, name="llama", order="peft first", dtype=torch.float32, settings=None, **kwargs):
        model, stock = pair(name, dtype, **(settings or {}))
        if order == "patch first":
            report = lowtide.patch(model)
        model, stock = wrap(model, *configs, **kwargs), wrap(stock, *configs, **kwargs)
        if order == "peft first":
            report = lowtide.patch(model)
        return model, stock, report

    return both


compare = functools.partial(assert_same_training, seed=11, rtol=1e-5, atol=2e-6)
ALL = lora(target_modules=["q_proj", *MLP])
SAVED = lora(target_modules=["q_proj"], modules_to_save=["lm_head"])
# name of the model, and the adapters; also heads that are tied, capped, scaled or have a bias
FUSED = {
    "embedding": ("llama", lora(target_modules=["q_proj", "embed_tokens"])),
    "saved, MLP": ("llama", lora(target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head", "embed_tokens"])),
    "saved projection": ("llama", lora(target_modules=["up_proj"], modules_to_save=["gate_proj"])),
    "patterns": ("llama", lora(target_modules=MLP, rank_pattern={"up_proj": 1}, alpha_pattern={"up_proj": 7})),
    "prefix": ("llama", peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
    "tied, saved": ("llama-tied", SAVED),
    "capped": ("gemma2", ALL),
    "divided, saved": ("granite", SAVED),
    "biased": ("phi", ALL),
    "joined": ("phi3", lora(target_modules=["gate_up_proj", "down_proj"])),
}  # fmt: skip


@promise("patched")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", FUSED)
def test_loss_without_logits_and_every_gradient(case, order, both, batch):
    name, config = FUSED[case]
    model, stock, report = both(config, name=name, order=order)
    for level, tile in ((0, None), (1, 4)):
        set_level(model, level, tile)
        compare(model, stock, batch)
    loss = compare(model, stock, {**batch, "num_items_in_batch": 7})
    assert fused(loss)["mlp"] == 2 * (name != "phi")
    expect_calls(report, 3)
    assert lowtide.patch(model) is report
    targets = getattr(config, "target_modules", None) or ()
    if on_mlp := [part for part in ("gate_proj", "gate_up_proj", "up_proj", "down_proj") if part in targets]:
        assert name == "phi" or f"LoRA on {', '.join(on_mlp)} with it" in report.parts["mlp"].outcome


@promise("values", "dtypes")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("wide", [True, False])
def test_in_bfloat16_no_further_from_the_truth(autocast, wide, both, batch):
    """peft keeps its adapters in float32, unless an argument forbids it."""
    model, stock, report = both(lora(target_modules=MLP), dtype=torch.bfloat16, autocast_adapter_dtype=wide)
    adapter = model.get_base_model().model.layers[0].mlp.up_proj.lora_A["default"].weight
    assert adapter.dtype == (torch.float32 if wide else torch.bfloat16)

    def loss(m):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and m in (model, stock)):
            return m(**batch).loss

    assert_no_further_from_the_truth(model, stock, loss)
    assert report.calls_materialised == 0


@promise("checkpoint")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_drop_the_same_again(reentrant, both, batch):
    """A recomputed layer with dropout in its MLP's adapters gives the gradients of one that is not."""
    model, _, _ = both(lora(target_modules=MLP, lora_dropout=0.5))
    other = copy.deepcopy(model)
    other.enable_input_require_grads()
    other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    compare(other, model, batch)


def lora_layers(model):
    return [m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer) and "more0" in m.scaling]


# Ways to change what adapters do, one after another.
STEPS = {
    "the other": lambda m: m.set_adapter("more0"),
    "scaled": lambda m: [layer.set_scale("more0", 3.0) for layer in lora_layers(m)],
    "merged": lambda m: m.merge_adapter(),
    "unmerged": lambda m: [layer.unmerge() for layer in lora_layers(m)],
    "deleted": lambda m: m.delete_adapter("default"),
    "frozen": lambda m: [p.requires_grad_(False) for p in m.parameters() if p.shape[0] == 4],
}


@promise("patched", "reversible")
@pytest.mark.parametrize("order", ORDERS)
def test_changes_after_patching_are_followed(order, both, batch):
    second = lora(target_modules=["down_proj", "q_proj"], r=4, lora_alpha=9)
    model, stock, report = both(lora(target_modules=MLP), second, order=order)
    calls = 0
    for what, change in STEPS.items():
        for m in (model, stock):
            change(m)
        if what == "merged":  # nothing is left to train
            torch.testing.assert_close(*(m(**batch).loss for m in (model, stock)))
        else:
            assert fused(compare(model, stock, batch))["mlp"] == 2, what
        calls += 1
        expect_calls(report, calls)
    with model.disable_adapter(), stock.disable_adapter():
        torch.testing.assert_close(*(m(**batch).loss for m in (model, stock)))
    compare(model, stock, batch)
    whole, expected = model.merge_and_unload(), stock.merge_and_unload()
    torch.testing.assert_close(*(m(**batch).loss for m in (whole, expected)))
    expect_calls(report, calls + 3)
    lowtide.unpatch(whole)
    assert types_of(whole) == types_of(expected)


def hooked(module):
    module.register_forward_hook(lambda module, args, output: output * 0.5)


@promise("patched", "reversible", "reported")
@pytest.mark.parametrize("order", ORDERS)
def test_saved_heads_take_turns(order, both, batch):
    """Those of several adapters and the reference's: two heads of one wrapper, as DPO has it."""
    model, stock, report = both(SAVED, SAVED, order=order)
    for i, name in enumerate(("default", "more0", "default")):
        for m in (model, stock):
            m.set_adapter(name)
        compare(model, stock, batch)
        expect_calls(report, i + 1)
        assert report.parts["loss"].module == f"lm_head.modules_to_save.{name}"
    call, ids = {"input_ids": batch["input_ids"], "num_items_in_batch": 3}, batch["input_ids"][..., None]

    def loss(m, reference):
        policy = m(**call).logits
        if reference == "another adapter":
            m.set_adapter("more0")
            frozen = m(**call).logits
            m.set_adapter("default")
        else:
            with torch.no_grad(), m.disable_adapter():
                frozen = m(**call).logits
        own, other = (z.log_softmax(-1).gather(-1, ids).mean() for z in (policy, frozen))
        return -F.logsigmoid(own - other)

    for reference in ("adapters off", "another adapter", "adapters off"):
        compare(model, stock, functools.partial(loss, reference=reference), gradients=1e-4)
    expect_calls(report, 9)
    for m in (model, stock):
        hooked(m.get_base_model().lm_head)
    compare(model, stock, batch, gradients=1e-4)
    expect_calls(report, 9, 1)
    lowtide.unpatch(model)
    assert types_of(model) == types_of(stock)


OF = "is a Linear of peft.tuners."
IA3 = {"target_modules": ["lm_head", *MLP], "feedforward_modules": ["down_proj"]}
OTHERS = {
    "LoRA on the head": (lora(target_modules=["lm_head", "q_proj"]), "list it in modules_to_save"),
    "DoRA": (lora(target_modules=["lm_head", *MLP], use_dora=True), "DoraLinearVariant"),
    "IA3": (peft.IA3Config(**IA3), OF + "ia3.layer, not"),
    "tied tokens": (lora(target_modules=["q_proj"], trainable_token_indices=[3, 5]), "TrainableTokensWrapper"),
    "bias": (lora(target_modules=["lm_head", *MLP], lora_bias=True), "(a bias, or a scale that is no number)"),
}


@promise("reported")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", OTHERS)
def test_other_tuners_run_as_they_came(case, order, both, batch):
    config, reason = OTHERS[case]
    model, stock, report = both(config, order=order, name="llama-tied" if case == "tied tokens" else "llama")
    loss = compare(model, stock, batch)
    expect_calls(report, 0, 1)
    lowtide.patch(model)
    assert reason in str(report)
    on_mlps = "gate_proj" in config.target_modules
    assert (fused(loss)["mlp"] == 0) == on_mlps
    assert not on_mlps or report.parts["mlp"].outcome.startswith("left as it is: gate_proj ")


class Louder(peft.tuners.lora.Linear):
    def forward(self, x, *args, **kwargs):
        return super().forward(x, *args, **kwargs) * 1.5


def with_a_forward(layer):
    stock = layer.lora_A["default"].forward
    layer.lora_A["default"].forward = lambda x: stock(x) * 2


CHANGES = {
    "hook": lambda layer: hooked(layer.lora_B["default"]),
    "forward": with_a_forward,
    "another class": lambda layer: setattr(layer, "__class__", Louder),
    "parametrization": lambda layer: nn.utils.parametrizations.weight_norm(layer.base_layer),
}


@promise("patched", "reported")
@every_pair(change=CHANGES, when=["before", "after"])
def test_a_lora_layer_that_is_not_plain(change, when, pair, batch):
    model, stock = (wrap(m, lora(target_modules=MLP)) for m in pair("llama"))
    if when == "after":
        report = lowtide.patch(model)
    for m in (model, stock):
        CHANGES[change](m.get_base_model().model.layers[1].mlp.up_proj)
    if when == "before":
        report = lowtide.patch(model)
    assert fused(compare(model, stock, batch))["mlp"] == 1
    expect_calls(report, 1)
    lowtide.patch(model)
    assert report.parts["mlp"].more[0].module == "model.layers.1.mlp"


@promise("reversible")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("config", [ALL, SAVED], ids=["all", "saved"])
def test_checkpoints_of_peft_are_stock(order, config, both, build, batch, tmp_path):
    model, stock, _ = both(config, order=order)
    model(**batch)
    assert list(model.state_dict()) == list(stock.state_dict())
    model.save_pretrained(tmp_path / "ours", save_embedding_layers=False)
    stock.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    for file in (tmp_path / "theirs").iterdir():
        assert file.read_bytes() == (tmp_path / "ours" / file.name).read_bytes(), file.name
    fresh = build("llama")
    report = lowtide.patch(fresh)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "ours", is_trainable=True).train()
    torch.testing.assert_close(loaded(**batch).loss, stock(**batch).loss)
    expect_calls(report, 1)
    merged, expected = loaded.merge_and_unload(), stock.merge_and_unload()
    assert {n: p for n, p in merged.state_dict().items() if not torch.equal(p, expected.state_dict()[n])} == {}
    merged.save_pretrained(tmp_path / "merged")
    again = type(build("llama")).from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(again(**batch).loss, expected(**batch).loss)


@promise("patched", "reported")
def test_several_adapters_at_a_time_run_as_they_came(both, batch):
    model, stock, report = both(ALL, ALL)
    for m in (model, stock):
        m.base_model.set_adapter(["default", "more0"])
    assert fused(compare(model, stock, batch))["mlp"] == 0
    expect_calls(report, 1)
    lowtide.patch(model)
    assert "gate_proj has several adapters active at a time" in str(report)


@promise("patched")
def test_batches_of_several_adapters(both, batch):
    model, stock, report = both(ALL)
    losses = [m.eval()(**batch, adapter_names=["default", "__base__"]).loss for m in (model, stock)]
    torch.testing.assert_close(*losses)
    expect_calls(report, 1)
