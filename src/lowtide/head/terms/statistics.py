"""The statistics of a token's logits, and their gradient, written over the logits: plain PyTorch, on any rank.

C rows of a chunk, V vocabulary, V_r classes of it here, K targets a row, W ranks; z logits. Each row is measured from
its highest logit, whose class is kept out of the sums: where the model is sure, what is left over keeps its digits. No
second [C, V] comes to life.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowtide.head.call import Head
from lowtide.head.engine import Numbers, Terms, joined
from lowtide.head.plan import HeadPlan
from lowtide.head.rows import slices

FLOOR = -1e4  # a log-probability whose probability is 0 in every dtype: stands for -inf, which times 0 would be NaN
CAPPED_BLOCKS = 8  # of a chunk's rows: what a soft cap holds beside the logits, it holds for one of them
NO_ROW = 1e30  # logsumexp of a row that nothing flows back to: makes its probabilities 0 whatever its logits are


class Upstream(NamedTuple):
    """Gradients of a row's numbers; None where they are 0."""

    logprob: Tensor | float | None = None  # [C, K]; a number where it is that for all
    entropy: Tensor | None = None  # [C]
    lse: Tensor | None = None  # [C]
    mean_logit: Tensor | None = None  # [C]
    outside: Tensor | None = None  # [C] a factor of all of these, which the operands' dtype does not round

    def of(self, f: Callable[[Tensor], Tensor]) -> "Upstream":
        """Return ``f`` of each."""
        return Upstream._make(f(x) if isinstance(x, Tensor) else x for x in self)

    def largest(self, V: int) -> Tensor:
        """Return each row's largest magnitude [C], of what reaches a logit: the mean's is one V-th."""
        given = [self.logprob, self.entropy, self.lse, None if self.mean_logit is None else self.mean_logit / V]
        columns = [x if x.dim() == 2 else x[:, None] for x in given if isinstance(x, Tensor)]
        return torch.cat(columns, 1).abs().amax(1)


class Statistics(Terms):
    """Log-probabilities of targets, entropy, logsumexp, (weighted) mean logit, argmax, sum of squares, top k.

    The logsumexp and the targets' log-probabilities are always computed; with "argmax" its class's, too. A
    gradient that is rounded to narrow operands leaves each row's size outside: the target's entry is close to it, and
    bf16 would miss it by as much in each row.
    """

    def __init__(
        self,
        head: Head,
        plan: HeadPlan | None,  # None: of few logits
        y_nK: Tensor,  # target classes of the whole vocabulary, all valid
        want: frozenset[str],  # names among "entropy", "mean_logit", "sum_sq_prob", "argmax"
        q_V: Tensor | None = None,  # class weights of the mean on this rank
        topk: int = 0,  # how many of the highest logits
    ) -> None:
        self.head, self.want, self.q_V, self.topk = head, want, q_V, topk
        self.columns, self.narrow = (plan.columns, plan.backward_gemm == "narrow") if plan else (2**30, False)
        self.y: Tensor = head.ranks.here(y_nK)[0]

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Return "lse", "logprob" [C, K], with "argmax" also "top_logprob", and what is requested.

        The logits become the probabilities of the classes here. NaN and infinities are returned as by
        `torch.log_softmax`.
        """
        return self._numbers(z, part)[1]

    def _numbers(self, z: Tensor, part: slice) -> tuple[Numbers, Numbers]:
        """Return the numbers of the classes here, and those of all.

        By few operators, each over all of the chunk: on a CPU each one wakes all threads, and waits for the last. 1 - p
        of the highest class, or without "argmax" of the only target (the highest logit without its class is found 7
        times as fast), is summed over the other classes, so that it keeps its precision for confident tokens.
        """
        ranks, want, y, z_V = self.head.ranks, self.want, self.y[part], z[:, : self.head.ranks.rows]
        by_class, found = "argmax" in want or not ranks.alone, Numbers()
        if "mean_logit" in want:
            found["mean_logit"] = (z_V.sum(1) if self.q_V is None else z_V @ self.q_V) / ranks.vocab
        if self.topk:
            values, ids = torch.topk(z_V, min(self.topk, ranks.rows), dim=1)
            room = 0, self.topk - values.shape[1]  # where this rank has fewer
            found |= {"topk_values": pad(values, room, value=-torch.inf), "topk_ids": pad(ids + ranks.first, room)}
        t, (highest, sure) = z.gather(1, y), z.max(1) if by_class else (z.amax(1), y[:, 0])
        probabilities_(z)
        p_top = z.gather(1, sure[:, None])[:, 0] if by_class else z.amax(1)
        log_top = p_top.log()
        z.scatter_(1, sure[:, None], 0)
        miss = z.sum(1)
        log_sure, is_sure = torch.log1p(-miss), miss < 0.5
        logprob = torch.where(
            (y == sure[:, None]) & is_sure[:, None], log_sure[:, None], t - highest[:, None] + log_top[:, None]
        )
        found |= {"lse": highest.where(highest.isinf(), highest - log_top), "logprob": logprob}
        if by_class:
            found |= {"argmax": sure + ranks.first, "top_logprob": torch.where(is_sure, log_sure, log_top)}
        if "sum_sq_prob" in want:
            found["sum_sq_prob"] = p_top.square() + torch.linalg.vector_norm(z, dim=1).square()
        if "entropy" in want:
            found["entropy"] = torch.special.entr(z, out=z).sum(1) - p_top * found["top_logprob"]
        if ranks.alone:
            return found, found
        found["highest"] = highest
        return found, merged(found, ranks.gather(packed(found)))

    def gradient_(self, z: Tensor, part: slice, known: Numbers, g: Upstream) -> Tensor | None:
        """Turn logits into the gradient of the numbers, times their upstream gradients.

        With p the softmax, g_k, h, l and m the upstream gradients of the log-probabilities of targets y_k, of the
        entropy H, of the logsumexp and of the mean logit, and f_v = 1 - (z_v / softcap)**2 (1 without a cap):

            scale f_v (sum_k g_k ([v = y_k] - p_v) - h p_v (log p_v + H) + l p_v + m q_v / V)

        The entries of the targets and of the highest class are `entries_of`.
        """
        return self.both_(z, part, g, known)[1]

    def both_(
        self, z: Tensor, part: slice, upstream: Any, known: Numbers | None = None
    ) -> tuple[Numbers, Tensor | None]:
        """See `Terms.both_`: the probabilities are the gradient's too. With a cap in blocks: its slopes take memory.

        ``upstream`` are the gradients of ``known`` numbers, or a function that returns those of the numbers here.
        """
        ranks, cap, found = self.head.ranks, self.head.softcap, []
        blocks = slices(len(z), len(z) // (1 if cap is None else CAPPED_BLOCKS))
        for rows in list(blocks) or [slice(0, 0)]:
            p, of_all = z[rows], slice(part.start + rows.start, part.start + rows.stop)
            slope = None if cap is None else cap_slope(p, cap)
            if known is None:
                here, numbers = self._numbers(p, of_all)
                g = upstream(numbers, of_all)
                if not ranks.alone:
                    share = (here["lse"] - numbers["lse"]).exp().masked_fill(here["highest"] == -torch.inf, 0)
                    p.scatter_(1, (here["argmax"] - ranks.first)[:, None], here["top_logprob"].exp()[:, None])
                    p.masked_fill_((share == 0)[:, None], 0).mul_(share[:, None])
            else:
                numbers, g = {name: x[rows] for name, x in known.items()}, upstream.of(lambda x, rows=rows: x[rows])
                if ranks.alone:
                    probabilities_(p)
                else:
                    p.sub_(numbers["lse"][:, None]).exp_()
            found.append((numbers, self._turn_(p, of_all, numbers, g, slope)))
        return joined(found)

    def _turn_(self, p: Tensor, part: slice, known: Numbers, g: Upstream, slope: Tensor | None) -> Tensor | None:
        """Turn probabilities into the gradient; ``slope`` is f. Return what each row lacks."""
        ranks, scale, q = self.head.ranks, self.head.scale, self.q_V
        if self.narrow and g.outside is None:
            size = g.largest(ranks.vocab)
            size = size.where(size != 0, 1)
            g = g.of(lambda x: (x.t() / size).t())._replace(outside=size)
        if scale is not None:
            g = g.of(lambda x: x * scale) if g.outside is None else g._replace(outside=g.outside * scale)
        top = ranks.here(known["argmax"])[0] if "argmax" in self.want else None
        ids, at_ids, a = entries_of(self.y[part], top, known, g)
        p_V, even = p[:, : ranks.rows], None if g.mean_logit is None else g.mean_logit[:, None] / ranks.vocab
        if g.entropy is not None:
            for cols in slices(ranks.rows, self.columns):
                heat = torch.special.entr(p_V[:, cols])
                p_V[:, cols].mul_(a).addcmul_(heat, g.entropy[:, None])
        elif isinstance(a, Tensor) or a != 1:
            p_V.mul_(a)
        if even is not None:
            p_V.add_(even) if q is None else p_V.addcmul_(even, q[None])
            at_ids += even if q is None else even * torch.cat((q, q.new_zeros(1)))[ids]
        if slope is not None:
            p.mul_(slope)
            at_ids *= slope.gather(1, ids)
        p.scatter_(1, ids, at_ids)
        return g.outside


def entries_of(y_CK: Tensor, top_C: Tensor | None, known: Numbers, g: Upstream) -> tuple[Tensor, Tensor, Any]:
    """Return classes [C, K or 1 + K], the gradient there, and p_v's factor in that of the others, [C, 1] or a number.

    The classes are the highest one, where it is given, and the targets. Their gradient, but for scale, cap and the
    mean's part, is built from their log-probabilities, in which nothing has cancelled, and 1 - p = -expm1(log p).
    """
    of_targets = g.logprob.sum(1, keepdim=True) if isinstance(g.logprob, Tensor) else g.logprob or 0.0
    a: Any = 0.0 if g.lse is None else g.lse[:, None]
    ids, logprobs = y_CK, known["logprob"]
    if top_C is not None:
        ids = torch.cat((top_C[:, None], ids), 1)
        logprobs = torch.cat((known["top_logprob"][:, None], logprobs), 1)
    p = logprobs.exp()
    if g.entropy is not None:
        a = a - (g.entropy * known["entropy"])[:, None]
    at_ids = a * p
    if g.entropy is not None:
        at_ids -= g.entropy[:, None] * logprobs.clamp(min=FLOOR) * p
    if isinstance(g.logprob, Tensor):
        own = sum_of_equal(ids, y_CK, g.logprob)
        at_ids += own * -torch.expm1(logprobs) - (of_targets - own) * p
    elif g.logprob is not None:  # of one target
        at_ids -= g.logprob * torch.expm1(logprobs)
    return ids, at_ids, a - of_targets


def probabilities_(z_CV: Tensor) -> None:
    """Turn a chunk's logits into their softmax, in place.

    One operator over the rows of the whole buffer, which lie one after another: what is beyond V is -inf there.
    """
    rows, V = z_CV.shape
    whole = torch.as_strided(z_CV, (rows, z_CV.stride(0)), (z_CV.stride(0), 1))
    whole[:, V:] = -torch.inf
    torch.ops.aten.softmax.int_out(whole, 1, out=whole)  # not torch.softmax, which a user may have replaced


def sum_of_equal(ids: Tensor, targets: Tensor, g_CK: Tensor) -> Tensor:
    """Return, for each of the ids [C, J], the sum of the g of those targets [C, K] that are the same class.

    In an order that is the same from run to run, which scatter_add_ is not.
    """
    own = torch.empty(ids.shape, dtype=g_CK.dtype, device=g_CK.device)
    for part in slices(ids.shape[1], 8):
        same = ids[:, part, None] == targets[:, None]
        own[:, part] = torch.where(same, g_CK[:, None], 0).sum(2)
    return own


def packed(found: Numbers) -> Tensor:
    """Return the numbers of a rank's classes, flattened, as they are sent to the others: see `merged`.

    Classes among them are numbers of the logits' dtype: float32 is exact up to 2^24.
    """
    return torch.cat([x.reshape(-1).to(found["lse"].dtype) for x in _sent(found).values()])


def _sent(found: Numbers) -> Numbers:
    """Return what the others get: "lse" follows."""
    return {name: x for name, x in found.items() if name != "lse"}


def merged(found: Numbers, every_WF: Tensor) -> Numbers:
    """Return the numbers of all classes, from those that every rank `packed` as this one did its ``found``.

    With each rank's "highest" logit they are those of its own classes, and where a target is not among these its
    log-probability is -inf. Each is measured from the highest logit of all.
    """
    sent = _sent(found)
    planes = torch.split(every_WF, [x.numel() for x in sent.values()], 1)
    of = {name: plane.view(len(plane), *x.shape) for (name, x), plane in zip(sent.items(), planes, strict=True)}
    top, winner = of["highest"].max(0)
    nothing = (of["highest"] == -torch.inf) & (top != -torch.inf)
    mass = (of["highest"] - top - of["top_logprob"]).masked_fill(nothing, -torch.inf)  # logarithm of a rank's sum
    is_top = torch.zeros_like(nothing).scatter_(0, winner[None], True)
    spread = torch.where(is_top, mass.expm1(), mass.exp()).sum(0).log1p()
    shift = mass - spread  # from a rank's log-probabilities to those of all
    share = shift.exp()
    all_of = {
        "lse": top.where(top.isinf(), top + spread),
        "logprob": (of["logprob"] + shift[..., None]).masked_fill(nothing[..., None], -torch.inf).amax(0),
        "argmax": of["argmax"].gather(0, winner[None])[0].long(),
        "top_logprob": -spread,
    }
    if "entropy" in of:
        all_of["entropy"] = (share * (of["entropy"] - shift)).masked_fill(share == 0, 0).sum(0)
    if "sum_sq_prob" in of:
        all_of["sum_sq_prob"] = (share.square() * of["sum_sq_prob"]).masked_fill(share == 0, 0).sum(0)
    if "mean_logit" in of:
        all_of["mean_logit"] = of["mean_logit"].sum(0)
    if "topk_values" in of:
        values, ids = (of[name].transpose(0, 1).flatten(1) for name in ("topk_values", "topk_ids"))
        all_of["topk_values"], best = torch.topk(values, found["topk_values"].shape[1], dim=1)
        all_of["topk_ids"] = ids.gather(1, best).long()
    return all_of


def cap_slope(z: Tensor, cap: Tensor | float) -> Tensor:
    """Return the derivative of ``cap * tanh(x / cap)``, where that is ``z``; 0 of -inf, which no cap lets pass."""
    return (z / cap).square_().clamp_(max=1).neg_().add_(1)


def logsumexp(z_CV: Tensor, columns: int) -> Tensor:
    """Return each row's logsumexp [C], in blocks of so many columns; -inf of no classes."""
    blocks = list(slices(z_CV.shape[1], columns)) or [slice(0, 0)]
    return torch.stack([z_CV[:, part].logsumexp(1) for part in blocks]).logsumexp(0)


def silenced(known: Numbers, active: Tensor) -> Numbers:
    """Return known numbers, with inactive rows replaced by values that give 0."""
    return {name: x.t().where(active, NO_ROW if name == "lse" else 0).t() for name, x in known.items()}
