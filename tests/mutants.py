"""Small defects, put into a copy of src one at a time: the nearest tests of `make test` have to see each.

    python tests/mutants.py [ROOM or part of a line ...] [--jobs 2]

prints a line for each, and fails unless all were killed. `make slow` runs them all.
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
PATIENCE = 900  # seconds: a loop without an end is a defect that is seen


@dataclass(frozen=True)
class Mutant:
    """``old``, which stands once in a file of src/lowtide, becomes ``new``; ``tests`` are paths, maybe with a `-k`."""

    file: str
    old: str
    new: str
    tests: str

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
        try:
            found = subprocess.run(
                command, env=env, cwd=TESTS.parent, capture_output=True, text=True, check=False, timeout=PATIENCE
            )
        except subprocess.TimeoutExpired:
            return True, f"its tests do not end within {PATIENCE} s"
        lines = [line for line in found.stdout.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
        says = (lines or found.stdout.splitlines() or found.stderr.splitlines() or ["nothing"])[-1]
        if found.returncode not in (0, 1) or any("::" not in line for line in lines):  # or a file cannot be imported
            raise RuntimeError(f"pytest ended with {found.returncode}: {says}\n{found.stdout[-2000:]}")
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
            "    if not isinstance(value, Integral):", "contract/test_errors.py -k swiglu",
        ),
        Mutant(
            "arguments.py", "    if not (low < value < high if above else low <= value <= high):",
            "    if not low <= value <= high:", "losses/test_errors.py",
        ),
        Mutant(
            "head/terms/cross_entropy.py", "position = int(wrong.nonzero()[0, 0])",
            "position = int(wrong.nonzero()[-1, 0])", "contract/test_errors.py -k linear_cross_entropy",
        ),
        Mutant(
            "graph.py", "return stored, sources, last and not ctx.shared", "return stored, sources, True",
            "contract/test_autograd.py -k retained",
        ),
        Mutant(
            "graph.py", "        if watched(args):\n            return self.registered(*args)\n", "",
            "contract/test_compile.py -k opcheck",
        ),
        Mutant(
            "kernel_launch.py", "    return -(-n // size)\n", "    return max(1, n // size)\n",
            "layers/test_layers.py -k kernels",
        ),
        Mutant(
            "lazy.py", "for name in sys.modules[package].__all__ if not lacks(name)]",
            "for name in sys.modules[package].__all__]", "package",
        ),
    ],
    "head": [
        Mutant("head/plan.py", "-(-evenly // tile) * tile", "rows", "head/test_plan.py -k one_length"),
        Mutant("head/plan.py", "4 * ROWS else 2)", "4 * ROWS else 1)", "head/test_plan.py -k rule"),
        Mutant("head/kernels/exp_rows.py", "total += tl.where(s == 0.0, 0.0, block.to(tl.float32) * s)",
               "total += tl.where(s == 0.0, 0.0, block.to(tl.float32))", "contract/test_kernels.py -k any_size"),
        Mutant("head/engine.py", "g_CV.sum(0, dtype=head.wide) if outside is None else outside @ g_CV",
               "g_CV.sum(0, dtype=head.wide)",
               "contract/test_autograd.py -k subset"),
        Mutant("head/nodes.py", "part]).masked_fill_(zero, 0)", "part])",
               "contract/test_ignored.py -k nothing_counts"),
        Mutant("head/engine.py", "x_CD if kept is None else x_CD.where(kept[part, None], 0)", "x_CD",
               "contract/test_ignored.py -k anything"),
        Mutant("head/call.py", 'wide if plan.accumulate == "float32" else head', "head",
               "head/test_numbers.py -k accumulated"),
        Mutant("head/cross_entropy.py", "None if token_weight is None else _shifted(token_weight, 0)", "token_weight",
               "contract/test_values.py -k pair_of_options"),
        Mutant("head/kernels/stats.py", "(y == y_first), of_first, logprob)", "(y == y_first), logprob, logprob)",
               "contract/test_kernels.py -k set_of_bits"),
        Mutant("head/kernels/logit_rows.py", "return tl.where(at < n, z", "return tl.where(at <= n, z",
               "head/kernels/test_row_softmax.py -k sizes"),
        Mutant("head/terms/statistics.py", ".clamp_(max=1).neg_().add_(1)", ".clamp_(max=1).add_(1)",
               "contract/test_values.py -k pair_of_options"),
        Mutant("head/terms/divergence.py", "c = _times(s, a - log_m).mul_(1 - beta)",
               "c = _times(s, a - log_m).mul_(beta)", "contract/test_autograd.py -k subset"),
        Mutant("head/terms/loss.py", "+ 2 * self.z_loss * numbers", "+ self.z_loss * numbers",
               "contract/test_values.py -k pair_of_options"),
        Mutant("head/terms/statistics.py", "torch.log1p(-miss), miss < 0.5", "torch.log1p(-miss), miss < 0",
               "head/test_numbers.py -k sure"),
        Mutant("head/call.py", "torch.float32 if dtype == torch.float16 else dtype", "dtype",
               "head/test_numbers.py -k factor"),
        Mutant("head/nodes.py", "grad if in_place else grad.clone()", "grad",
               "contract/test_autograd.py -k retained"),
        Mutant("head/terms/cross_entropy.py", "| (y_N >= V))", "| (y_N > V))",
               "contract/test_errors.py -k bad_arguments"),
        Mutant("head/contrastive.py", "/ (counts > 0).sum()", "/ len(y)", "contract/test_values.py -k contrastive"),
        Mutant("head/contrastive.py", "columns &= y_Q[:, None] != every_N", "pass",
               "contract/test_values.py -k contrastive"),
        Mutant("head/support.py", "ids[:, 1:].masked_fill_(repeated, NOTHING)", "pass",
               "head/test_support.py -k values"),
        Mutant("head/apply.py", "if all(map(torch.equal, before, _random_states(x))):",
               "if not all(map(torch.equal, before, _random_states(x))):", "head/test_apply.py -k coupled"),
        Mutant("head/apply.py", "                generator.set_state(state)", "                pass",
               "head/test_apply.py -k random"),
        Mutant("head/plan.py", "fixed = N * BYTES_PER_TOKEN + block", "fixed = block",
               "contract/test_memory.py -k workspace"),
        Mutant("head/backends.py", "targets > MOST_TARGETS", "targets >= MOST_TARGETS",
               "head/test_plan.py -k implementation"),
        Mutant("head/kernels/logit_rows.py", "value = tl.abs(x)", "value = 2.0 * tl.abs(x)",
               "contract/test_kernels.py -k linear_divergence"),
        Mutant("head/kernels/exp_logits.py", "bound = tl.where(kept, V - column, 0)",
               "bound = tl.where(kept, V - column + 1, 0)",
               "head/kernels/test_exp_logits.py"),
    ],
    "skip": [
        Mutant("skip/choice.py", "allowed = threshold.square() * whole", "allowed = threshold * whole",
               "skip/test_tiles.py -k kept"),
        Mutant("skip/order.py", "places.where(valid, -1), unit_N.index_select(0, index)",
               "places.where(valid, -1), unit_N",
               "skip/test_gradients.py -k options"),
        Mutant("skip/memory.py", "self.threshold * min(1.0, error / self.accepted)", "self.threshold",
               "skip/test_gradients.py -k may_change"),
        Mutant("skip/memory.py", "self.rates.square().lerp(", "of_pass.square().lerp(",
               "skip/test_gradients.py -k say_little"),
        Mutant("skip/losses.py", "self.head.tokens, known.passes)", "self.head.tokens, 0)",
               "skip/test_gradients.py -k other_signs"),
        Mutant("skip/choice.py", "factor = -torch.expm1(-miss_C)[:, None]", "factor = torch.expm1(-miss_C)[:, None]",
               "skip/test_gradients.py -k value_for_each"),
        Mutant("skip/seam.py", '"the weight gets no gradient": not head.weight_VD.requires_grad,',
               '"the weight gets no gradient": False,', "skip/test_gradients.py -k cannot"),
    ],
    "mlp": [
        Mutant(
            "mlp/elementwise.py", "    c = a.clamp(-64, 64)  # s is 0 or 1 outside\n", "    c = a + 0\n",
            "mlp/test_values.py -k any_size",
        ),
        Mutant(
            "mlp/call.py", "up.backward(du, x, dx, start, add=True)", "up.backward(du, x, dx, start)",
            "contract/test_values.py -k swiglu",
        ),
        Mutant(
            "mlp/call.py", "wide if len(tiles) > 1 or t.dim() == 1", "wide if t.dim() == 1",
            "mlp/test_values.py -k float32",
        ),
        Mutant(
            "mlp/call.py", "            if tile is tiles[-1]:\n                held.clear()\n", "",
            "mlp/test_memory.py -k peaks",
        ),
        Mutant(
            "mlp/dense.py", "in_place = not saved or is_last_backward()", "in_place = True",
            "mlp/test_memory.py -k retained",
        ),
        Mutant(
            "mlp/projection.py", "dx[part].add_(through, alpha=self.scale)", "dx[part].add_(through)",
            "mlp/test_values.py -k drop",
        ),
        Mutant(
            "mlp/projection.py", ", first = grad[part].to(self.a.dtype), start + part.start\n",
            ", first = grad[part].to(self.a.dtype), part.start\n",
            "mlp/test_values.py -k drop",
        ),
        Mutant(
            "mlp/call.py", "dtype = min(self.dtype, self.input.dtype,", "dtype = max(self.dtype, self.input.dtype,",
            "mlp/test_packed.py -k stays",
        ),
        Mutant(
            "mlp/call.py", '    "up first": lambda F: (slice(F, 2 * F), slice(0, F)),',
            '    "up first": lambda F: (slice(0, F), slice(F, 2 * F)),', "contract/test_values.py -k adapted",
        ),
        Mutant(
            "mlp/experts.py", "return torch.where(self._ids < E, grad, 0.0)", "return grad",
            "contract/test_values.py -k experts",
        ),
        Mutant(
            "mlp/experts.py", "passes = (~(g > limit), ~(u.abs() > limit))",
            "passes = (~(g > limit), ~(u > limit))", "contract/test_values.py -k experts",
        ),
        Mutant(
            "mlp/operators.py", "        ctx.shared = held_elsewhere()", "        ctx.shared = False",
            "mlp/test_values.py -k holds",
        ),
    ],
    "layers": [
        Mutant(
            "layers/norm.py", "dx.copy_(into_rows if g_sum is None else into_rows.add_(g_sum))",
            "dx.copy_(into_rows)", "contract/test_values.py -k add_rms_norm",
        ),
        Mutant(
            "layers/norm.py", "        normed = normed.to(x.dtype).to(wide.dtype)\n", "        pass\n",
            "layers/test_layers.py -k transformers",
        ),
        Mutant(
            "layers/rope.py", "sin_1, sin_2 = -sin_2, -sin_1", "sin_1, sin_2 = -sin_1, -sin_2",
            "contract/test_values.py -k rotary",
        ),
        Mutant(
            "layers/kernels.py", "(tl.sum(g * normed, 1) / D)", "(tl.sum(g * normed, 1) / BLOCK)",
            "layers/test_layers.py -k kernels",
        ),
        Mutant(
            "layers/kernels.py", "others = 0 if LAST else 2 * half", "others = 2 * half",
            "layers/test_layers.py -k kernels",
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
            "losses/reduction.py", "tensor.where(keep, 0) for tensor in tensors", "tensor * keep for tensor in tensors",
            "losses/test_tokens.py -k masked",
        ),
        Mutant(
            "losses/reduction.py", "return tensor.to(torch.promote_types(tensor.dtype, torch.float32))",
            "return tensor", "losses/test_tokens.py -k dtypes",
        ),
        Mutant("losses/preference.py", "-e) / (1 - 2 * e)", "-e) / (1 - e)", "losses/test_pairs.py -k robust"),
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
        Mutant(
            "memory/groups.py", "            restore()\n", "",
            "memory/test_policies.py -k dropout_draws",
        ),
        Mutant(
            "memory/attention.py", "            call.after()\n", "            pass\n",
            "memory/test_policies.py -k packages_operator",
        ),
        Mutant(
            "memory/offload.py", "self._changed = self._changed or self.written",
            "self._changed = False", "memory/test_offloads.py -k changed_in_place",
        ),
        Mutant(
            "memory/groups.py", "if output is None or not hidden._version == output._version == self._seen:",
            "if output is None:", "memory/test_policies.py -k unusual_layers",
        ),
        Mutant(
            "memory/copies.py", "        self._side.wait(self._done, here)\n", "",
            "memory/test_policies.py -k same_to_the_bit",
        ),
        Mutant(
            "memory/checkpoint.py", "if state.name in getattr(cache, _LEFT_OUT, ()):", "if False:",
            "memory/test_lifecycle.py -k left_empty",
        ),
        Mutant(
            "memory/optimizer.py", "if self._counts[param] % self._backwards:", "if False:",
            "memory/test_offload_optimizer.py -k last_backward",
        ),
        Mutant(
            "memory/apply.py", "moving = offloaded[: max(len(offloaded) - ON_DEVICE, 0)]", "moving = offloaded",
            "memory/test_policies.py -k same_to_the_bit",
        ),
    ],
    "plan": [
        Mutant(
            "plan/meter.py", "x.nbytes for x in made if x.is_floating_point()", "x.nbytes for x in made[:1]",
            "planner/test_phases.py -k bytes_and_operations",
        ),
        Mutant(
            "plan/step_costs.py", ' + follows * saved', "", "planner/test_phases.py -k layers_recompute",
        ),
        Mutant(
            "plan/sharding.py", "received = 2 * (job.gpus - 1) / job.gpus", "received = (job.gpus - 1) / job.gpus",
            "planner/test_phases.py -k ddp",
        ),
        Mutant(
            "plan/config.py", "SINGLE: 1 / 2 + 4 / BLOCK", "SINGLE: 1 / 2 + 2 / BLOCK",
            "planner/test_phases.py -k 4_bits",
        ),
        Mutant("plan/search.py", "one.seconds < found[-1].seconds", "True", "planner/test_plan.py -k mixture"),
        Mutant(
            "plan/meter.py", '(2 if given.get("is_causal") else 1)', "1",
            "planner/test_phases.py -k bytes_and_operations",
        ),
        Mutant(
            "plan/job.py", "autocast = dtype == torch.float32 and not packed.four_bit", "autocast = False",
            "planner/test_phases.py -k nothing_is_said",
        ),
        Mutant(
            "plan/config.py", "BLOCK, OUTER_BLOCK = 64, 256", "BLOCK, OUTER_BLOCK = 64, 1",
            "planner/test_phases.py -k 4_bits",
        ),
    ],
    "distributed": [
        Mutant(
            "head/ranks.py", "x_V[self.first : self.first + self.rows]",
            "x_V[: self.rows]", "distributed/test_heads.py -k option",
        ),
        Mutant(
            "head/ranks.py", "return summed if self.spread else scale, summed",
            "return scale, summed", "distributed/test_heads.py -k option",
        ),
        Mutant(
            "head/ranks.py", "rows = plan.product_rows // self.size",
            "rows = plan.chunk_rows // self.size", "distributed/test_heads.py -k kernels",
        ),
        Mutant(
            "head/ranks.py", "first = min(mesh.get_local_rank() * size, vocab)",
            "first = mesh.get_local_rank() * size", "distributed/test_heads.py -k option",
        ),
        Mutant(
            "head/ranks.py", "[0, 0] * (x.dim() - 1 - axis) + [0, missing]",
            "[0, 0] * (x.dim() - 1 - axis) + [missing, 0]", "distributed/test_heads.py -k option",
        ),
        Mutant(
            "distributed/tokens.py", "return (count.clamp(min=1) / ranks).float()",
            "return count.clamp(min=1).float()", "distributed/test_engines.py -k data",
        ),
        Mutant(
            "distributed/tokens.py", "for first in reversed(columns",
            "for first in (columns", "distributed/test_engines.py -k data",
        ),
        Mutant(
            "distributed/fsdp.py", "awaited.intersection_update({module})",
            "awaited.difference_update({module})", "distributed/test_engines.py -k fsdp",
        ),
        Mutant(
            "distributed/fsdp.py", "            self._module.reshard()\n",
            "            pass\n", "distributed/test_engines.py -k fsdp",
        ),
        Mutant(
            "distributed/zero.py", "                parameter.partition()\n",
            "                pass\n", "distributed/test_zero.py -k test_on_two_ranks[1]",
        ),
        Mutant(
            "distributed/zero.py", "            whole = ctx.whole.__enter__()\n",
            "            whole = ctx.whole\n", "distributed/test_zero.py -k test_on_two_ranks[1]",
        ),
        Mutant(
            "stacks/megatron.py", "first=group.rank() * rows",
            "first=0", "distributed/test_meshes.py -k megatron",
        ),
        Mutant(
            "memory/attention.py", "if is_dtensor(value):",
            "if False:", "distributed/test_meshes.py -k context_parallel",
        ),
    ],
    "trl": [
        Mutant("trl/calls.py", "softcap=_divided(self.final_logit_softcapping, self.temperature)",
               "softcap=self.final_logit_softcapping", "trl_patch/test_functions.py -k logprob_values"),
        Mutant("trl/calls.py", "softcap=_divided(cap, self.temperature)", "softcap=_divided(cap, scale)",
               "trl_patch/test_functions.py -k divergence_values"),
        Mutant("trl/calls.py", 'return "student and teacher scale', 'pass; "student and teacher scale',
               "trl_patch/test_patch.py -k divergences_that"),
        Mutant("trl/calls.py", "sum_sq.log().float()", "sum_sq.float()",
               "trl_patch/test_functions.py -k logprob_values"),
    ],
    "stacks": [
        Mutant("stacks/verl.py", "logit_scale=1 / temperature", "logit_scale=temperature", "stacks/test_verl.py"),
        Mutant("stacks/transformers.py", ', rounding="before_weight"', "", "stacks/test_transformers.py -k norms"),
        Mutant("stacks/transformers.py", "cos.shape[-1] == q.shape[-1]", "True",
               "stacks/test_transformers.py -k norms"),
    ],
    "models": [
        Mutant("models/patch.py", "    _check_nothing_on_top(target, (LOSS, *PARTS))\n", "",
               "models/test_lifecycle.py -k refused"),
        Mutant("models/patch.py",
               "    _check_nothing_on_top(target, [part for part, wanted in flags.items() if not wanted])\n",
               "", "models/test_lifecycle.py -k refused"),
        Mutant("models/callback.py", 'unpatch(kwargs["model"] if model is None else model)', "pass",
               "models/test_callback.py -k prints_and_undoes"),
        Mutant("models/callback.py", '        if not any(module is before for module in kwargs["model"].modules()):',
               '        if kwargs["model"] is not before:', "models/test_callback.py -k stays_patched"),
        Mutant("models/head_call.py", "scale, cap = scale * cap, abs(cap)",
               "cap = abs(cap)", "models/test_forms.py -k trains-gemma2"),
        Mutant("models/lazy_operations.py", "return (stats.mean_logit - stats.lse) * input.shape[-1]",
               "return stats.mean_logit - stats.lse", "models/test_logits.py -k summed"),
        Mutant("models/lazy_operations.py", "bias = other.detach().flatten().clone()",
               "bias = other.detach().flatten()", "models/test_logits.py -k of_the_time"),
        Mutant("models/lazy_logits.py", "if self.call.passed or self.has_children:", "if False:",
               "models/test_logits.py -k went_past"),
        Mutant("models/head_call.py", "None if x.is_inference() else x._version)", "None)",
               "models/test_logits.py -k after_a_change"),
        Mutant("models/head_call.py", "if x is not None and x.requires_grad != required]",
               "if x is not None and x.requires_grad < required]", "models/test_logits.py -k what_is_trained"),
        Mutant("models/lazy_operations.py", "replay(logits.to(dtype), steps).argmax(-1)", "logits.argmax(-1)",
               "models/test_scoring.py -k rounded_to_the_same"),
        Mutant("models/adapters.py", "or biases != [None, None]:", "or False:", "models/test_peft.py -k bias"),
        Mutant("models/adapters.py", "    if others:\n", "    if False:\n", "models/test_peft.py -k at_a_time"),
        Mutant("models/adapters.py", "dtype = linear.compute_dtype or x.dtype", "dtype = x.dtype",
               "models/test_quantised.py -k cannot_read"),
        Mutant("models/parts.py", "if not named and not is_code_of(base.forward, *_OWN):", "if False:",
               "models/test_probes.py -k other_gradients"),
        Mutant("models/parts.py", "for name, x in vars(module).items() if name", "for name, x in () if name",
               "models/test_probes.py -k alike"),
        Mutant("models/probe.py", '"its forward changes attributes of the module" if changed else got', "got",
               "models/test_probes.py -k other_gradients"),
        Mutant("models/probe.py", "allow_unused=True) if trained else [", "allow_unused=True) if False else [",
               "models/test_probes.py -k other_gradients"),
        Mutant("models/norm_part.py", "    return weight.dtype in (x.dtype, torch.float32)  # as probed",
               "    return True", "models/test_probes.py -k no_probe_saw"),
        Mutant("models/norm_part.py", "x[0, 0] *= eps**0.5 / probe.ROW_SCALES[0]", "x[0, 0] *= 1.0",
               "models/test_probes.py -k epsilon"),
        Mutant("models/rope_part.py", 'kwargs.get("unsqueeze_dim", layouts[0])', "layouts[0]",
               "models/test_probes.py"),
        Mutant("models/experts_part.py", "dtype if keeps else operand_dtype(x)", "operand_dtype(x)",
               "models/test_experts.py -k autocast"),
        Mutant("models/loss_part.py", "    lazy = (awaited or state.scoring) and not is_replica",
               "    lazy = awaited or state.scoring", "models/test_lifecycle.py -k build_logits"),
        Mutant("models/head_call.py", "            self.warned = True\n", "",
               "models/test_lifecycle.py -k build_logits"),
        Mutant("models/parts.py", "        vars(module).pop(attribute, None)", "        pass",
               "models/test_forms.py -k is_unpatched-llama"),
        Mutant("models/eligibility.py", "if not module.startswith(_HOOKS_THAT_DO_NOT_READ):", "if False:",
               "models/test_head.py -k around_the_head"),
        Mutant("models/lazy_logits.py", "child.is_cut = view and not grad_mode", "child.is_cut = False and view",
               "models/test_logits.py -k none_later"),
    ],
    "train": [
        Mutant("train/meter.py", "WARM_STEPS if len(self.step_seconds) > WARM_STEPS else 0, None", "0, None",
               "train/test_meter.py"),
        Mutant("train/scratch.py", "rows[held_out:], mixed", "rows, mixed", "train/test_scratch.py -k held_out"),
        Mutant("train/scratch.py", "generator=torch.Generator().manual_seed(seed)",
               "generator=torch.Generator().manual_seed(0)", "train/test_scratch.py -k order"),
        Mutant("train/scratch.py", " + -(-most // mixed) * mixed) *", " + most) *",
               "train/test_scratch.py -k held_out"),
        Mutant("train/fine_tuning.py", 'return bool(row["completion"])', "return True",
               "train/test_rows.py -k can_be_trained"),
        Mutant("train/fine_tuning.py", "for label in labels[:most])", "for label in labels[most:])",
               "train/test_rows.py -k cut_off"),
        Mutant("train/checkpoints.py", "    _check_states(path)\n", "", "train/test_checkpoints.py -k states"),
        Mutant("train/checkpoints.py", "[: -self._most if", "[: 1 - self._most if",
               "train/test_checkpoints.py -k older"),
        Mutant("train/endings.py", "control.should_evaluate = self._saves, False",
               "control.should_evaluate = False, False", "train/test_runs.py -k signal"),
        Mutant("train/trainers.py", "control.should_log |= control.should_save or", "control.should_log |=",
               "train/test_runs.py -k finite"),
        Mutant("train/distillation.py", "return x * shard.get_tensor(digest + _SCALE) if", "return x if",
               "train/test_distillation.py -k stored"),
        Mutant("train/distillation.py", "run.alpha * run.temperature**2", "run.alpha * run.temperature",
               "train/test_distillation.py -k beside"),
        Mutant("train/distillation.py", 'row.get("seq_lengths") or len(ids)', "len(ids)",
               "train/test_distillation.py -k stored"),
        Mutant("train/distillation.py", "len(text) and digest not in known", "len(text)",
               "train/test_distillation.py -k killed"),
        Mutant("train/comparison.py", "late = int(step > _EARLY_STEPS)", "late = int(step >= _EARLY_STEPS)",
               "train/test_comparison.py -k early"),
        Mutant("train/comparison.py", "        if step % self._block:\n", "        if step % (self._block + 1):\n",
               "train/test_comparison.py -k turns"),
        Mutant("models/budget.py", '"seq_len": length * rows if joined', '"seq_len": length if joined',
               "train/test_budget.py -k arguments_say"),
        Mutant("models/budget.py", "            args.gradient_checkpointing = False\n", "",
               "train/test_budget.py -k applied"),
    ],
    "bench": [
        Mutant("bench/case.py", "range(2 if self.gemms == 4 else 1)", "range(1)",
               "bench/test_values.py -k the_limit_runs"),
        Mutant("bench/case.py", "1 / len(x), device", "1.0, device",
               "bench/test_values.py -k peers_that_run"),
        Mutant("bench/case.py", "true.mean()", "true.sum()",
               "bench/test_values.py -k what_is_wrong"),
        Mutant("bench/harness.py", '"unsupported" not in row and', "",
               "bench/test_commands.py -k own_failure"),
        Mutant("bench/harness.py", "return name in named or", "return",
               "bench/test_commands.py -k own_failure"),
        Mutant("bench/models.py", "ids.numel() / seconds", "ids.shape[1] / seconds",
               "bench/test_step.py -k any_variant"),
    ],
    "profile": [
        Mutant("profile/memory.py", "self.begin < event <= self.end", "self.begin < event < self.end",
               "profiling/test_recording.py -k owner"),
        Mutant("profile/memory.py", "                block.end = number\n", "                block.end = number - 1\n",
               "profiling/test_recording.py -k owner"),
        Mutant("profile/phases.py", "if before.kind == FORWARD:", "if before.kind != FORWARD:",
               "profiling/test_steps.py -k hangs_together"),
        Mutant("profile/steps.py", "statistics.median_low(steps_ms)", "max(steps_ms)",
               "profiling/test_steps.py -k median"),
    ],
    "measure": [
        Mutant("measure/allocations.py", "max(seen.peak_bytes, total)", "max(seen.peak_bytes, size)",
               "measure/test_memory.py -k sizes_are_exact"),
        Mutant("measure/timing.py", "if round_ >= warm:", "if round_ > warm:",
               "measure/test_memory.py -k interleaved"),
        Mutant("measure/resident.py", "int(most) - used + int", "int(most) - used - int",
               "measure/test_memory.py -k control_group"),
        Mutant("measure/units.py", '"gb": 10**9', '"gb": 2**30',
               "measure/test_reports.py -k sizes"),
    ],
    "cli": [
        Mutant("cli/parser.py", 'self.error(f"unknown', 'print(f"unknown',
               "cli/test_command.py -k wrong_arguments"),
        Mutant("cli/bench.py", "not options.keys() & OF_SIZE", "options.keys() & OF_SIZE",
               "cli/test_command.py -k small_one"),
    ],
}  # fmt: skip


def judge(mutant: Mutant) -> tuple[bool, str]:
    """Run a mutant's tests and return whether one fails, and a line about it."""
    since = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        src = Path(shutil.copytree(SRC, Path(folder, "src")))  # what is compiled stays valid, as times are copied
        try:
            mutant.change(src)
            killed, says = mutant.killed(src)
        except (OSError, ValueError, RuntimeError) as error:
            return False, f"NOT TRIED: {mutant}\n    {error}"
    return killed, f"{'killed' if killed else 'SURVIVED'} in {time.monotonic() - since:.0f} s: {mutant}\n    {says}"


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
    print(f"{sum(right)} of {len(chosen)} killed")
    return 0 if chosen and all(right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
