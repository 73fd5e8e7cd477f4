"""Measure how `lowtide train`'s step scales over GPUs when each has its own sequences, beside Liger's and stock models.

    python benchmarks/scaling.py --ranks 1 2 4 8
    python benchmarks/scaling.py --ranks 1 2 --model lowtide-small --way lowtide stock --tokens 64 --weights float32
    python benchmarks/scaling.py --ranks 1 2 --way lowtide:all lowtide liger

Layers are checkpointed, but for ways with a policy, such as lowtide:all or lowtide:attention. On one GPU nothing is
shared out; on several, by FSDP2 as `--parallel fsdp2` does it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from lowtide.bench.scaling import WAYS, run

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--model", nargs="+", default=["llama-3.2-1b", "llama-3-8b"])
    parser.add_argument("--way", nargs="+", default=["lowtide", "liger"], help=f"{', '.join(WAYS)}, or one:policy")
    parser.add_argument("--parallel", default="fsdp2")
    parser.add_argument("--tokens", type=int, default=8192, help="of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a GPU")
    parser.add_argument("--steps", type=int, default=5, help="that count")
    parser.add_argument("--weights", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default=str(RESULTS))
    given = parser.parse_args()
    settings = {name: getattr(given, name) for name in ("parallel", "tokens", "batch", "steps", "weights", "seed")}
    told = {"ranks": given.ranks, "model": given.model, "way": given.way, **settings}
    words = [[f"--{name}", *map(str, v if isinstance(v, list) else [v])] for name, v in told.items()]
    run(
        ranks=given.ranks,
        models=given.model,
        ways=given.way,
        settings=settings,
        output=given.output,
        command=shlex.join(["python", "benchmarks/scaling.py", *(word for option in words for word in option)]),
        say=lambda text: print(text, end="", flush=True),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
