"""What other libraries do on their own: log lines, bars, telemetry and imports that a run has no use for."""

from __future__ import annotations

import logging
import os
import warnings


def quiet_transformers() -> None:
    """Keep log lines and bars of transformers, TRL, datasets and peft off the terminal."""
    # peft, of adapters on embeddings and the output layer
    warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`", category=UserWarning)
    warnings.filterwarnings("ignore", message="Unsupported layer type", category=UserWarning)
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`", category=UserWarning)
    warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied", category=UserWarning)
    # which lowtide computes without logits
    warnings.filterwarnings("ignore", message="`label_smoothing_factor` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(trl|transformers|peft|accelerate)\.")
    # DeepSpeed calls the collectives by their old names
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    # transformers' save_pretrained reads the storage of each weight
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)
    # peft imports it wherever it is installed
    for name in ("bitsandbytes", "datasets", "accelerate", "trl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as of_transformers

    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    # read when datasets is imported, which takes seconds
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


def stay_offline(*, pushes: bool) -> None:
    """Send no telemetry, and make no call to the Hub unless the user configured it or the run pushes its model there.

    Call it before anything of the Hugging Face libraries is imported.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not pushes:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            os.environ.setdefault(name, "1")
