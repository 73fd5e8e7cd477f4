"""Tasks of lm-evaluation-harness on a loaded model, by the harness's own ``hf`` model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from lowtide.errors import ArgumentValueError, LowtideError, did_you_mean, message
from lowtide.evaluation.config import EvalConfig
from lowtide.train.files import why


def run_tasks(config: EvalConfig, model: Any, tokenizer: Any) -> tuple[dict[str, Any], str]:
    """Return the results of the tasks, as JSON has them, and the harness's own table.

    Raises:
        ArgumentValueError: a task is not known, or its data are not there.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager, names = TaskManager(), config.task_names
    for name in names:
        if not Path(name).is_file() and not manager.match_tasks([name]):
            near = did_you_mean(name, manager.all_tasks)
            raise ArgumentValueError(message("tasks", "a task of lm-evaluation-harness or a YAML file", name, near))
    lm = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=config.batch_size,
        max_length=config.seq_len,
        device=str(model.device),
    )
    try:
        found = lm_eval.simple_evaluate(
            lm, tasks=list(names), limit=config.limit, log_samples=False, task_manager=manager
        )
    except (OSError, ValueError) as error:  # of a file, a data set, or what a task makes of it
        if isinstance(error, LowtideError):
            raise
        expected, hint = "tasks with their data", "Data sets are read from the Hub's local cache; see --help."
        raise ArgumentValueError(message("tasks", expected, f"{', '.join(names)} ({why(error)})", hint)) from error
    assert found is not None  # of the first rank
    table = make_table(found)
    if found.get("groups"):
        table += "\n" + make_table(found, "groups")
    kept = {name: found[name] for name in ("results", "groups", "versions", "n-shot", "n-samples") if name in found}
    return {**kept, "lm_eval": lm_eval.__version__}, table
