"""Where a training step's memory and time go, implementation beside implementation: ``lowtide profile``."""
