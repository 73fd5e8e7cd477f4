"""The operations between the GEMMs of a decoder layer: RMS normalisation and rotary position embedding."""

from lowtide.layers.norm import add_rms_norm, rms_norm
from lowtide.layers.rope import rotary

__all__ = ["add_rms_norm", "rms_norm", "rotary"]
