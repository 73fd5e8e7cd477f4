from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.memory import copies, optimizer
from memory.models import SHAPE, VOCAB, LazySide, Plain


@pytest.fixture
def llama() -> Callable[..., Any]:
    """A tiny Llama, in training, with its stock use_cache=True."""
    transformers = pytest.importorskip("transformers")

    def build(**settings: Any) -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **settings})).train()

    return build


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[LazySide]:
    """Offloading from the CPU, with copies that come as late as they may."""
    lazy = LazySide()
    monkeypatch.setattr(copies, "available", lambda: True)
    monkeypatch.setattr(copies, "side_for", lambda device: lazy)
    yield lazy
    assert lazy.lost == 0, "memory was freed while its copy was under way"


@pytest.fixture(params=["llama", "plain"])
def model(request: pytest.FixtureRequest, llama: Callable[..., Any]) -> Any:
    return llama() if request.param == "llama" else Plain()


@pytest.fixture
def pair(model: Any) -> tuple[Any, Any]:
    """A model and its copy, which stays stock."""
    return model, copy.deepcopy(model)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few states of the tests' models."""
    monkeypatch.setattr(optimizer, "MIN_BYTES", 64)
    monkeypatch.setattr(optimizer, "BLOCK_BYTES", 20_000)
