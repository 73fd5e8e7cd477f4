"""Measure how `lowtide train`'s step scales over GPUs when each has its own sequences, beside Liger's and stock models.

    python benchmarks/scaling.py --ranks 1 2 4 8
    python benchmarks/scaling.py --ranks 1 2 --model lowtide-small --way lowtide stock --tokens 64 --weights float32
    python benchmarks/scaling.py --ranks 1 2 --way lowtide:all lowtide liger

Layers are checkpointed, except in ways with a policy, such as lowtide:all or lowtide:attention. One GPU holds the whole
model; several shard it by FSDP2, as `lowtide train --parallel fsdp2` does.
"""

from __future__ import annotations

import sys

from script import main

from lowtide.bench.scaling import SCALING, ScalingConfig

if __name__ == "__main__":
    sys.exit(main(SCALING, ScalingConfig, __doc__))
