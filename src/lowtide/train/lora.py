"""Adapters by peft: put on a model, and merged into it for a copy that needs no peft."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import ArgumentValueError, message
from lowtide.train.config import TrainConfig


def add_adapters(model: Any, config: TrainConfig) -> Any:
    """Return the model wrapped by peft, its own weights frozen and its adapters (float32) to be trained.

    Raises:
        ArgumentValueError: peft is not installed, or the model has no layers of those names.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        hint = "pip install 'lowtide[peft]'"
        raise ArgumentValueError(message("lora_rank", "peft to be installed", str(error), hint)) from error
    targets: Any = list(config.lora_targets)
    if targets == ["all-linear"]:
        targets = targets[0]
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_scale,
        target_modules=targets,
    )
    torch.manual_seed(config.seed)
    try:
        with _without_its_warnings():
            return get_peft_model(model, lora)
    except ValueError as error:  # what peft raises where the names fit nothing it can adapt
        why = " ".join(str(error).split())[:200]
        names = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
        hint = f"The model's linear layers are called {', '.join(names)}."
        raise ArgumentValueError(
            message("lora_targets", "names of linear layers", f"{' '.join(config.lora_targets)} ({why})", hint)
        ) from error


def merge_adapter(base: Any, adapter: Path, folder: Path, *, dtype: torch.dtype) -> None:
    """Write a model with an adapter merged in, in the stock format.

    Args:
        base: the model that the adapter is for, in float32, so that the sum is rounded once.
        adapter: the adapter's folder.
        folder: where to.
        dtype: of the weights written.
    """
    from peft import PeftModel

    with _without_its_warnings():
        merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    merged.to(dtype).save_pretrained(folder)


@contextmanager
def _without_its_warnings() -> Iterator[None]:
    """Keep off the terminal what peft is told about names of transformers that it still uses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def stored_dtype(model: str) -> torch.dtype:
    """Return the dtype that the config in a pretrained model's folder tells; float32 where it tells none."""
    file = Path(model).expanduser() / "config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    name = settings.get("dtype") or settings.get("torch_dtype")
    found = getattr(torch, name, None) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) else torch.float32
