"""Two versions of lowtide on one GPU: time and peak memory of the head's functions, interleaved in child processes.

    python benchmarks/versions.py BASE_SRC NEW_SRC [--rounds 5] [--out FILE]

BASE_SRC and NEW_SRC are the `src` folders of two checkouts. Each round runs one process of each version, which measures
every case; the ratio of a round is new over base, and the table has the median of the rounds and their spread. With two
GPUs or more, cross entropy of a vocabulary sharded over two ranks is measured too.
"""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

REPEATS = 7


def measure(rank: int, ranks: int) -> dict[str, dict[str, float]]:
    import torch

    import lowtide
    from lowtide.bench.shapes import SHAPES

    torch.cuda.set_device(rank)
    found: dict[str, dict[str, float]] = {}

    def case(name: str, call: Any, leaves: Any) -> None:  # not by lowtide.measure, which differs between versions
        for leaf in leaves:
            leaf.grad = None
        for _ in range(3):
            call()
        for leaf in leaves:
            leaf.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        times = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for leaf in leaves:
                leaf.grad = None
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        found[name] = {"ms": median(times), "mib": peak / 2**20}

    def head(N: int, D: int, V: int, dtype: Any) -> Any:
        torch.manual_seed(0)
        x = torch.randn(N, D, device="cuda", dtype=dtype).requires_grad_()
        w = (torch.randn(V, D, device="cuda", dtype=dtype) * D**-0.5).requires_grad_()
        return x, w, torch.randint(0, V, (N,), device="cuda")

    def loss(x: Any, w: Any, y: Any, **options: Any) -> None:
        lowtide.linear_cross_entropy(x, w, y, **options).backward()

    def logprobs(x: Any, w: Any, y: Any, **options: Any) -> None:
        lowtide.linear_logprobs(x, w, y, **options).sum().backward()

    def stats(x: Any, w: Any, y: Any, **options: Any) -> None:
        found = lowtide.linear_token_stats(x, w, y, **options)
        (found.logprob + found.entropy).sum().backward()

    def divergence(x: Any, w: Any, t: Any, tw: Any, **options: Any) -> None:
        lowtide.linear_divergence(x, w, t, tw, **options).sum().backward()

    def apply(fn: Any, x: Any, w: Any, *args: Any, out: str) -> None:
        lowtide.linear_apply(fn, x, w, *args, out=out).sum().backward()

    if ranks > 1:
        import torch.distributed as dist

        dist.init_process_group("nccl", rank=rank, world_size=ranks)
        x, w, y = head(8192, 2048, 131072, torch.bfloat16)
        w = w.detach()[rank * 65536 : (rank + 1) * 65536].clone().requires_grad_()
        shard = {"vocab_shard": lowtide.VocabShard.of(w)}
        for name, function in (("cross entropy", loss), ("log-probabilities", logprobs), ("statistics", stats)):
            case(f"{name}, sharded over 2 ranks", partial(function, x, w, y, **shard), (x, w))
        dist.destroy_process_group()
        return found
    for name, shape in SHAPES.items():
        x, w, y = head(shape.N, shape.D, shape.V, torch.bfloat16)
        case(f"cross entropy {name}", partial(loss, x, w, y), (x, w))
    shape = SHAPES["llama-1b"]
    x, w, y = head(shape.N, shape.D, shape.V, torch.bfloat16)
    b = torch.randn(shape.V, device="cuda", dtype=torch.bfloat16).requires_grad_()
    several = torch.randint(0, shape.V, (shape.N, 8), device="cuda")
    capped = {"linear_bias": b, "softcap": 30.0, "z_loss": 1e-4}
    case("cross entropy, bias, cap, z-loss", partial(loss, x, w, y, **capped), (x, w, b))
    case("cross entropy, smoothing", partial(loss, x, w, y, label_smoothing=0.1), (x, w))
    case("cross entropy, 128 MiB", partial(loss, x, w, y, options=lowtide.HeadOptions(workspace_mib=128)), (x, w))
    case("log-probabilities", partial(logprobs, x, w, y), (x, w))
    case("token statistics", partial(stats, x, w, y), (x, w))
    case("log-probabilities of 8", partial(logprobs, x, w, several), (x, w))
    del b, several
    x, w, y = head(8192, 2048, 65536, torch.bfloat16)
    t, tw, _ = head(8192, 2048, 65536, torch.bfloat16)
    t, tw = t.detach().flip(0), tw.detach()
    for kind in ("forward_kl", "jsd"):
        case(f"divergence {kind}, mean", partial(divergence, x, w, t, tw, kind=kind, reduction="mean"), (x, w))
    case("divergence forward_kl, per token", partial(divergence, x, w, t, tw), (x, w))

    def summed(z: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(z, y, reduction="sum")

    def entropy(z: Any) -> Any:
        return torch.special.entr(z.softmax(-1)).sum(-1)

    case("linear_apply, cross entropy", partial(apply, summed, x, w, y, out="sum"), (x, w))
    case("linear_apply, entropy", partial(apply, entropy, x, w, out="token"), (x, w))
    x, w, y = head(8192, 2048, 65536, torch.float16)
    case("cross entropy, fp16 (row)", partial(loss, x, w, y), (x, w))
    return found


def process(src: str, rank: int = 0, ranks: int = 1) -> Any:
    environment = os.environ | {"PYTHONPATH": src, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    return subprocess.Popen(
        [sys.executable, __file__, "--measure", str(rank), str(ranks)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def one(src: str) -> dict[str, dict[str, float]]:
    import torch

    found: dict[str, dict[str, float]] = {}
    runs = [[process(src)]]
    if torch.cuda.device_count() > 1:
        found.update(answer(process(src)))
        runs = [[process(src, rank, 2) for rank in range(2)]]
    for group in runs:
        answers = [answer(run) for run in group]
        found.update(answers[0])
    return found


def answer(run: Any) -> dict[str, dict[str, float]]:
    out, _ = run.communicate()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if run.returncode or not lines:
        raise RuntimeError(f"a measuring process ended with exit status {run.returncode}")
    result: dict[str, dict[str, float]] = json.loads(lines[-1])
    return result


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(int(sys.argv[2]), int(sys.argv[3]))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.new)  # for `report`: lowtide need not be installed
    rounds: list[Any] = []
    for i in range(arguments.rounds + 1):
        pair = {name: one(src) for name, src in (("base", arguments.base), ("new", arguments.new))}
        if i:  # the first compiles the kernels
            rounds.append(pair)
            report(rounds, arguments.out)
    for row in report(rounds, arguments.out):
        print("{case:40} {ratio:.3f} ({lowest:.3f}-{highest:.3f}) {new_ms:8.2f} ms".format(**row), end=" ")
        print("{base_mib:8.0f} -> {new_mib:8.0f} MiB".format(**row))


def report(rounds: list[Any], out: Path | None) -> list[dict[str, Any]]:
    """Return a row for each case, and write all of them."""
    from lowtide.measure.machine import describe_machine

    rows = []
    for case in (case for case in rounds[0]["new"] if case in rounds[0]["base"]):
        base, new = ([pair[name][case]["ms"] for pair in rounds] for name in ("base", "new"))
        ratios = sorted(b / a for a, b in zip(base, new, strict=True))
        rows.append(
            {
                "case": case,
                "base_ms": median(base),
                "new_ms": median(new),
                "ratio": median(ratios),
                "lowest": ratios[0],
                "highest": ratios[-1],
                "base_mib": rounds[-1]["base"][case]["mib"],
                "new_mib": rounds[-1]["new"][case]["mib"],
            }
        )
    if out:
        command = f"python benchmarks/versions.py BASE_SRC NEW_SRC --rounds {len(rounds)}"
        out.write_text(json.dumps({"command": command, "machine": describe_machine(), "rows": rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
