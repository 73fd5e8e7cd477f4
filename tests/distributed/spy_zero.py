"""Imported by a rank before its run: `spy_memory`, and DeepSpeed by gloo alone.

On a CPU it has an operator of its own beside it, which it would compile for a minute at first.
"""

from __future__ import annotations

import gc

import deepspeed

from distributed import spy_memory

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
gc.freeze()  # it collects garbage often, and would look through all of torch each time
__all__ = ["spy_memory"]
