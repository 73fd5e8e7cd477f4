"""What packing and accumulation must not change: the loss and every gradient, against documents one by one in float64.

Everything here runs through the trainer's own batches, collation and denominators.
"""

from __future__ import annotations

import random
import warnings
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from lowtide.train.ranks import Shares
from lowtide.train.streams import IGNORED, Document, WholeStream
from lowtide.train.trainer import Collate, LowtideTrainer, training_arguments
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import lowtide
from lowtide.errors import ArgumentValueError
from lowtide.train.config import TrainConfig
from lowtide.train.model import check_separate

SMALL = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "qwen3": {"model_type": "qwen3", "head_dim": 6, "tie_word_embeddings": True, **SMALL},
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64,
             "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "mistral": {"model_type": "mistral", "sliding_window": 5, **SMALL},
}  # fmt: skip
ROOM = 23


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    settings = dict(MODELS[name])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    for parameter in model.parameters():  # a fresh model's attention hardly looks anywhere
        nn.init.normal_(parameter, std=0.3)
    model.config.use_cache = False
    return model.to(dtype).train()


def conversations(count: int, seed: int) -> list[Document]:
    """Documents of random lengths of which a random part is trained on."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        ids = array("q", (rng.randrange(61) for _ in range(rng.randint(2, ROOM))))
        labels = array("q", (token if rng.random() < 0.6 else IGNORED for token in ids))
        labels[-1] = ids[-1]
        made.append(Document(ids, labels))
    return made


def packed(documents: list[Document], packing: str = "separate") -> list[dict[str, Tensor]]:
    return list(WholeStream(lambda _: iter(documents), lambda _: [0], seq_len=ROOM, packing=packing, epochs=1))


def one_by_one(model: nn.Module, documents: list[Document]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the mean over all trained tokens, by plain PyTorch on one document after the other."""
    model.zero_grad()
    count = sum(label != IGNORED for d in documents for label in d.labels[1:])
    total = torch.zeros((), dtype=torch.float64)
    for document in documents:
        ids, labels = torch.tensor([document.ids]), torch.tensor(document.labels)
        logits = model(input_ids=ids).logits[0].double()
        loss = nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=IGNORED, reduction="sum") / count
        loss.backward()
        total += loss.detach()
    return total, gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], rounding: float) -> None:
    assert got.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert (got[name].double() - gradient.double()).abs().max() <= rounding * scale, name


class Blocks(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Given blocks, over and over, in the place of a rank's streams."""

    def __init__(self, blocks: list[dict[str, Tensor]]) -> None:
        self._blocks = blocks

    def __iter__(self) -> Any:
        while True:
            yield from self._blocks


def trainer_of(model: nn.Module, blocks: list[dict[str, Tensor]], args: Any, *, bounds: bool = False) -> LowtideTrainer:
    rows = args.per_device_train_batch_size
    return LowtideTrainer(
        blocks=Blocks(blocks),  # type: ignore[arg-type]
        shares=Shares(streams=rows, ranks=1, rank=0, rows=rows),
        model=model,
        args=args,
        eval_dataset=blocks,
        data_collator=Collate(bounds=bounds),
    )


def step_gradients(
    model: nn.Module, blocks: list[dict[str, Tensor]], folder: Path, *, batch: int, accumulate: int
) -> tuple[float, dict[str, Tensor]]:
    """The loss that Trainer would log for its first step, and the gradients that its optimizer would see."""
    config = TrainConfig(batch_size=batch, grad_accum=accumulate, max_steps=1, seq_len=ROOM)
    args = training_arguments(config, folder, save=False, resuming=False)
    trainer = trainer_of(model, blocks, args)
    model.zero_grad()
    trainer.current_gradient_accumulation_steps = accumulate
    samples, count = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), accumulate, args.device)
    loss = sum(float(trainer.training_step(model, dict(sample), count)) for sample in samples)
    return loss, gradients(model)


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "stock"])
@pytest.mark.parametrize("packing", ["separate", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_a_packed_step_is_its_documents_one_by_one(name: str, packing: str, patched: bool, tmp_path: Path) -> None:
    documents = conversations(11, seed=sum(map(ord, name)))
    loss, expected = one_by_one(build(name, torch.float64), documents)
    plain_loss, plain = one_by_one(build(name), documents)
    rounding = max(float((plain[n].double() - g).abs().max()) for n, g in expected.items())
    scale = max(float(g.abs().max()) for g in expected.values())
    model = build(name)
    if patched:
        lowtide.patch(model)
    blocks = packed(documents, packing)
    assert len(blocks) < len(documents) or packing == "none"
    got_loss, got = step_gradients(model, blocks, tmp_path, batch=len(blocks), accumulate=1)
    assert abs(got_loss - loss) <= 4 * abs(plain_loss - loss) + 1e-6 * loss
    assert_same(got, expected, 4 * rounding / scale)


def test_adapters_accumulate_as_one_large_batch(tmp_path: Path) -> None:
    """What Trainer asks of a model's loss, it has to ask of the model that peft has wrapped."""
    blocks = packed(conversations(9, seed=3))
    found = []
    for batch, accumulate in ((len(blocks), 1), (1, len(blocks))):
        torch.manual_seed(0)
        lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # between peft and transformers
            model = get_peft_model(build("llama"), lora)
        lowtide.patch(model)
        found.append(step_gradients(model, blocks, tmp_path, batch=batch, accumulate=accumulate))
    (loss, expected), (again, got) = found
    assert again == pytest.approx(loss, rel=1e-6)
    assert len({int((block["labels"] != IGNORED).sum()) for block in blocks}) > 1, "of uneven batches"
    assert_same(got, expected, 1e-5)


def test_documents_joined_are_not_the_same(tmp_path: Path) -> None:
    """The other way round: what the tests above would see if attention crossed."""
    documents = conversations(11, seed=3)
    _, expected = one_by_one(build("llama", torch.float64), documents)
    blocks = [{k: v for k, v in block.items() if k != "position_ids"} for block in packed(documents)]
    _, got = step_gradients(build("llama"), blocks, tmp_path, batch=len(blocks), accumulate=1)
    with pytest.raises(AssertionError):
        assert_same(got, expected, 1e-2)


class Deaf(nn.Module):
    """A model whose loss is the mean over its own batch, whatever it is told of the step's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("llama")
        self.config = self.inner.config  # type: ignore[assignment]

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> dict[str, Tensor]:
        logits = self.inner(input_ids=input_ids, position_ids=position_ids).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss}


@pytest.mark.parametrize("kind", ["patched", "stock", "deaf"])
@pytest.mark.parametrize(("batch", "accumulate"), [(1, 6), (2, 3), (3, 2)])
def test_accumulated_batches_are_the_large_one(kind: str, batch: int, accumulate: int, tmp_path: Path) -> None:
    blocks = packed(conversations(40, seed=5))[:6]
    counts = [int(block["labels"].ne(IGNORED).sum()) for block in blocks]
    assert max(counts) > 1.3 * min(counts), "uneven"
    _, expected = step_gradients(build("llama", torch.float64), blocks, tmp_path, batch=6, accumulate=1)
    large_loss, large = step_gradients(build("llama"), blocks, tmp_path, batch=6, accumulate=1)
    model: nn.Module = Deaf() if kind == "deaf" else build("llama")
    if kind == "patched":
        lowtide.patch(model)
    loss, got = step_gradients(model, blocks, tmp_path, batch=batch, accumulate=accumulate)
    got = {name.removeprefix("inner."): gradient for name, gradient in got.items()}
    assert loss == pytest.approx(large_loss, rel=1e-6)
    rounding = max(float((large[n].double() - g).abs().max() / g.abs().max()) for n, g in expected.items())
    assert_same(got, expected, 4 * rounding)


def test_held_out_loss_is_the_mean_over_tokens_whatever_the_batch(tmp_path: Path) -> None:
    documents = conversations(40, seed=7)
    blocks = packed(documents)
    model = build("llama")
    model.eval()
    with torch.no_grad():
        total = count = 0.0
        for document in documents:
            labels = torch.tensor(document.labels)
            logits = model(input_ids=torch.tensor([document.ids])).logits[0].double()
            total += float(nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=IGNORED, reduction="sum"))
            count += int(labels[1:].ne(IGNORED).sum())
    for batch in (1, 3, len(blocks)):
        config = TrainConfig(batch_size=batch, seq_len=ROOM)
        trainer = trainer_of(model, blocks, training_arguments(config, tmp_path, save=False, resuming=False))
        assert trainer.evaluate()["eval_loss"] == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_see_the_document_before_are_refused(dtype: torch.dtype) -> None:
    settings = {"model_type": "mamba", "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    torch.manual_seed(0)
    mamba = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).to(dtype)
    with pytest.raises(ArgumentValueError, match=r"MambaForCausalLM.*--packing none"):
        check_separate(mamba, seq_len=32)
    for name in MODELS:
        model = build(name, dtype)
        check_separate(model, seq_len=32)
        model.config.use_cache = True  # transformers makes no mask of documents then
        with pytest.raises(ArgumentValueError, match="--packing none"):
            check_separate(model, seq_len=32)


def test_a_model_that_changes_its_embeddings_in_place_is_looked_at() -> None:
    """CTRL scales them so; it keeps documents apart, and takes the second as if it were alone."""
    settings = {"model_type": "ctrl", "vocab_size": 61, "n_embd": 16, "dff": 8, "n_layer": 1, "n_head": 2}
    torch.manual_seed(0)
    ctrl = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings, n_positions=64, use_cache=False))
    check_separate(ctrl, seq_len=32)


def test_a_model_that_cannot_take_packed_documents_is_refused() -> None:
    """Reformer's backward wants what only its training makes."""
    settings = {"model_type": "reformer", "vocab_size": 61, "hidden_size": 16, "feed_forward_size": 8, "num_buckets": 2}
    settings |= {"attn_layers": ["local"], "attention_head_size": 8, "num_attention_heads": 2, "is_decoder": True}
    settings |= {"axial_pos_embds_dim": [8, 8], "axial_pos_shape": [8, 8], "max_position_embeddings": 64}
    torch.manual_seed(0)
    reformer = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings, use_cache=False))
    with pytest.raises(
        ArgumentValueError, match=r"ReformerModelWithLMHead, whose .* raised AssertionError: .*--packing none"
    ):
        check_separate(reformer, seq_len=32)


def test_what_is_the_gpus_and_not_packings_is_raised_as_it_is() -> None:
    model = build(next(iter(MODELS)), torch.float32)

    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    model.forward = fail
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        check_separate(model, seq_len=32)


def test_a_model_that_does_not_call_its_embeddings_is_refused() -> None:
    model = build(next(iter(MODELS)), torch.float32)
    unused = torch.nn.Embedding(61, 16)
    model.get_input_embeddings = lambda: unused
    with pytest.raises(ArgumentValueError, match=r"does not call its input embeddings.*--packing none"):
        check_separate(model, seq_len=32)


def test_bounds_for_flash_attention_are_the_documents_of_all_rows(tmp_path: Path) -> None:
    blocks = packed(conversations(20, seed=2))[:3]
    args = training_arguments(TrainConfig(batch_size=3, seq_len=ROOM), tmp_path, save=False, resuming=False)
    trainer = trainer_of(build("llama"), blocks, args, bounds=True)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch.keys() == next(iter(trainer.get_eval_dataloader())).keys()
    starts = [
        row * ROOM + i
        for row, block in enumerate(blocks)
        for i in (block["position_ids"] == 0).nonzero().flatten().tolist()
    ]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [*starts, 3 * ROOM]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    longest = max(b - a for a, b in zip(starts, [*starts[1:], 3 * ROOM], strict=True))
    assert batch["max_length_q"] == batch["max_length_k"] == longest
