"""Megatron-Core's language model with lowtide's head, on ranks that share the vocabulary, beside Megatron's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from distributed.launch import SEED, main
from lowtide.errors import ArgumentTypeError
from lowtide.measure.allocations import track_allocations

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages for GPUs that are not there
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from lowtide.stacks.megatron import fuse

V, B, S = 64, 3, 10
# Layers that do nothing: on a CPU Megatron has no norms for sequence parallelism.
LAYER = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules())
LAYERS = TransformerBlockSubmodules(layer_specs=[LAYER], layer_norm=None)


@contextmanager
def on_the_cpu(ranks: int) -> Iterator[None]:
    """Megatron with ``ranks`` that share a model; it asks for a GPU by name."""
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patched.setattr(megatron_random.CudaRNGStatesTracker, "fork", lambda self, name=None: nullcontext())
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def model_of(ranks: int, *, tied: bool, sequence: bool, vocab: int = V, **more: Any) -> Any:
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True, sequence_parallel=sequence,
        tensor_model_parallel_size=ranks, hidden_dropout=0.0, **more,
    )  # fmt: skip
    torch.manual_seed(3 + SEED)
    how = {"share_embeddings_and_output_weights": tied, "position_embedding_type": "learned_absolute"}
    return GPTModel(config, LAYERS, vocab_size=vocab, max_sequence_length=S, **how)


def batch(vocab: int = V) -> tuple[tuple[Tensor, Tensor, Any], Tensor, Tensor]:
    """Return ids, positions and no mask; labels; upstream gradients: the same on all ranks."""
    torch.manual_seed(5 + SEED)
    ids, labels = torch.randint(vocab, (2, B, S))
    return (ids, torch.arange(S)[None].expand(B, -1), None), labels, torch.randn(B, S)


def losses_and_gradients() -> None:
    """Tied or not, with sequence parallelism or without; logits are Megatron's own where there are no labels."""
    for ranks, tied, sequence in ((1, True, False), (2, False, False), (2, True, True)):
        what = f"{ranks} ranks, tied {tied}, sequence parallel {sequence}"
        with on_the_cpu(ranks):
            stock, fused = (model_of(ranks, tied=tied, sequence=sequence) for _ in range(2))
            fuse(fused)
            inputs, labels, upstream = batch()
            found = [model(*inputs, labels=labels) for model in (stock, fused)]
            for loss in found:
                assert loss.shape == (B, S)
                assert loss.dtype == torch.float32
                (loss * upstream).sum().backward()
            torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6, msg=what)
            for (name, p), q in zip(stock.named_parameters(), fused.parameters(), strict=True):
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-6, msg=f"{what} {name}")
            with torch.no_grad():
                assert torch.equal(fused(*inputs), stock(*inputs)), what
            with pytest.raises(ArgumentTypeError, match=r"model: expected a GPTModel .* not wrapped, got"):
                fuse(torch.nn.Sequential(fused))


def no_logits() -> None:
    vocab, options = 4096, lowtide.HeadOptions(workspace_mib=0.1)
    with on_the_cpu(2):
        inputs, labels, upstream = batch(vocab)
        model = model_of(2, tied=True, sequence=False, vocab=vocab)
        fuse(model, options=options)
        with track_allocations("cpu") as tracked:
            (model(*inputs, labels=labels) * upstream).sum().backward()
    gradients = 2 * vocab // 2 * 16 * 4  # of the output layer and of the embedding, until they are added
    assert tracked.peak_bytes < gradients + B * S * vocab // 2 * 4 / 4


if __name__ == "__main__":
    main(vars())
