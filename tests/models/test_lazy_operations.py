"""What is made of logits without building them is what the real ones give; a view stays a view; the rest is refused."""

import pytest
import torch
import torch.nn.functional as F

import lowtide
from models.conftest import OwnFunction, assert_same_training, expect_calls

V = 97


def shifted(labels):
    return labels[:, 1:].reshape(-1)


# Each takes logits [2, 11, V] and labels [2, 11], and gives what can be summed.
WITHOUT_LOGITS = {
    "shifted": lambda z, y: F.cross_entropy(z[..., :-1, :].contiguous().view(-1, V), shifted(y)),
    "reshaped": lambda z, y: F.cross_entropy(z[:, :-1].reshape(-1, z.size(-1)), shifted(y), reduction="none"),
    "flattened": lambda z, y: F.cross_entropy(z[:, :-1, :].flatten(0, 1), shifted(y), reduction="sum") / 7,
    "transposed": lambda z, y: F.cross_entropy(z.transpose(0, 1).flatten(end_dim=1), y.T.reshape(-1)),
    "permuted": lambda z, y: F.cross_entropy(z.permute(1, 0, 2).reshape(-1, V), y.T.flatten()),
    "masked": lambda z, y: F.cross_entropy(z[y != -100], y[y != -100], label_smoothing=0.2),
    "masked slice": lambda z, y: F.cross_entropy(z[:, 1:][y[:, 1:] > 40].contiguous(), y[:, 1:][y[:, 1:] > 40]),
    "one sequence": lambda z, y: F.cross_entropy(z[1], y[1]),
    "unflattened": lambda z, y: F.cross_entropy(z.unflatten(0, (1, 2))[0, 0], y[0]),
    "biased": lambda z, y: F.cross_entropy((z + torch.linspace(-1, 1, V)).view(-1, V), y.view(-1)),
    "biased twice": lambda z, y: F.cross_entropy(
        ((torch.linspace(0, 1, V)[None] + z + torch.linspace(-1, 1, V)) * 0.5).view(-1, V), y.view(-1)
    ),
    "weights of classes": lambda z, y: F.cross_entropy(
        z.view(-1, V), y.view(-1), weight=torch.linspace(0.1, 2, V), ignore_index=-100
    ),
    "module": lambda z, y: torch.nn.CrossEntropyLoss(ignore_index=5)(
        z.view(-1, V), y.view(-1).where(y.view(-1) > 0, 5)
    ),
    "log-softmax and nll": lambda z, y: F.nll_loss(F.log_softmax(z.view(-1, V), dim=-1), y.view(-1), reduction="sum"),
    "gathered": lambda z, y: z.log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1).square(),
    "several gathered": lambda z, y: torch.gather(
        torch.log_softmax(z / 0.7, 2), 2, torch.arange(11 * 6).remainder(V).view(1, 11, 6).expand(2, 11, 6)
    ),
    "summed": lambda z, y: (-F.log_softmax(z, dim=-1)).sum(dim=-1, keepdim=True, dtype=torch.float32),
    "logsumexp": lambda z, y: (z[:, 1:] * 0.5).logsumexp(-1, keepdim=True).square(),
    "classes second": lambda z, y: F.cross_entropy(z[:, :-1].transpose(1, 2), y[:, 1:], label_smoothing=0.1),
    "argmax": lambda z, y: z[:, :-1].argmax(-1).float(),
}


def test_under_autocast_results_have_the_dtypes_of_stock(patched, batch):
    model, stock, _ = patched("gpt2", mlp=False)
    dtypes = []
    for m in (model, stock):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z, y = m(**batch).logits.view(-1, V), batch["labels"].view(-1)
            logprobs = z.log_softmax(-1)
            made = [F.cross_entropy(z, y), F.nll_loss(logprobs, y), logprobs, logprobs.sum(-1), z.logsumexp(-1)]
            made += [z.gather(-1, y[:, None].clamp(min=0)), z.detach().max(-1).values, z.detach().topk(3).values]
        made.append(F.cross_entropy(z, y))
        dtypes.append([x.dtype for x in made])
    assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("name", WITHOUT_LOGITS)
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])  # plain; with a soft cap
def test_a_loss_of_ones_own_without_logits(family, name, patched, batch):
    if family == "gemma2" and name.startswith("biased"):
        pytest.skip("a bias after the cap is none of the head's")
    model, stock, report = patched(family, mlp=False)
    values = {m: WITHOUT_LOGITS[name](m(**batch).logits, batch["labels"]) for m in (model, stock)}
    if values[stock].requires_grad:
        assert_same_training(model, stock, values.get, gradients=2e-5, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(*values.values())
    expect_calls(report, 1)


# What the real logits are needed for, though some of it looks much the same.
WITH_LOGITS = {
    "itself": lambda z, y: z,
    "index": lambda z, y: z[0],
    "softmax": lambda z, y: z.softmax(-1).square(),
    "reciprocal": lambda z, y: 1.0 / (z.square() + 1.0),
    "out of place, nested": lambda z, y: torch.cat([z[:, :1], z], 1),
    "detach": lambda z, y: z.detach() + z,
    "clone": lambda z, y: z.clone(),
    "in place": lambda z, y: z.mul_(3.0),
    "setitem": lambda z, y: (z.__setitem__((slice(None), 0), -5.0), z.float())[1],
    "own function": lambda z, y: OwnFunction.apply(z),
    "capped": lambda z, y: torch.tanh(z / 3.0) * 3.0,
    "capped twice": lambda z, y: torch.tanh(torch.tanh(z)),
    "double": lambda z, y: z.double(),
    "numpy": lambda z, y: z.sum() + float(z.detach().numpy().sum()),
    "logits gathered": lambda z, y: (
        z[:, 1:].gather(-1, y[:, 1:, None].clamp(min=0))[..., 0] - (z[:, 1:]).logsumexp(dim=-1)
    ).square(),
    "biased, a logit gathered": lambda z, y: (
        (z + torch.linspace(-1, 1, V)).mul(3).gather(-1, y[..., None].clamp(min=0))
    ),
    "highest": lambda z, y: z.detach().max(-1, keepdim=True).values + z.sum(),
    "some of the highest": lambda z, y: torch.topk(z[:, 1:].detach(), 5).values + z.sum(),
    "columns": lambda z, y: F.cross_entropy(z[..., :50].reshape(-1, 50), y.view(-1).clamp(0, 49)),
    "classes second, scaled": lambda z, y: F.cross_entropy(z.transpose(1, 2) * 2, y),
    "classes first": lambda z, y: F.cross_entropy(z[:, :2].transpose(0, 2), torch.zeros(97, 2, dtype=torch.long)),
    "the highest, with its gradient": lambda z, y: z.max(-1).values,
    "the lowest": lambda z, y: z.detach().topk(3, largest=False).values + z.sum(),
    "many gathered": lambda z, y: z.gather(-1, torch.arange(11 * 7).remainder(V).view(1, 11, 7).expand(2, 11, 7)),
    "probabilities": lambda z, y: F.cross_entropy(z.view(-1, V), torch.full((22, V), 1 / V)),
    "a softmax over tokens": lambda z, y: z.log_softmax(1).gather(-1, y.clamp(min=0)[..., None]),
    "scaled afterwards": lambda z, y: (F.log_softmax(z, dim=-1) * 0.5).gather(-1, y.clamp(min=0)[..., None]),
    "a bias for each token": lambda z, y: F.cross_entropy((z + torch.ones(2, 11, 1)).view(-1, V), y.view(-1)),
    "a bias of another dtype": lambda z, y: F.cross_entropy(
        (z + torch.linspace(0, 1, V, dtype=torch.float64)).view(-1, V), y.view(-1)
    ).float(),
    "a bias that adds an axis": lambda z, y: (z[0, 0] + torch.linspace(0, 1, V)[None, None]).logsumexp(-1),
    "scaled, then biased": lambda z, y: F.cross_entropy((z * 2 + torch.linspace(0, 1, V)).view(-1, V), y.view(-1)),
    "all summed": lambda z, y: z.sum(-1),
    "tokens first": lambda z, y: z.transpose(-1, 0).logsumexp(-1),
    "negative nll": lambda z, y: F.nll_loss(-z.log_softmax(-1).view(-1, V), y.view(-1)),
    "mask of logits": lambda z, y: z[torch.ones(2, 11, V, dtype=torch.bool)].square(),
}


@pytest.mark.parametrize("name", WITH_LOGITS)
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_anything_else_gets_real_logits(family, name, patched, batch):
    model, stock, report = patched(family, mlp=False)
    assert_same_training(model, stock, lambda m: WITH_LOGITS[name](m(**batch).logits, batch["labels"]), rtol=0, atol=0)
    expect_calls(report, 1, 1)


@pytest.mark.parametrize(
    "target", [torch.tensor(1000), torch.tensor(-3)], ids=["above the vocabulary", "negative, not the ignored one"]
)
def test_wrong_classes_are_errors_as_in_stock(target, patched, batch):
    model, stock, _ = patched("gpt2")
    for m in (model, stock):
        logits = m(**batch).logits
        with pytest.raises(IndexError):
            F.cross_entropy(logits[0], target.expand(11))
        with pytest.raises((IndexError, RuntimeError)):
            logits.log_softmax(-1).gather(-1, target.expand(2, 11, 1))


def test_a_shape_that_does_not_fit_is_the_error_of_stock(patched, batch):
    model, stock, _ = patched("gpt2")
    errors = []
    for m in (model, stock):
        logits = m(**batch).logits
        found = []
        for wrong in (lambda z: z.view(-1, 13), lambda z: z.transpose(0, 1).view(-1, V), lambda z: z[:, :, :, 0]):
            with pytest.raises((RuntimeError, IndexError)) as error:
                wrong(logits)
            found.append(str(error.value))
        errors.append(found)
    assert errors[0] == errors[1]


def test_views_share_memory_with_the_logits(patched, batch):
    """Whichever is looked at first, changed in place, or read again."""
    model, stock, _ = patched("gpt2", mlp=False)
    seen = []
    with torch.no_grad():
        for m in (model, stock):
            logits = m(**batch).logits
            flat, copy = logits.view(-1, V), logits[:, 1:].contiguous()
            row = flat[3]
            row.fill_(-7.0)  # through two views, before anything else was looked at
            logits[1, 0, 0] = 5.0
            later = logits[:, :-1]
            later[0, 0] = 1.0
            seen.append((logits, flat, copy, row, later))
    for ours, expected in zip(*seen, strict=True):
        assert torch.equal(ours, expected)
        assert ours.stride() == expected.stride()
        assert ours.storage_offset() == expected.storage_offset()


@pytest.mark.parametrize("changed", ["logits", "view"])
def test_a_change_in_place_before_the_loss_counts(changed, patched, batch):
    model, stock, _ = patched("gpt2", mlp=False)

    def loss(m):
        logits = m(**batch).logits
        flat = logits.view(-1, V)
        (flat if changed == "view" else logits).mul_(0.5)
        return F.cross_entropy(flat, batch["labels"].view(-1))

    assert_same_training(model, stock, loss)


def test_scales_and_biases_are_those_of_the_time_they_were_used(patched, batch):
    model, stock, _ = patched("gpt2", mlp=False)
    losses = []
    for m in (model, stock):
        scale, bias, mask = torch.tensor(0.5), torch.linspace(0, 1, V), batch["labels"] != -100
        logits = ((m(**batch).logits + bias) * scale)[mask]
        scale.fill_(9.0), bias.fill_(9.0)
        labels = batch["labels"][mask]
        mask.fill_(True)
        losses.append(F.cross_entropy(logits, labels))
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype, patched, batch):
    model, stock, report = patched("gpt2", dtype, mlp=False)
    for name in ("shifted", "gathered", "several gathered", "logsumexp", "log-softmax and nll"):
        values = [WITHOUT_LOGITS[name](m(**batch).logits, batch["labels"]) for m in (model, stock)]
        assert values[0].dtype == values[1].dtype, name
        torch.testing.assert_close(
            *values, rtol=0.05 if dtype == torch.bfloat16 else 1e-12, atol=0.1 * (dtype == torch.bfloat16) + 1e-12
        )
    assert report.calls_materialised == 0, str(report)


def test_a_model_without_a_loss_function_of_its_own(batch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lm_head = torch.nn.Embedding(V, 8), torch.nn.Linear(8, V, bias=False)

        def get_output_embeddings(self):
            return self.lm_head

        def forward(self, ids, labels=None):
            logits = self.lm_head(self.embed(ids)).float()
            return F.cross_entropy(logits[..., :-1, :].reshape(-1, V), labels[..., 1:].reshape(-1))

    model = Model()
    expected = model(batch["input_ids"], batch["labels"])
    report = lowtide.patch(model)
    torch.testing.assert_close(model(batch["input_ids"], batch["labels"]), expected)
    expect_calls(report, 1)


def test_a_forward_without_labels_is_left_and_one_past_its_head_is_told(batch):
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Linear(8, V, bias=False)

        def get_output_embeddings(self):
            return self.lm_head

        def forward(self, hidden):
            return self.lm_head(hidden)

    class Past(Bare):
        def forward(self, hidden, labels=None):
            return F.cross_entropy(F.linear(hidden, self.lm_head.weight).view(-1, V), labels.view(-1))

    assert "takes none of labels" in lowtide.patch(Bare()).parts["loss"].outcome
    model = Past()
    report = lowtide.patch(model)
    model(torch.randn(2, 11, 8), batch["labels"].clamp(min=0))
    assert report.calls_materialised == 1
    assert "was not called" in str(report)
