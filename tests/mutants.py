"""Small defects, put into a copy of src one at a time: the nearest tests of `make test` have to see each.

    python tests/mutants.py [ROOM or part of a line ...] [--jobs 2]

prints a line for each, and fails unless all that have no reason to survive were killed. `make slow` runs them all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
SRC = TESTS.parent / "src"


@dataclass(frozen=True)
class Mutant:
    """``old``, which stands once in a file of src/lowtide, becomes ``new``; ``tests`` are paths, maybe with a `-k`."""

    file: str
    old: str
    new: str
    tests: str
    survives: str = ""  # the reason why none has to see it

    def __str__(self) -> str:
        return f"{self.file}: {self.old!r} -> {self.new!r}"

    def change(self, src: Path) -> None:
        file = src / "lowtide" / self.file
        text = file.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self}: expected the old text once in the file, found it {text.count(self.old)} times")
        file.write_text(text.replace(self.old, self.new))

    def killed(self, src: Path) -> tuple[bool, str]:
        """Return whether the tests fail with it in ``src``, and the last line that pytest says."""
        files, _, chosen = self.tests.partition(" -k ")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
        command += [str(TESTS / file) for file in files.split()] + (["-k", chosen] if chosen else [])
        env = {**os.environ, "PYTHONPATH": str(src), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        found = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True, check=False)
        lines = [line for line in found.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        says = (lines or found.stdout.splitlines() or found.stderr.splitlines() or ["nothing"])[-1]
        if found.returncode not in (0, 1):
            raise RuntimeError(f"{self}: pytest ended with {found.returncode}: {says}\n{found.stdout[-2000:]}")
        return found.returncode == 1, says


# What stands under a room is seen by this room's tests, or by those of one above it.
MUTANTS: dict[str, list[Mutant]] = {
    "top": [
        Mutant(
            "nn.py", "            return losses.sum() / kept.sum()", "            return losses.sum() / kept.numel()",
            "test_nn.py",
        ),
        Mutant("nn.py", "self.weight.to(losses.dtype)[", "self.weight[", "test_nn.py"),
        Mutant(
            "arguments.py", "    if isinstance(value, bool) or not isinstance(value, Integral):",
            "    if not isinstance(value, Integral):", "mlp/test_swiglu_errors.py",
        ),
        Mutant(
            "arguments.py", "    if not (low < value < high if above else low <= value <= high):",
            "    if not low <= value <= high:", "losses/test_errors.py",
        ),
        Mutant(
            "head/terms/cross_entropy.py", "position = int(wrong.nonzero()[0, 0])",
            "position = int(wrong.nonzero()[-1, 0])", "contract/test_errors.py -k position",
        ),
        Mutant(
            "graph.py", "return stored, sources, last and not ctx.shared", "return stored, sources, True",
            "contract/test_autograd.py",
        ),
        Mutant(
            "graph.py", "        if watched(args):\n            return self.registered(*args)\n", "",
            "contract/test_compile.py",
        ),
        Mutant(
            "kernel_launch.py", "    return -(-n // size)\n", "    return max(1, n // size)\n",
            "layers/test_norm.py -k kernel",
        ),
        Mutant(
            "lazy.py", "for name in sys.modules[package].__all__ if not lacks(name)]",
            "for name in sys.modules[package].__all__]", "package",
        ),
    ],
    "head": [
    ],
    "skip": [
    ],
    "mlp": [
        Mutant(
            "mlp/elementwise.py", "    c = a.clamp(-64, 64)  # s is 0 or 1 outside\n", "    c = a + 0\n",
            "mlp/test_swiglu_values.py -k any_size",
        ),
        Mutant(
            "mlp/passes.py", "        up.backward(dup, x, dx, start, add=True)",
            "        up.backward(dup, x, dx, start, add=False)", "mlp/test_swiglu_values.py",
        ),
        Mutant(
            "mlp/passes.py", "call.wide if len(tiles) > 1 or t.dim() == 1", "call.wide if t.dim() == 1",
            "mlp/test_swiglu_values.py -k float32",
        ),
        Mutant(
            "mlp/passes.py", "        if tile is tiles[-1]:\n            saved.clear()\n", "",
            "mlp/test_swiglu_memory.py -k peak",
        ),
        Mutant(
            "mlp/low_rank.py", "dx[part].add_(through, alpha=self.scale)", "dx[part].add_(through)",
            "mlp/test_low_rank.py -k drop",
        ),
        Mutant(
            "mlp/low_rank.py", "            first = start + part.start\n", "            first = part.start\n",
            "mlp/test_low_rank.py mlp/test_joined.py",
        ),
        Mutant(
            "mlp/call.py", "return min(self.dtype, self.input.dtype,", "return max(self.dtype, self.input.dtype,",
            "mlp/test_packed.py -k stays",
        ),
        Mutant(
            "mlp/call.py", '    "up first": lambda F: (slice(F, 2 * F), slice(0, F)),',
            '    "up first": lambda F: (slice(0, F), slice(F, 2 * F)),', "mlp/test_joined.py -k float64",
        ),
        Mutant(
            "mlp/expert_passes.py", "return torch.where(self.ids < E, grad, 0.0)", "return grad",
            "mlp/test_experts.py -k no_expert",
        ),
        Mutant(
            "mlp/expert_rows.py", "passes = (~(g > limit), ~(u.abs() > limit))",
            "passes = (~(g > limit), ~(u > limit))", "mlp/test_experts.py -k values",
        ),
        Mutant(
            "mlp/packed.py", "            outer[:1] = [part(one, shared) for one in outer[:1]]\n", "",
            "mlp/test_packed.py -k rows",
        ),
        Mutant(
            "mlp/operators.py", "        ctx.shared = held_elsewhere()", "        ctx.shared = False",
            "mlp/test_swiglu_autograd.py -k checkpointed",
        ),
    ],
    "layers": [
        Mutant(
            "layers/norm.py", "dx.copy_(into_rows if call.g_sum is None else into_rows.add_(call.g_sum))",
            "dx.copy_(into_rows)", "layers/test_norm.py -k residual",
        ),
        Mutant(
            "layers/norm.py", "        normed = normed.to(x.dtype).to(wide.dtype)\n", "        pass\n",
            "layers/test_norm.py -k transformers",
        ),
        Mutant(
            "layers/rope.py", "sin_1, sin_2 = -sin_2, -sin_1", "sin_1, sin_2 = -sin_1, -sin_2",
            "layers/test_rope.py -k values",
        ),
        Mutant(
            "layers/kernels/rms_norm.py",
            "        inside = (row < N)[:, None] & (column < D)[None, :]\n        g = ",
            "        inside = (row <= N)[:, None] & (column < D)[None, :]\n        g = ",
            "layers/test_norm.py -k kernel",
        ),
        Mutant(
            "layers/kernels/rotary.py", "others = 0 if LAST else 2 * half", "others = 2 * half",
            "layers/test_rope.py -k kernel",
        ),
    ],
    "losses": [
        Mutant(
            "losses/policy_terms.py", "clipped = ratio.clamp(1 - low, 1 + high)",
            "clipped = ratio.clamp(1 - high, 1 + low)", "losses/test_tokens.py -k values",
        ),
        Mutant(
            "losses/policy_terms.py", 'loss = loss - factor * check_like("entropy"',
            'loss = loss + factor * check_like("entropy"', "losses/test_tokens.py -k terms",
        ),
        Mutant(
            "losses/policy_terms.py", "std = groups.std(-1, keepdim=True) if scale",
            "std = groups.std(-1, keepdim=True, correction=0) if scale", "losses/test_parts.py",
        ),
        Mutant(
            "losses/policy_gradient.py", "mask).detach().clamp(low, ratio_max)", "mask).clamp(low, ratio_max)",
            "losses/test_tokens.py -k values",
        ),
        Mutant(
            "losses/reduction.py", "return total / keep.sum(-1).clamp(min=1) if average else total",
            "return total / keep.sum(-1) if average else total", "losses/test_tokens.py -k values",
        ),
        Mutant(
            "losses/reduction.py", "return _reduced(values, reduction, max(values.numel(), 1), num_items)",
            "return _reduced(values, reduction, keep.sum().clamp(min=1), num_items)", "losses/test_tokens.py -k values",
        ),
        Mutant(
            "losses/checks.py", "    return tensor.where(keep, 0), keep", "    return tensor * keep, keep",
            "losses/test_tokens.py -k masked",
        ),
        Mutant(
            "losses/checks.py", "return tensor.to(torch.promote_types(tensor.dtype, torch.float32))", "return tensor",
            "losses/test_tokens.py -k dtypes",
        ),
        Mutant("losses/preference.py", "-p.e) / (1 - 2 * p.e)", "-p.e) / (1 - p.e)", "losses/test_pairs.py -k robust"),
        Mutant(
            "losses/preference.py", "    logprob = logprob.clamp(max=nearly_one)\n",
            "    logprob = logprob.clamp(max=0)\n", "losses/test_pairs.py -k orpo",
        ),
        Mutant(
            "losses/supervised.py", "used = keep[..., None] & (target_prob != 0)",
            "used = keep[..., None].expand(target_prob.shape)", "losses/test_parts.py -k soft",
        ),
        Mutant(
            "losses/multi_token.py",
            "same_document = pad(runs[..., k:], end, value=-1) == runs",
            "same_document = pad(documents[..., k:], end, value=-1) == documents",
            "losses/test_multi_token.py -k future",
        ),
        Mutant(
            "losses/multi_token.py", "sums = [part.sum() / f for part, f in", "sums = [part.sum() for part, f in",
            "losses/test_multi_token.py -k values",
        ),
    ],
    "memory": [
    ],
    "plan": [
    ],
    "distributed": [
    ],
    "trl": [
    ],
    "stacks": [
    ],
    "models": [
    ],
    "train": [
    ],
    "bench": [
    ],
    "profile": [
    ],
    "measure": [
    ],
    "cli": [
    ],
}  # fmt: skip


def judge(mutant: Mutant) -> tuple[bool, str]:
    """Run a mutant's tests and return whether all is as it should be, and a line about it."""
    since = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        src = Path(shutil.copytree(SRC, Path(folder, "src"), ignore=shutil.ignore_patterns("__pycache__")))
        mutant.change(src)
        killed, says = mutant.killed(src)
    outcome = "killed" if killed else f"survived, as known ({mutant.survives})" if mutant.survives else "SURVIVED"
    return killed != bool(mutant.survives), f"{outcome} in {time.monotonic() - since:.0f} s: {mutant}\n    {says}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chosen", nargs="*", help="rooms, or parts of a mutant's line; all if none is given")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    of_room = [(room, mutant) for room, mutants in MUTANTS.items() for mutant in mutants]
    wanted = arguments.chosen
    chosen = [m for room, m in of_room if not wanted or any(part == room or part in str(m) for part in wanted)]
    right, speaking = [], threading.Lock()

    def run(mutant: Mutant) -> None:
        good, line = judge(mutant)
        with speaking:
            right.append(good)
            print(line, flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run, chosen))
    print(f"{sum(right)} of {len(chosen)} as they should be")
    return 0 if chosen and all(right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
