"""TRL's trainers on lowtide's heads: one call, and one to undo it."""

from lowtide.trl.patch import TrlReport, patch_trl, unpatch_trl

__all__ = ["TrlReport", "patch_trl", "unpatch_trl"]
