"""How long a training step takes: the layers', the head's, the embedding's and the optimizer's seconds."""

from __future__ import annotations

from lowtide.memory.optimizer_blocks import share_back, share_out
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.layer_costs import LayerCosts
from lowtide.memory.planner.optimizers import OPTIMIZERS
from lowtide.memory.planner.step_bytes import Groups, placed

HEAD_SHARE = 0.95  # of the GEMMs' rate, over its three GEMMs: benchmarks/results, lowtide bench head
# Share of a transfer's time that it takes from the GEMMs it runs beside: 6 of 139 ms, and 3 of 68, in
# benchmarks/results, 2026-11-21-policy-32768-h100.
BESIDE = 0.05
ON_TIME = 0.9  # share of the layers' time in which optimizer states are to have travelled


def head_seconds(job: Job) -> float:
    """Return the seconds of the output layer and its loss, forward and backward."""
    plan = job.head_plan
    gemms = 4 if plan.schedule == "blocks" or plan.gradient == "recompute" else 3
    gemms -= job.adapters is not None  # a frozen weight has no gradient
    flop = 2 * gemms * job.tokens * job.shape.vocab_params
    passes = 0 if plan.backend == "exp" else 3 * 4 * job.tokens * job.shape.vocab  # float32 logits, read and written
    return flop / (job.gemm_rate * HEAD_SHARE) + passes / job.gpu.bandwidth


def optimizer_seconds(job: Job) -> float:
    """Return the seconds of the optimizer's step."""
    adapters = job.trained_adapters
    trained = job.shape.params * job.element if adapters is None else 4 * adapters
    return OPTIMIZERS[job.optimizer].traffic * trained / job.gpu.bandwidth


def embedding_seconds(job: Job) -> float:
    """Return the seconds of the embedding's gradient: a table of zeros, and where tied its sum with the head's."""
    if job.adapters is not None:
        return 0.0
    passes = 4 if job.shape.tied else 1
    return passes * job.shape.vocab_params * job.element / job.gpu.bandwidth


class Times:
    """The seconds of one job, whichever policies its layers have."""

    def __init__(self, job: Job) -> None:
        self.job, self.layers = job, LayerCosts(job)
        self.fixed = head_seconds(job) + optimizer_seconds(job) + embedding_seconds(job)

    def _runs(self, groups: Groups) -> list[tuple[int, float, float, float]]:
        """Return for each run of equal layers their number, and one's seconds: forward, backward, transfer."""
        found = [(n, self.layers[policy], moves) for policy, n, moves in placed(groups)]
        return [(n, one.forward, one.backward, one.transfer if moves else 0.0) for n, one, moves in found]

    def travels(self, groups: Groups) -> int:
        """Return the bytes of optimizer states that leave within forward, and come back within backward.

        As many travel beside each layer: beside the one that has the least time left by its own checkpoint's copy.
        """
        runs, layers = self._runs(groups), self.job.shape.layers
        out = min((forward - transfer for _, forward, _, transfer in runs))
        back = min((backward - transfer for _, _, backward, transfer in runs))
        seconds = min(out / share_out(0, layers), back / share_back(1, layers))
        return int(max(0.0, seconds) * ON_TIME * self.job.gpu.pcie)

    def on_the_way(self, states: int, *, late: bool = False) -> float:
        """Return the seconds that so many bytes of offloaded states add: no more than `travels`, or late."""
        return (BESIDE + (1 if late else BESIDE)) * states / self.job.gpu.pcie

    def step(self, groups: Groups) -> float:
        """Return the seconds of a step.

        A copy to the host or back runs beside one layer's work: the longer of the two counts, and what the copy takes
        from the other's rate.
        """
        seconds = self.fixed
        for n, forward, backward, transfer in self._runs(groups):
            seconds += n * (max(forward, transfer) + max(backward, transfer) + 2 * BESIDE * transfer)
        return seconds
