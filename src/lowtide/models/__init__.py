"""Patching Hugging Face models, one instance at a time."""

from lowtide.models.patch import patch, scoring, unpatch
from lowtide.models.report import PartReport, PatchReport

__all__ = ["PartReport", "PatchReport", "patch", "scoring", "unpatch"]
