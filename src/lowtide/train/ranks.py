"""The processes of a run, which torchrun or `accelerate launch` has started, and what they say."""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from lowtide.errors import LowtideError

_FIRST_REPORTS_SECONDS = 3.0


def quiet(*, bars: bool) -> None:
    """Leave out other libraries' warnings to each other, the place in their code of all others, and maybe their bars.

    Those of libraries that are imported after it.
    """
    if not bars:
        os.environ.update(HF_HUB_DISABLE_PROGRESS_BARS="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    for words in (
        "Setting `save_embedding_layers`", "Unsupported layer type", "Model has `tie_word_embeddings=True`",  # peft
        "TypedStorage is deprecated",  # transformers' save_pretrained
    ):  # fmt: skip
        warnings.filterwarnings("ignore", message=words, category=UserWarning)
    warnings.showwarning = lambda text, *_, **__: sys.stderr.write(f"lowtide train: {text}\n")  # type: ignore[assignment]


def launched_ranks() -> int:
    """Return how many processes the launcher has started for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Return whether this process is the launcher's first, also before there is a group."""
    return os.environ.get("RANK", "0") == "0"


def let_first_report() -> None:
    """Wait on other ranks than the first: it prints the error that all have, and the launcher then ends the others."""
    if not is_first_rank():
        time.sleep(_FIRST_REPORTS_SECONDS)


def in_group() -> bool:
    """Return whether this process belongs to a process group."""
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def first_does(do: Callable[[], Any]) -> Any:
    """Return on all ranks what ``do`` returns on the first, which alone runs it.

    Raises:
        LowtideError: ``do`` raised it; on all ranks. Any other error is the first rank's alone, and ends it.
    """
    if launched_ranks() == 1:
        return do()
    from accelerate.utils import broadcast_object_list

    result: list[Any] = [None, None]
    if is_first_rank():
        try:
            result[0] = do()
        except LowtideError as error:
            result[1] = error
    result = broadcast_object_list(result)
    if result[1] is not None:
        raise result[1]
    return result[0]


def leave_group() -> None:
    """End the default process group once all ranks are here; nothing where there is none.

    gloo's threads, and NCCL's, hold the tensors of the last collectives: where they still do when the interpreter is
    finalised, the process aborts. They end with the last reference to the group, which the model that DDP wraps has.
    """
    if not in_group():
        return
    from accelerate import PartialState

    gc.collect()  # trainer, model and callbacks refer to each other
    PartialState().wait_for_everyone()  # nobody closes a connection that another rank's last collective still uses
    PartialState().destroy_process_group()
