"""TRL's trainers on lowtide's heads: one call, and one to undo it."""

from lowtide.trl.patch import patch_trl, unpatch_trl
from lowtide.trl.stand_in import TrlReport

__all__ = ["TrlReport", "patch_trl", "unpatch_trl"]
