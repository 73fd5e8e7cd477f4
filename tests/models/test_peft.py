"""Models of peft's, patched before and after it: every gradient as without lowtide, by whichever way they run."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.measure.allocations import track_allocations
from lowtide.models.instance import part_of
from models.conftest import (
    COPIES,
    DYNAMO,
    PEFT,
    assert_no_further_from_the_truth,
    assert_same_gradients,
    assert_same_training,
    expect_calls,
    types_of,
)
from support import every_pair

peft = pytest.importorskip("peft")

pytestmark = [
    *DYNAMO,
    *PEFT,
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]
MLP = ["gate_proj", "up_proj", "down_proj"]


def pytest_generate_tests(metafunc):
    if "order" in metafunc.fixturenames:
        metafunc.parametrize("order", ["peft first", "patch first"])


def lora(**settings):
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False, **settings})


def wrap(model, *configs, **kwargs):
    torch.manual_seed(7)
    first, *more = configs
    wrapped = peft.get_peft_model(model, first, **kwargs)
    for i, config in enumerate(more):
        wrapped.add_adapter(f"more{i}", config)
    with torch.no_grad():
        for name, p in wrapped.named_parameters():  # some start at 0 or 1, where their neighbours' gradients are 0
            if p.requires_grad or "more" in name:
                p.add_(0.1 * torch.randn_like(p))
    return wrapped.train()


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


compare = functools.partial(assert_same_training, seed=11, rtol=1e-5, atol=1e-6)


HEADS = {
    "head": lora(target_modules=["lm_head"]),
    "head and more": lora(target_modules=["lm_head", "q_proj", "embed_tokens"]),
    "rank-stabilised": lora(target_modules=["lm_head", *MLP], use_rslora=True),
    "bias": lora(target_modules=["lm_head", "q_proj", *MLP], lora_bias=True),
    "saved": lora(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "saved, MLP": lora(target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    "dropout": lora(target_modules=["lm_head", "q_proj"], lora_dropout=0.4),
    "all": lora(target_modules=["lm_head", "q_proj", *MLP]),
    "head by hand": lora(target_modules=["lm_head", *MLP], rank_pattern={"lm_head": 1}, alpha_pattern={"up_proj": 7}),
}


PROMPTS = {
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}
TIED = {  # made in the test: some versions of peft do not have the option
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "LoRA": {"target_modules": ["embed_tokens", "lm_head"]},
}
# Also heads that are tied, capped, scaled or have a bias.
FUSED = {
    **{what: ("llama", config) for what, config in (HEADS | PROMPTS).items()},
    **{
        f"{name}, {what}": (name, HEADS[what])
        for name in ("llama-tied", "gemma2", "cohere2", "phi", "granite")
        for what in ("all", "saved")
    },
    **{f"adapters tied, {what}": ("llama-tied", settings) for what, settings in TIED.items()},
}


@pytest.mark.filterwarnings("ignore:.*lora_bias=True.* was passed:UserWarning")
@pytest.mark.filterwarnings("ignore:.*PrefixEncoder.*:FutureWarning")
@pytest.mark.parametrize(("name", "config"), FUSED.values(), ids=FUSED)
def test_loss_without_logits_and_every_gradient(name, config, order, both, batch):
    config = lora(ensure_weight_tying=True, **config) if isinstance(config, dict) else config
    model, stock, report = both(config, name=name, order=order)
    for _ in range(2):
        compare(model, stock, batch)
    compare(model, stock, {**batch, "num_items_in_batch": 7})
    expect_calls(report, 3)
    assert lowtide.patch(model) is report
    expected = "LoRA with it" if "lm_head" in (getattr(config, "target_modules", None) or ()) else "without logits"
    assert expected in report.parts["loss"].outcome


def test_a_base_weight_that_is_trained(both, batch):
    model, stock, report = both(lora(target_modules=["lm_head", *MLP]))
    for m in (model, stock):
        for p in m.parameters():
            p.requires_grad_(True)
    compare(model, stock, batch)
    assert report.calls_fused == 1


def test_float64_to_the_last_digits(both, batch, ran):
    """The stock loss rounds to float32, so the reference takes its own."""
    model, stock, report = both(
        lora(target_modules=["lm_head", "q_proj", *MLP]), lora(target_modules=["lm_head", "up_proj"])
    )
    for m in (model, stock):
        m.double()
        m.base_model.set_adapter(["default", "more0"])
    model(**batch).loss.backward()
    labels = batch.pop("labels")
    logits = stock(**batch).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    assert_same_gradients(model, stock, rtol=1e-11)
    assert (report.calls_fused, ran["adapted_mlp"]) == (1, 2)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("adapter_dtype", ["float32", "bfloat16"])
def test_in_bfloat16_no_further_from_the_truth(autocast, adapter_dtype, both, batch):
    """peft keeps its adapters in float32, unless an argument forbids it."""
    model, stock, report = both(
        lora(target_modules=["lm_head", *MLP]), dtype=torch.bfloat16, autocast_adapter_dtype=adapter_dtype == "float32"
    )
    assert model.get_base_model().lm_head.lora_A["default"].weight.dtype == getattr(torch, adapter_dtype)

    def loss(m):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and m in (model, stock)):
            return m(**batch).loss

    assert_no_further_from_the_truth(model, stock, loss, draws=4)
    assert report.calls_fused == 4


@pytest.mark.parametrize("which", [["up_proj"], ["gate_proj", "down_proj"], MLP])
def test_mlps_run_fused_with_their_adapters(which, order, both, batch, ran):
    model, stock, report = both(lora(target_modules=which), order=order)
    compare(model, stock, batch)
    assert (ran["adapted_mlp"], ran["swiglu_mlp"]) == (2, 0)
    lowtide.patch(model)
    assert f"LoRA on {', '.join(which)} with it" in report.parts["mlp"].outcome
    for layer in model.get_base_model().model.layers:
        assert layer.mlp.checkpoint_level == 0
        layer.mlp.checkpoint_level = 1
    compare(model, stock, batch)
    assert ran["adapted_mlp"] == 4
    x = torch.randn(3, 16)
    torch.testing.assert_close(*(m.get_base_model().model.layers[0].mlp(x) for m in (model, stock)))


def test_mlps_with_dropout(both, batch, ran):
    model, stock, _ = both(lora(target_modules=MLP, lora_dropout=0.5))
    mlp = model.get_base_model().model.layers[0].mlp
    model(**batch).loss.backward()
    assert (ran["adapted_mlp"], ran["swiglu_mlp"]) == (2, 0)
    grads = [p.grad.clone() for p in mlp.parameters() if p.grad is not None]
    assert len(grads) == 6
    assert all(g.abs().sum() > 0 for g in grads)
    x = torch.randn(400, 16)
    outputs = torch.stack([mlp(x) for _ in range(4)])
    drawn = torch.stack([stock.get_base_model().model.layers[0].mlp(x) for _ in range(4)])
    assert ran["adapted_mlp"] == 6
    assert not torch.equal(outputs[0], outputs[1])
    assert outputs.var(0).mean().item() == pytest.approx(
        drawn.var(0).mean().item(), rel=0.1
    )  # as much noise as stock's
    model.eval(), stock.eval()
    model.zero_grad()
    compare(model, stock, batch)
    model.train()
    for m in (model, stock):
        m.add_adapter("other", lora(target_modules=["up_proj"], lora_dropout=0.5))
        m.base_model.set_adapter(["default", "other"])
        m.train()
    ran["adapted_mlp"] = 0
    model(**batch)
    assert (ran["adapted_mlp"], ran["swiglu_mlp"]) == (0, 0)
    assert "several LoRA adapters with dropout" in str(lowtide.patch(model))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_drop_the_same_again(reentrant, both, batch):
    """A recomputed layer with dropout in its MLP's adapters gives the gradients of one that is not."""
    model, _, _ = both(lora(target_modules=MLP, lora_dropout=0.5))
    other = copy.deepcopy(model)
    other.enable_input_require_grads()
    other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    compare(other, model, batch)


def steps(model):
    """Ways to change what adapters do, one after another."""
    yield "two at once", lambda m: m.base_model.set_adapter(["default", "more0"])
    yield "the other", lambda m: m.set_adapter("more0")
    yield "scaled", lambda m: [layer.set_scale("more0", 3.0) for layer in lora_layers(m)]
    yield "merged", lambda m: m.merge_adapter()
    yield "unmerged", lambda m: [layer.unmerge() for layer in lora_layers(m)]
    yield "deleted", lambda m: m.delete_adapter("default")
    yield "frozen", lambda m: [p.requires_grad_(False) for p in m.parameters() if p.shape[0] == 4]


def lora_layers(model):
    return [m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer) and "more0" in m.scaling]


def test_changes_after_patching_are_followed(order, both, batch, ran):
    second = lora(target_modules=["lm_head", "down_proj", "q_proj"], r=4, lora_alpha=9)
    model, stock, report = both(lora(target_modules=["lm_head", *MLP]), second, order=order)
    fused = 0
    for what, change in steps(model):
        for m in (model, stock):
            change(m)
        before = ran["adapted_mlp"] + ran["swiglu_mlp"]
        if what == "merged":  # nothing is left to train
            torch.testing.assert_close(*(m(**batch).loss for m in (model, stock)))
        else:
            compare(model, stock, batch)
        fused += 1
        assert (report.calls_fused, report.calls_materialised) == (fused, 0), f"{what}: {report}"
        assert ran["adapted_mlp"] + ran["swiglu_mlp"] == before + 2, what
    with model.disable_adapter(), stock.disable_adapter():
        torch.testing.assert_close(*(m(**batch).loss for m in (model, stock)))
    assert report.calls_fused == fused + 1
    compare(model, stock, batch)
    plain, expected = model.merge_and_unload(), stock.merge_and_unload()
    torch.testing.assert_close(*(m(**batch).loss for m in (plain, expected)))
    assert report.calls_fused == fused + 3
    lowtide.unpatch(plain)
    assert type(plain.lm_head) is nn.Linear
    assert types_of(plain) == types_of(expected)


def test_saved_heads_of_several_adapters(order, both, batch):
    config = lora(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model, stock, report = both(config, config, order=order)
    for i, name in enumerate(("default", "more0", "default")):
        for m in (model, stock):
            m.set_adapter(name)
        compare(model, stock, batch)
        assert report.calls_fused == i + 1
        assert report.parts["loss"].module == f"lm_head.modules_to_save.{name}"
    with model.disable_adapter(), stock.disable_adapter():
        torch.testing.assert_close(*(m(**batch).loss for m in (model, stock)))
    assert report.calls_materialised == 0, str(report)
    assert report.parts["loss"].module == "lm_head.original_module"
    for m in (model, stock):
        hooked(m.get_base_model().lm_head)
    compare(model, stock, batch)
    assert report.calls_materialised == 1
    lowtide.unpatch(model)
    assert types_of(model) == types_of(stock)


OF = "is a Linear of peft.tuners."
OTHERS = {
    "DoRA": (lora(target_modules=["lm_head", *MLP], use_dora=True), "DoraLinearVariant"),
    "IA3": (
        peft.IA3Config(target_modules=["lm_head", *MLP], feedforward_modules=["down_proj"]), OF + "ia3.layer, not"
    ),
    "AdaLoRA": (
        peft.AdaLoraConfig(target_modules=["lm_head", *MLP], total_step=9, init_r=4, target_r=2), "is a SVDLinear, not"
    ),
    "tokens": (lora(target_modules=["q_proj"], trainable_token_indices={"lm_head": [3, 5]}), "TrainableTokensWrapper"),
    "tied tokens": (lora(target_modules=["q_proj"], trainable_token_indices=[3, 5]), "TrainableTokensWrapper"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "reason"), OTHERS.values(), ids=OTHERS)
def test_other_tuners_run_as_they_came(config, reason, order, both, batch, ran, request):
    name = "llama-tied" if "tied tokens" in request.node.name else "llama"
    model, stock, report = both(config, order=order, name=name)
    compare(model, stock, batch)
    expect_calls(report, 0, 1)
    lowtide.patch(model)
    assert reason in report.parts["loss"].outcome
    on_mlps = "gate_proj" in (config.target_modules or ())
    assert (ran["adapted_mlp"] + ran["swiglu_mlp"] == 0) == on_mlps
    if on_mlps:
        assert not report.parts["mlp"].patched
        assert report.parts["mlp"].outcome.startswith("left as it is: gate_proj ")


def test_adaption_prompts_keep_the_forward_that_they_found(order, both, batch):
    config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=2)
    model, stock, report = both(config, order=order)
    compare(model, stock, batch)
    expect_calls(report, int(order == "patch first"))
    assert report.parts["loss"].patched == (order == "patch first")
    assert ("AdaptionPromptModel around the model keeps the forward" in str(report)) == (order == "peft first")


def test_logits_read_after_the_loss_have_the_adapters(both, batch):
    model, stock, report = both(lora(target_modules=["lm_head", "q_proj"], lora_dropout=0.3))
    read = []

    def loss(m):
        outputs = m(**batch)
        read.append(outputs.logits + 0)
        return outputs.loss + outputs.logits.square().mean()

    compare(model, stock, loss)
    torch.testing.assert_close(*read)
    assert all(m.get_base_model().lm_head.lora_A["default"].weight.grad is not None for m in (model, stock))
    expect_calls(report, 1, 1)


@pytest.mark.parametrize("grad", [False, True])
def test_logits_of_a_call_without_adapters_stay_without(grad, both, batch):
    """Read where the adapters are on again, as a reference model's are."""
    model, stock, _ = both(lora(target_modules=["lm_head", "q_proj"]))
    read = []
    for m in (model, stock):
        with torch.set_grad_enabled(grad), m.disable_adapter():
            logits = m(**batch).logits
        read.append([logits.logsumexp(-1), logits.exp(), logits.logsumexp(-1)])
    for ours, theirs in zip(*read, strict=True):
        torch.testing.assert_close(ours + 0, theirs)
        assert ours.requires_grad == theirs.requires_grad


@pytest.mark.parametrize("reference", ["adapters off", "another adapter"])
def test_a_saved_heads_logits_after_those_of_the_reference(reference, order, both, batch):
    """As DPO has it: both forward passes, and then the loss of both. They are two heads of one wrapper."""
    config = lora(target_modules=["q_proj"], modules_to_save=["lm_head"])
    more = [config] if reference == "another adapter" else []
    model, stock, report = both(config, *more, order=order)
    call = {"input_ids": batch["input_ids"], "num_items_in_batch": 3}
    ids = batch["input_ids"][..., None]

    def loss(m):
        policy = m(**call).logits
        if more:
            m.set_adapter("more0")
            frozen = m(**call).logits
            m.set_adapter("default")
        else:
            with torch.no_grad(), m.disable_adapter():
                frozen = m(**call).logits
        own, other = (z.log_softmax(-1).gather(-1, ids).sum() for z in (policy, frozen))
        return -F.logsigmoid(own - other)

    for _ in range(2):  # there and back again
        assert_same_training(model, stock, loss)
    expect_calls(report, 4)
    lowtide.unpatch(model)
    assert types_of(model) == types_of(stock)


def test_no_logits_and_nothing_of_the_weights_size(both):
    """Of LoRA on a frozen head: 12 chunks at least, no copy and no gradient of W, no logits."""
    model, _, report = both(lora(target_modules=["lm_head"]), settings={"vocab_size": 4001})
    ids = torch.randint(3, 4001, (4, 60), generator=torch.Generator().manual_seed(1))
    with track_allocations() as seen:
        model(input_ids=ids, labels=ids).loss.backward()
    logits = 4 * 60 * 4001 * 4
    assert report.calls_fused == 1
    assert max(event.bytes for event in seen.events) <= logits / 8
    assert seen.peak_bytes < logits

    weight = model.get_base_model().lm_head.base_layer.weight
    wide = both(lora(target_modules=["lm_head"]), settings={"vocab_size": 997, "hidden_size": 256})[0]
    weight = wide.get_base_model().lm_head.base_layer.weight
    with track_allocations() as seen:
        wide(input_ids=ids[:1, :40] % 997, labels=ids[:1, :40] % 997).loss.backward()
    assert max(event.bytes for event in seen.events) < weight.nbytes / 4


class Louder(peft.tuners.lora.Linear):
    def forward(self, x, *args, **kwargs):
        return super().forward(x, *args, **kwargs) * 1.5


def with_a_forward(layer):
    stock = layer.lora_A["default"].forward
    layer.lora_A["default"].forward = lambda x: stock(x) * 2


def hooked(module):
    module.register_forward_hook(lambda module, args, output: output * 0.5)


CHANGES = {
    "hook": lambda layer: hooked(layer.lora_B["default"]),
    "hook around": hooked,
    "forward": with_a_forward,
    "another class": lambda layer: setattr(layer, "__class__", Louder),
    "another dropout": lambda layer: layer.lora_dropout.update({"default": nn.AlphaDropout(0.0)}),
    "parametrization": lambda layer: nn.utils.parametrizations.weight_norm(layer.base_layer),
}


@every_pair(where=["lm_head", "model.layers.1.mlp.up_proj"], change=CHANGES, when=["before", "after"])
def test_a_lora_layer_that_is_not_plain(change, where, when, pair, batch, ran):
    model, stock = (wrap(m, lora(target_modules=["lm_head", *MLP])) for m in pair("llama"))
    if when == "after":
        report = lowtide.patch(model)
        if change == "another class" and where == "lm_head":
            return  # its class is ours by then
    for m in (model, stock):
        CHANGES[change](m.get_base_model().get_submodule(where))
    if when == "before":
        report = lowtide.patch(model)
    compare(model, stock, batch)
    head = where == "lm_head"
    expect_calls(report, int(not head), int(head))
    assert ran["adapted_mlp"] == (2 if head else 1)
    if not head:
        lowtide.patch(model)
        assert report.parts["mlp"].more[0].module == "model.layers.1.mlp"


def test_probes_leave_no_trace(build):
    wrapped = wrap(build("llama"), lora(target_modules=["lm_head", *MLP], lora_dropout=0.2))
    state, before = torch.get_rng_state(), {n: p.clone() for n, p in wrapped.named_parameters()}
    attributes = {n: {**vars(m)} for n, m in wrapped.named_modules()}
    assert "LoRA with it" in str(lowtide.patch(wrapped))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[n]) for n, p in wrapped.named_parameters())
    lowtide.unpatch(wrapped)
    assert {n: {**vars(m)} for n, m in wrapped.named_modules()} == attributes


@pytest.mark.parametrize("through", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("kind", ["head", "saved"])
def test_copies(through, kind, both, batch, ran):
    model, stock, report = both(HEADS["all"] if kind == "head" else HEADS["saved, MLP"])
    model(**batch)
    other = through(model)
    ran["adapted_mlp"] = 0
    compare(other, stock, batch)
    assert report.calls_fused == 1
    assert lowtide.patch(other).calls_fused == 2
    assert ran["adapted_mlp"] == 2
    lowtide.unpatch(other)
    assert types_of(other) == types_of(stock)
    assert part_of(model.get_base_model()) == "loss"


@pytest.mark.parametrize("kind", ["all", "saved, MLP"])
def test_checkpoints_of_peft_are_stock(order, kind, both, build, batch, tmp_path):
    model, stock, _ = both(HEADS[kind], order=order)
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
    assert report.calls_fused == 1
    merged, expected = loaded.merge_and_unload(), stock.merge_and_unload()
    assert {n: p for n, p in merged.state_dict().items() if not torch.equal(p, expected.state_dict()[n])} == {}
    merged.save_pretrained(tmp_path / "merged")
    again = type(build("llama")).from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(again(**batch).loss, expected(**batch).loss)


@pytest.mark.parametrize("way", ["merge_and_unload", "unload"])
@pytest.mark.parametrize("undo", [True, False])
def test_taken_off_before_it_ran(undo, way, both, batch):
    """peft copies the patched head into modules_to_save, and hands the copy out."""
    model, stock, report = both(HEADS["saved"], order="patch first")
    model, stock = (getattr(m, way)() for m in (model, stock))
    for m in (model, stock):
        m.requires_grad_(True)
    if undo:
        lowtide.unpatch(model)
        assert types_of(model) == types_of(stock)
    compare(model, stock, batch)
    expect_calls(report, int(not undo))


def test_saved_projections_of_an_mlp(both, batch, ran):
    for order in ("peft first", "patch first"):
        model, stock, _ = both(lora(target_modules=["up_proj"], modules_to_save=["gate_proj"]), order=order)
        compare(model, stock, batch)
        with model.disable_adapter(), stock.disable_adapter():
            torch.testing.assert_close(*(m(**batch).loss for m in (model, stock)))
    assert (ran["adapted_mlp"], ran["swiglu_mlp"]) == (4, 4)
    for m in (model, stock):
        hooked(m.get_base_model().model.layers[0].mlp.gate_proj)
    compare(model, stock, batch)
    assert "gate_proj is a layer of modules_to_save with hooks" in str(lowtide.patch(model))


def test_generation_and_batches_of_several_adapters(both, batch):
    model, stock, report = both(HEADS["all"])
    model.eval(), stock.eval()
    prompt = {"input_ids": batch["input_ids"][:, :5], "attention_mask": batch["attention_mask"][:, :5]}
    for adapter_names in (None, ["default", "__base__"]):  # a batch of several adapters
        own = {} if adapter_names is None else {"adapter_names": adapter_names}
        tokens = [m.generate(**prompt, **own, max_new_tokens=5, do_sample=False) for m in (stock, model)]
        assert torch.equal(*tokens)
    torch.testing.assert_close(*(m(**batch, adapter_names=["default", "__base__"]).loss for m in (model, stock)))
    expect_calls(report, 0, 1)
