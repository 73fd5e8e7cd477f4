"""`lowtide train`: TRL's and transformers' trainers with callbacks that work under any Trainer.

`lowtide.PatchCallback` patches the model and plans its memory; of this package are checkpoints that count once they are
whole, an ending with a checkpoint at a signal, an error for a loss that is not finite, what would fit after an
out-of-memory error, and a teacher's states to distil from. Importing this imports neither torch nor transformers; the
names do when they are read.
"""

import logging
from typing import TYPE_CHECKING

from lowtide.lazy import on_first_use

# Accelerate and peft import it wherever it is installed, and it warns of what it lacks. Set here, because all commands
# and the processes of a comparison import this file before the libraries.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

__all__ = [
    "FiniteLoss",
    "OutOfMemory",
    "RankLost",
    "SaveAndStop",
    "SaveError",
    "Terminated",
    "WholeCheckpoints",
    "advise",
    "compare",
    "train",
    "write_teacher_states",
]

if TYPE_CHECKING:
    from lowtide.train.advice import OutOfMemory, advise
    from lowtide.train.checkpoints import SaveError, WholeCheckpoints
    from lowtide.train.comparison import compare
    from lowtide.train.distillation import write_teacher_states
    from lowtide.train.endings import FiniteLoss, RankLost, SaveAndStop, Terminated
    from lowtide.train.run import train
else:
    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "lowtide.train.advice": ("OutOfMemory", "advise"),
            "lowtide.train.checkpoints": ("SaveError", "WholeCheckpoints"),
            "lowtide.train.comparison": ("compare",),
            "lowtide.train.distillation": ("write_teacher_states",),
            "lowtide.train.endings": ("FiniteLoss", "RankLost", "SaveAndStop", "Terminated"),
            "lowtide.train.run": ("train",),
        },
    )
