"""What other libraries do on their own: log lines, bars, telemetry and imports that a run has no use for."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from lowtide.train.config import TrainConfig
from lowtide.train.files import find_data


def quiet_transformers() -> None:
    """Keep log lines and bars of transformers, TRL, datasets and peft off the terminal."""
    # peft warns at each checkpoint of adapters on the output layer
    warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`", category=UserWarning)
    # which lowtide computes without logits
    warnings.filterwarnings("ignore", message="`label_smoothing_factor` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(trl|transformers|peft|accelerate)\.")
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

    Args:
        pushes: the run uploads its model.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not pushes:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            os.environ.setdefault(name, "1")


def hide_unused(config: TrainConfig) -> None:
    """Let no library import DeepSpeed or `datasets` in this process where a run has no use for them.

    accelerate and transformers import them wherever they are installed, which takes seconds and 200 MiB. Call it before
    these are imported: nothing is hidden that is there already.

    Args:
        config: the run's settings.
    """
    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ("1", "true")
    if not uses_deepspeed and not config.parallel.startswith("zero") and not config.options.get("deepspeed"):
        sys.modules.setdefault("deepspeed", None)  # type: ignore[arg-type]
    resumes = config.options.get("resume_from_checkpoint")  # another config
    if "transformers" in sys.modules or resumes or config.fine_tunes:
        return
    if all(file.kind in ("text", "jsonl") for file in find_data(config.data).files):  # tables are read with it
        sys.modules.setdefault("datasets", None)  # type: ignore[arg-type]
