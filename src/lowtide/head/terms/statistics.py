"""The statistics of a token's logits, and their gradient, written over the logits: plain PyTorch, on any rank.

C rows of a chunk, V vocabulary, V_r classes of it here, K targets a row; z logits. Each row is measured from its
highest logit, whose class is kept out of the sums: where the model is sure, what is left over keeps its digits. No
second [C, V] comes to life.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.engine import Numbers, Terms, joined
from lowtide.head.matmul import slices
from lowtide.head.plan import HeadPlan

FLOOR = -1e4  # a log-probability whose probability is 0 in every dtype: stands for -inf, which times 0 would be NaN
CAPPED_BLOCKS = 8  # of a chunk's rows: what a soft cap holds beside the logits, it holds for one of them
NO_ROW = 1e30  # logsumexp of a row that nothing flows back to: makes its probabilities 0 whatever its logits are


class Upstream(NamedTuple):
    """Gradients of a row's numbers; None where they are 0."""

    logprob: Tensor | float | None = None  # [C, K]; a number where it is that for all
    entropy: Tensor | None = None  # [C]
    lse: Tensor | None = None  # [C]
    mean: Tensor | None = None  # [C]
    outside: Tensor | None = None  # [C] what all of these are still to be multiplied with

    def of(self, f: Callable[[Tensor], Tensor]) -> "Upstream":
        """Return ``f`` of each."""
        values: Any = (f(x) if isinstance(x, Tensor) else x for x in self)
        return Upstream(*values)

    def with_size_outside(self, V: int) -> "Upstream":
        """Return the same with each row's size outside."""
        largest = self.largest(V)
        outside = largest.where(largest != 0, 1)
        return self.of(lambda x: x / (outside[:, None] if x.dim() == 2 else outside))._replace(outside=outside)

    def largest(self, V: int) -> Tensor:
        """Return each row's largest magnitude [C], of what reaches a logit: the mean's is one V-th."""
        given = [self.logprob, self.entropy, self.lse, None if self.mean is None else self.mean / V]
        sizes = [x.abs().amax(1) if x.dim() == 2 else x.abs() for x in given if isinstance(x, Tensor)]
        return torch.stack(sizes).amax(0)


class Statistics(Terms):
    """Log-probabilities of targets, entropy, logsumexp, (weighted) mean logit, argmax, sum of squares, top k.

    The logsumexp and the targets' log-probabilities are always computed; with any ``want`` the highest class's, too. A
    gradient that is rounded to narrow operands leaves each row's size outside: the target's entry is close to it, and
    bf16 would miss it by as much in each row.
    """

    def __init__(
        self,
        head: Head,
        plan: HeadPlan,
        y_nK: Tensor,  # target classes of the whole vocabulary, all valid
        want: frozenset[str],  # names among "entropy", "mean", "sum_sq_prob", "top", "topk"
        q_V: Tensor | None = None,  # class weights of the mean on this rank
        topk: int = 0,  # how many of the highest logits
    ) -> None:
        self.head, self.want, self.columns, self.q_V, self.topk = head, want, plan.columns, q_V, topk
        self.narrow = plan.backward_gemm == "narrow"
        here: tuple[Tensor, Tensor | None] = head.ranks.here(y_nK)
        self.y, self.here = here

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Return "lse", "logprob" [C, K], with "top" also "top_logprob", and what is requested.

        Alone the logits become probabilities, by few operators, each over all of the chunk: on a CPU each one wakes all
        threads, and waits for the last. 1 - p of the highest class, or without "top" of the only target (the highest
        logit without its class is found 7 times as fast), is summed over the other classes, so that it keeps its
        precision for confident tokens. NaN and infinities are returned as by `torch.log_softmax`.
        """
        if not self.head.ranks.alone:
            return self._of_all_ranks(z, part)
        y, want = self.y[part], self.want
        found = {"mean": self._total(z) / z.shape[1]} if "mean" in want else {}
        if self.topk:
            found["topk_values"], found["topk_ids"] = torch.topk(z, self.topk, dim=1)
        t, (highest, sure) = z.gather(1, y), z.max(1) if "top" in want else (z.amax(1), y[:, 0])
        probabilities_(z)
        p_top = z.gather(1, sure[:, None])[:, 0] if "top" in want else z.amax(1)
        log_top = p_top.log()
        z.scatter_(1, sure[:, None], 0)
        miss = z.sum(1)
        log_sure, is_sure = torch.log1p(-miss), miss < 0.5
        logprob = torch.where(
            (y == sure[:, None]) & is_sure[:, None], log_sure[:, None], t - highest[:, None] + log_top[:, None]
        )
        found |= {"lse": highest.where(highest.isinf(), highest - log_top), "logprob": logprob}
        if "top" in want:
            found |= {"top": sure, "top_logprob": torch.where(is_sure, log_sure, log_top)}
        if "sum_sq_prob" in want:
            found["sum_sq_prob"] = p_top.square() + torch.linalg.vector_norm(z, dim=1).square()
        if "entropy" in want:
            found["entropy"] = torch.special.entr(z, out=z).sum(1) - p_top * found["top_logprob"]
        return found

    def _total(self, z_V: Tensor) -> Tensor:
        return z_V.sum(1) if self.q_V is None else z_V @ self.q_V

    def both_(
        self, z: Tensor, part: slice, upstream: Callable[[Numbers, slice], Upstream]
    ) -> tuple[Numbers, Tensor | None]:
        """See `Terms.both_`; alone the probabilities are the gradient's too."""
        if not (self.head.ranks.alone and len(z)):
            return super().both_(z, part, upstream)
        cap, found = self.head.softcap, []
        for rows in slices(len(z), len(z) if cap is None else max(1, len(z) // CAPPED_BLOCKS)):
            block, of_all = z[rows], slice(part.start + rows.start, part.start + rows.stop)
            slope = None if cap is None else (block / cap).square_().neg_().add_(1)
            numbers = self.numbers(block, of_all)
            outside = self.gradient_(block, of_all, numbers, upstream(numbers, of_all), slope=slope, normalised=True)
            found.append((numbers, outside))
        return joined(found)

    def _of_all_ranks(self, z: Tensor, part: slice) -> Numbers:
        """Return the numbers of the whole vocabulary from every rank's sums, about the highest logit of all."""
        ranks, want, z_V = self.head.ranks, self.want, z[:, : self.head.ranks.rows]
        at_y = z.gather(1, self.y[part])
        at_y = at_y if self.here is None else at_y.where(self.here[part], 0)
        sums = row_sums(z_V, self.columns, heat="entropy" in want, squares="sum_sq_prob" in want)
        nothing = sums["top"] == -torch.inf  # on this rank; another may have more
        given = {name: x if "top" in name else x.masked_fill(nothing, 0) for name, x in sums.items()}
        given["top_id"] = (sums["top_id"] + ranks.first).to(at_y.dtype)  # float32: exact up to 2^24
        if "mean" in want:
            given["total"] = self._total(z_V)
        every = ranks.gather(torch.cat((torch.stack([*given.values()], 1), at_y), 1))  # [W, C, numbers and targets]
        of = {name: every[..., i] for i, name in enumerate(given)}
        top, winner = of["top"].max(0)
        others = torch.ones_like(of["top"]).scatter_(0, winner[None], 0)  # whose highest logit is one of the rest
        below = of["top"] - top
        weight, count = below.exp(), of["rest"] + others
        top_id = of["top_id"].gather(0, winner[None])[0].long()
        merged = {"top": top, "top_id": top_id, "rest": (weight * count).sum(0)}
        if "heat" in of:
            merged["heat"] = (weight * (of["heat"] + below.clamp(min=FLOOR) * count)).sum(0)
        if "squares" in of:
            merged["squares"] = (weight.square() * (of["squares"] + others)).sum(0)
        found = numbers_of(merged, every[..., len(given) :].sum(0))
        if "top" not in want:
            del found["top"], found["top_logprob"]
        if "total" in of:
            found["mean"] = of["total"].sum(0) / ranks.vocab
        return found | self._highest(z_V) if self.topk else found

    def _highest(self, z_V: Tensor) -> Numbers:
        """Return all ranks' highest logits."""
        ranks, (values, ids) = self.head.ranks, torch.topk(z_V, min(self.topk, z_V.shape[1]), dim=1)
        mine = torch.stack((values, (ids + ranks.first).to(values.dtype)))
        padded = torch.nn.functional.pad(mine, (0, self.topk - values.shape[1]), value=-torch.inf)
        values, ids = ranks.gather(padded).permute(1, 2, 0, 3).flatten(2)
        values, best = torch.topk(values, self.topk, dim=1)
        return {"topk_values": values, "topk_ids": ids.gather(1, best).long()}

    def gradient_(
        self, z: Tensor, part: slice, known: Numbers, g: Upstream, *, normalised: bool = False,
        slope: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Turn logits into the gradient of the numbers, times their upstream gradients.

        With p the softmax, g_k, h, l and m the upstream gradients of the log-probabilities of targets y_k, of the
        entropy H, of the logsumexp and of the mean logit, and f_v = 1 - (z_v / softcap)**2 (1 without a cap):

            scale f_v (sum_k g_k ([v = y_k] - p_v) - h p_v (log p_v + H) + l p_v + m q_v / V)

        The entries of the targets and of the highest class are built from their log-probabilities, in which nothing has
        cancelled, and 1 - p = -expm1(log p).

        ``normalised`` logits are probabilities already, and ``slope`` is the f_v that they had.
        """
        head, V, cap, q = self.head, self.head.ranks.vocab, self.head.softcap, self.q_V
        if not head.ranks.alone:
            z[:, head.ranks.rows :] = 0
        if self.narrow and g.outside is None:
            g = g.with_size_outside(V)
        outside, scale = g.outside, head.scale
        if scale is not None and outside is None:
            g = g.of(lambda x: x * scale)
        elif scale is not None and outside is not None:
            outside = outside * scale
        of_targets = g.logprob.sum(1) if isinstance(g.logprob, Tensor) else g.logprob or 0.0
        a = 0.0 if g.lse is None else g.lse
        if g.entropy is not None:
            a = a - g.entropy * known["entropy"]
        even = None if g.mean is None else g.mean[:, None] / V
        ids, at_ids = self._entries(part, known, g, a, of_targets)
        if even is not None:
            at_ids += even if q is None else even * torch.cat((q, q.new_zeros(1)))[ids]
        if slope is not None:
            at_ids *= slope.gather(1, ids)
        elif cap is not None:
            at_ids *= 1 - (z.gather(1, ids) / cap).square_()
        a = a - of_targets
        a = a if isinstance(a, float) else a[:, None]
        # blocks, if memory besides the logits is needed
        in_blocks = slope is None and (cap is not None or g.entropy is not None)
        if not in_blocks and head.ranks.alone and not normalised:
            probabilities_(z)
            normalised = True
        for cols in slices(head.ranks.rows, self.columns if in_blocks else max(1, head.ranks.rows)):
            b = z[:, cols]
            # a masked class, whose logit is -inf, has slope 0 as logits have that reach the cap
            f = (b / cap).square_().clamp_(max=1).neg_().add_(1) if cap is not None and slope is None else slope
            if not normalised:
                b.sub_(known["lse"][:, None])
            if g.entropy is not None:
                p = b.exp()
                b.clamp_(min=FLOOR).mul_(-g.entropy[:, None]).add_(a).mul_(p)
            else:
                b = b if normalised else b.exp_()
                b = b if isinstance(a, float) and a == 1 else b.mul_(a)
            if even is not None:
                b.add_(even) if q is None else b.addcmul_(even, q[None, cols])
            if f is not None:
                b.mul_(f)
        z.scatter_(1, ids, at_ids)
        return outside

    def _entries(
        self, part: slice, known: Numbers, g: Upstream, a: Tensor | float, of_targets: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """Return classes [C, K or 1 + K], as columns, and the gradient there but for scale, cap and the mean's part."""
        ids, logprobs, targets = self.y[part], known["logprob"], self.y[part]
        if "top" in known:
            ids = torch.cat((self.head.ranks.here(known["top"])[0][:, None], ids), 1)
            logprobs = torch.cat((known["top_logprob"][:, None], logprobs), 1)
        p = logprobs.exp()
        at_ids = (a[:, None] if isinstance(a, Tensor) else a) * p
        if g.entropy is not None:
            at_ids -= g.entropy[:, None] * logprobs.clamp(min=FLOOR) * p
        if isinstance(g.logprob, Tensor) and isinstance(of_targets, Tensor):
            own = _sum_of_equal(ids, targets, g.logprob)
            at_ids += own * -torch.expm1(logprobs) - (of_targets[:, None] - own) * p
        elif g.logprob is not None:  # of one target
            at_ids -= g.logprob * torch.expm1(logprobs)
        return ids, at_ids


def probabilities_(z_CV: Tensor) -> None:
    """Turn a chunk's logits into their softmax, in place.

    One operator over the rows of the whole buffer, which lie one after another: what is beyond V is -inf there.
    """
    rows, V = z_CV.shape
    whole = torch.as_strided(z_CV, (rows, z_CV.stride(0)), (z_CV.stride(0), 1))
    whole[:, V:] = -torch.inf
    torch.ops.aten.softmax.int_out(whole, 1, out=whole)  # not torch.softmax, which a user may have replaced


def _sum_of_equal(ids: Tensor, targets: Tensor, g_CK: Tensor) -> Tensor:
    """Return, for each of the ids [C, J], the sum of the g of those targets [C, K] that are the same class.

    In an order that is the same from run to run, which scatter_add_ is not.
    """
    own = torch.empty(ids.shape, dtype=g_CK.dtype, device=g_CK.device)
    for part in slices(ids.shape[1], 8):
        same = ids[:, part, None] == targets[:, None]
        own[:, part] = torch.where(same, g_CK[:, None], 0).sum(2)
    return own


def row_sums(z_CV: Tensor, columns: int, *, heat: bool = False, squares: bool = False) -> Numbers:
    """Return what a pass over the logits adds up, in blocks of ``columns``, [C] each.

    With e_v = exp(z_v - top) of all classes but the highest one: "top" and "top_id", that one's logit and number,
    "rest" sum e_v, "heat" sum e_v (z_v - top), "squares" sum e_v^2. Rows that hold NaN, or +inf, or nothing but -inf,
    become NaN, as in `torch.log_softmax`.
    """
    none = z_CV.new_zeros(len(z_CV))
    sums = {"top": none - torch.inf, "top_id": none.long(), "rest": none}  # of a rank without classes
    sums |= {name: none.clone() for name, wanted in (("heat", heat), ("squares", squares)) if wanted}
    if not z_CV.shape[1]:
        return sums
    sums["top"], sums["top_id"] = top, top_id = z_CV.max(1)
    sums["rest"] = rest = top - top  # 0, or NaN where the highest logit is not finite
    z_CV.scatter_(1, top_id[:, None], -torch.inf)
    for part in slices(z_CV.shape[1], columns):
        below = z_CV[:, part] - top[:, None]
        e = below.exp() if heat else below.exp_()
        rest += e.sum(1)
        if heat:
            sums["heat"] += below.clamp_(min=FLOOR).mul_(e).sum(1)
        if squares:
            sums["squares"] += e.square_().sum(1)
    z_CV.scatter_(1, top_id[:, None], top[:, None])
    return sums


def lse_of(sums: Numbers) -> Tensor:
    """Return each row's logsumexp [C]; where the highest logit is infinite, that."""
    return sums["top"].where(sums["top"].isinf(), sums["top"] + torch.log1p(sums["rest"]))


def numbers_of(sums: Numbers, z_CK: Tensor) -> Numbers:
    """Return each row's numbers, and the log-probabilities of logits [C, K], in their memory.

    The entropy, in nats, is of two terms that are not negative, so that nothing cancels.
    """
    log = torch.log1p(sums["rest"])  # of the sum over the highest logit's exponential
    logprob = z_CK.sub_(sums["top"][:, None]).sub_(log[:, None])
    found = {"lse": lse_of(sums), "top": sums["top_id"], "top_logprob": -log, "logprob": logprob}
    if "heat" in sums:
        found["entropy"] = log - sums["heat"] / (1 + sums["rest"])
    if "squares" in sums:
        found["sum_sq_prob"] = (1 + sums["squares"]) / (1 + sums["rest"]).square()
    return found


def silenced(known: Numbers, active: Tensor) -> Numbers:
    """Return known numbers, with inactive rows replaced by values that give 0."""
    found = {name: x.where(active if x.dim() == 1 else active[:, None], 0) for name, x in known.items()}
    return found | {"lse": known["lse"].where(active, NO_ROW)}
