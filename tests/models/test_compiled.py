"""Patched models compiled as a whole: no logits in the graph, and everything else as in the stock model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import UnsupportedError
from lowtide.models import eligibility
from lowtide.models.lazy_logits import LazyLogits
from models.compiled_losses import WITH_LOGITS, WITHOUT_LOGITS, Graphs, Tiny, V, of_rows
from models.conftest import (
    DYNAMO,
    PEFT,
    VOCAB,
    Doubling,
    assert_same_gradients,
    assert_same_training,
    called_without_loss,
    expect_calls,
)

pytestmark = [*DYNAMO, *PEFT, pytest.mark.usefixtures("fresh_compiler")]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


SIZES_THAT_MAY_CHANGE = ("shifted", "a module", "per token", "another loss too", "in place before")


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [*((name, False) for name in (*WITHOUT_LOGITS, *WITH_LOGITS)), *((name, True) for name in SIZES_THAT_MAY_CHANGE)],
)
def test_a_loss(name, dynamic):
    if name == "compared" and torch.__version__ < (2, 13):
        pytest.skip("the compiler turns z > 0 into 0 < z, which it refuses")
    tail, lazy = {**WITHOUT_LOGITS, **WITH_LOGITS}[name], name in WITHOUT_LOGITS
    torch.manual_seed(0)
    model = Tiny(tail)
    stock, eager = copy.deepcopy(model), copy.deepcopy(model)
    report, expected = lowtide.patch(model), lowtide.patch(eager)
    ids = torch.randint(V, (2, 7))
    labels = ids.flip(1).clone()
    labels[0, 2] = -100
    graphs = Graphs(8, V)
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=dynamic)
    outputs = [run(ids, labels=labels) for run in (compiled, stock, eager)]
    for loss, logits in outputs:
        (loss.sum() + logits[:, 1:].square().mean()).backward()
    torch.testing.assert_close(outputs[0][0], outputs[1][0])
    torch.testing.assert_close(outputs[0][1] + 0, outputs[1][1])
    assert_same_gradients(model, stock)
    assert bool(graphs.logits) is not lazy, graphs.logits
    assert isinstance(outputs[0][1], LazyLogits) is lazy
    expect_calls(report, expected.calls_fused, expected.calls_materialised)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma2",
        "granite",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("llama-tied", "qwen2", "qwen3", "gemma3", "cohere2", "phi")
        ),
    ],
)
def test_a_model(name, patched, batch):
    model, stock, report = patched(name, settings={"num_hidden_layers": 1})
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for _ in range(2):
        assert_same_training(model, stock, batch, through=compiled)
    assert_same_training(model, stock, lambda m: m(**batch, num_items_in_batch=torch.tensor(5)).loss, through=compiled)
    assert not graphs.logits
    expect_calls(report, 3)
    outputs, expected = compiled(**batch), stock(**batch)
    assert outputs.logits is outputs["logits"]
    assert outputs.logits is outputs[1]
    for out in (outputs, expected):
        (out.loss + out.logits.square().mean()).backward()
    torch.testing.assert_close(outputs.logits, expected.logits)
    assert_same_gradients(model, stock)
    expect_calls(report, 4, 1)


def test_a_compiler_that_takes_is_exporting_for_true(patched, batch, monkeypatch):
    """As those before PyTorch 2.13 do in any graph: what is patched runs there too."""
    model, stock, report = patched("llama", settings={"num_hidden_layers": 1})
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert_same_training(model, stock, batch, through=compiled)
    assert not graphs.logits
    expect_calls(report, 1)
    assert graphs.operators >= {"lowtide.cross_entropy", "lowtide.swiglu", "lowtide.rms_norm", "lowtide.rotary"}


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=20)
def test_models_compile_as_often_as_stock(patched):
    """Other sizes, training and evaluation, a loss or none."""
    model, stock, report = patched("llama", settings={"num_hidden_layers": 1})

    def run(model, dynamic):
        torch._dynamo.reset()
        counter, fused = CompileCounter(), 0
        compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic)
        for rows, tokens in ((2, 11), (3, 11), (2, 7), (2, 11)):
            ids = torch.randint(VOCAB, (rows, tokens))
            compiled(input_ids=ids, labels=ids).loss.backward()
            compiled(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(4)).loss.backward()
            fused += 2
        with torch.no_grad():
            for more in ({"labels": ids}, {}, {"logits_to_keep": 1}):
                compiled(input_ids=ids, **more)
        return counter.frame_count, fused + 1

    for dynamic in (None, True):
        (ours, fused), (expected, _) = run(model, dynamic), run(stock, dynamic)
        assert ours == expected
        assert report.calls_fused == fused, str(report)
        report.calls_fused = 0


def test_calls_without_labels_run_the_stock_code(patched, batch):
    model, stock, report = patched("llama", settings={"num_hidden_layers": 1})
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    model.eval(), stock.eval()
    with torch.no_grad():
        logits = compiled(**inputs).logits
        assert type(logits) is torch.Tensor
        torch.testing.assert_close(logits, stock(**inputs).logits)
    tokens = [m.generate(**inputs, max_new_tokens=3, do_sample=False) for m in (model, stock)]
    assert torch.equal(*tokens)
    expect_calls(report, 0)
    loss = compiled(**batch).loss  # with gradients, in evaluation
    torch.testing.assert_close(loss, stock(**batch).loss)
    expect_calls(report, 1)


def test_a_loss_of_the_logits_that_a_graph_returned(patched, batch):
    model, stock, report = patched("llama", settings={"num_hidden_layers": 1})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def loss(m):
        return of_rows(called_without_loss(m, batch), batch["labels"])

    assert_same_training(model, stock, loss, through=compiled)
    expect_calls(report, 1)


def test_logits_are_not_built_from_changed_weights(patched, batch):
    model, _, _ = patched("llama", settings={"num_hidden_layers": 1})
    logits = torch.compile(model, backend="eager", fullgraph=True)(**batch).logits
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(UnsupportedError, match="changed since"):
        logits.sum()


def test_weights_that_the_graph_itself_changes():
    def step(model, ids, *, late):
        loss, logits = model(ids, ids)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        return of_rows(logits, ids) if late else (loss, logits)

    model = Tiny(of_rows)
    lowtide.patch(model)
    ids = torch.randint(V, (2, 7))
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    with pytest.raises(UnsupportedError, match="changed since"):
        compiled(model, ids, late=False)[1].sum()
    with pytest.raises(Exception, match="changed since"):  # the compiler's own, around ours
        compiled(model, ids, late=True)


def test_patch_and_unpatch_after_compile(pair, batch):
    model, stock = pair("llama", num_hidden_layers=1)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    assert_same_training(model, stock, batch, through=compiled)
    assert graphs.logits
    report = lowtide.patch(model)
    graphs.logits.clear()
    assert_same_training(model, stock, batch, through=compiled)
    assert not graphs.logits
    expect_calls(report, 1)
    lowtide.unpatch(model)
    assert_same_training(model, stock, batch, through=compiled)
    assert type(compiled(**batch).logits) is torch.Tensor
    expect_calls(report, 1)


def hooked(model):
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)


def hidden_with_a_scale(model):
    class Scaled(type(model.lm_head)):
        def forward(self, input):
            return super().forward(input) * 2

    model.lm_head.__class__ = Scaled


def another_head(model):
    torch.manual_seed(3)
    model.lm_head = nn.Linear(8, V, bias=False)


def test_a_hook_on_the_head():
    """Of hooks that are added after it, torch.compile is not aware."""
    model = Tiny(of_rows)
    stock = copy.deepcopy(model)
    report = lowtide.patch(model)
    hooked(model), hooked(stock)
    ids = torch.randint(V, (2, 7))
    assert_same_training(model, stock, lambda m: m(ids, ids)[0], through=torch.compile(model, backend="eager"))
    expect_calls(report, 0, 1)


@pytest.mark.parametrize(("change", "fused"), [(hidden_with_a_scale, 1), (another_head, 2)])
def test_a_head_that_changes_after_compile(change, fused):
    model = Tiny(of_rows)
    stock = copy.deepcopy(model)
    report = lowtide.patch(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = torch.randint(V, (2, 7))
    for step in range(2):
        assert_same_training(model, stock, lambda m: m(ids, ids)[0], through=compiled)
        if step == 0:
            change(model), change(stock)
            model.zero_grad(), stock.zero_grad()
    expect_calls(report, fused, 2 - fused)


def test_under_a_mode():
    model = Tiny(of_rows)
    stock = copy.deepcopy(model)
    report = lowtide.patch(model)
    ids = torch.randint(V, (2, 7))
    with Doubling(F.linear):
        losses = [torch.compile(m, backend="eager")(ids, ids)[0] for m in (model, stock)]
    torch.testing.assert_close(*losses)
    expect_calls(report, 0, 1)


@pytest.mark.parametrize("outside", [False, True])
def test_autocast(outside):
    """``outside``: the loss is taken of logits of a region that has ended."""
    model = Tiny(of_rows)
    exact = copy.deepcopy(model).double()
    stock = copy.deepcopy(model)
    report = lowtide.patch(model)
    ids, losses = torch.randint(V, (2, 7)), []

    def step(m):
        with torch.autocast("cpu", torch.bfloat16):
            loss, logits = m(ids, ids)
        return of_rows(logits, ids) if outside else loss

    graphs = Graphs(8, V)
    for m, run in ((model, torch.compile(step, backend=graphs, fullgraph=True)), (stock, step)):
        losses.append(run(m))
        losses[-1].backward()
    of_rows(exact(ids, ids)[1], ids).backward()
    assert losses[0].dtype == losses[1].dtype
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)
    for ours, theirs, true in zip(model.parameters(), stock.parameters(), exact.parameters(), strict=True):
        errors = [(p.grad.double() - true.grad).norm() for p in (ours, theirs)]
        assert errors[0] <= 1.5 * errors[1] + 1e-3 * true.grad.norm()
    assert not graphs.logits
    expect_calls(report, 1)


def test_a_loss_of_what_was_made_without_gradients():
    def loss(z, y):
        with torch.no_grad():
            cut = z * 2
        return of_rows(cut, y) + of_rows(z, y)

    model = Tiny(loss)
    stock = copy.deepcopy(model)
    lowtide.patch(model)
    ids = torch.randint(V, (2, 7))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same_training(model, stock, lambda m: m(ids, ids)[0], through=compiled)


def test_a_loss_in_another_autocast():
    """Logits are float32, and so are those of a loss inside of an autocast region that begins behind the head."""

    def loss(z, y):
        with torch.autocast("cpu", torch.bfloat16):
            return of_rows(z, y)

    model = Tiny(loss)
    stock = copy.deepcopy(model)
    report = lowtide.patch(model)
    ids = torch.randint(V, (2, 7))
    assert_same_training(model, stock, lambda m: m(ids, ids)[0], through=torch.compile(model, backend="aot_eager"))
    expect_calls(report, 1)


def test_logits_in_a_checkpoint():
    """What is built in a part of the graph stays there, and the rest builds its own."""

    def loss(z, y):
        inside = checkpoint(lambda y: z.square().mean() + of_rows(z, y), y, use_reentrant=False)
        return inside + z.exp().mean()

    model = Tiny(loss)
    stock = copy.deepcopy(model)
    report = lowtide.patch(model)
    ids = torch.randint(V, (2, 7))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same_training(model, stock, lambda m: m(ids, ids)[0], through=compiled)
    assert report.calls_materialised > 0


@pytest.mark.parametrize("forgets", [False, True])
def test_a_compiler_that_forgets_to_recompute(forgets, patched, batch, monkeypatch):
    """Where it saves what autograd functions in a checkpoint save, as PyTorch 2.11 does, the stock parts run there."""
    monkeypatch.setattr(eligibility, "_FORGETS", forgets)
    model, stock, report = patched("llama", settings={"num_hidden_layers": 1})
    for checkpointed in (False, True):
        if checkpointed:
            for m in (model, stock):
                m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        graphs = Graphs()
        assert_same_training(model, stock, batch, through=torch.compile(model, backend=graphs))
        fused = {"lowtide.swiglu", "lowtide.rotary"} & graphs.operators
        assert bool(fused) == (not (forgets and checkpointed))
        assert "lowtide.cross_entropy" in graphs.operators
    expect_calls(report, 2)


def test_gradient_checkpointing(patched, batch):
    model, stock, report = patched("llama", settings={"use_cache": False})
    for m in (model, stock):
        m.gradient_checkpointing_enable({"use_reentrant": False})
    graphs = Graphs()
    assert_same_training(model, stock, batch, through=torch.compile(model, backend=graphs))
    assert not graphs.logits
    expect_calls(report, 1)


@pytest.mark.parametrize("head", [False, True], ids=["layers", "head too"])
def test_lora(head, build, batch):
    peft = pytest.importorskip("peft")
    stock = build("llama", num_hidden_layers=1)
    targets = ["q_proj", "up_proj", *(["lm_head"] if head else [])]
    torch.manual_seed(7)
    stock = peft.get_peft_model(stock, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    model = copy.deepcopy(stock)
    report = lowtide.patch(model)
    graphs = Graphs()
    assert_same_training(model, stock, batch, through=torch.compile(model, backend=graphs))
    assert bool(graphs.logits) is head
    expect_calls(report, int(not head), int(head))
    assert not head or "LoRA" in next(iter(report.why_materialised))


@pytest.mark.slow
def test_a_break_before_the_head(patched, batch):
    """Each piece is a graph of its own, and the loss still has no logits."""
    model, stock, report = patched("llama", settings={"num_hidden_layers": 1})
    norm = type(model.model.norm)

    class Breaks(norm):
        def forward(self, *args, **kwargs):
            torch._dynamo.graph_break()
            return norm.forward(self, *args, **kwargs)

    model.model.norm.__class__ = Breaks
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs)
    for _ in range(2):
        assert_same_training(model, stock, batch, through=compiled)
    assert graphs.count > 1
    assert not graphs.logits
    expect_calls(report, 2)
