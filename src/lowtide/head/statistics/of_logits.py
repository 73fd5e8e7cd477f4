"""What one token's logits amount to, and the gradient of it in the logits' place: a chunk of logits in, plain PyTorch.

C rows of the chunk, V vocabulary, K targets a row; z logits. Each row is measured from its highest logit, whose class
is kept out of the sums: where the model is sure, what is left over keeps its digits. No second [C, V] comes to life.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.head.softmax import column_blocks

FLOOR = -1e4  # a log-probability whose probability is 0 in every dtype: stands for -inf, which times 0 would be NaN


@dataclass(kw_only=True)
class RowSums:
    """Sums over a row's classes but the highest one, of e_v = exp(z_v - top)."""

    top: Tensor  # [C] highest logit
    top_id: Tensor  # [C] its class
    rest: Tensor  # [C] sum of e_v
    heat: Tensor | None  # [C] sum of e_v (z_v - top)
    squares: Tensor | None  # [C] sum of e_v^2

    @property
    def top_logprob(self) -> Tensor:
        """Return the highest log-probability [C]."""
        return -torch.log1p(self.rest)

    @property
    def lse(self) -> Tensor:
        """Return each row's logsumexp [C]; where the highest logit is infinite, that."""
        return self.top.where(self.top.isinf(), self.top + torch.log1p(self.rest))

    @property
    def entropy(self) -> Tensor:
        """Return each row's entropy [C] in nats: two terms that are not negative, so nothing cancels."""
        assert self.heat is not None
        return torch.log1p(self.rest) - self.heat / (1 + self.rest)

    @property
    def sum_sq_prob(self) -> Tensor:
        """Return the sum of each row's squared probabilities [C]."""
        assert self.squares is not None
        return (1 + self.squares) / (1 + self.rest).square()

    def logprobs(self, z_CV: Tensor, y_CK: Tensor) -> Tensor:
        """Return the log-probabilities [C, K] of classes ``y_CK``."""
        return self.logprobs_of(z_CV.gather(1, y_CK))

    def logprobs_of(self, z_CK: Tensor) -> Tensor:
        """Return the log-probabilities of logits [C, K] of these rows, in their memory."""
        return z_CK.sub_(self.top[:, None]).sub_(torch.log1p(self.rest)[:, None])


def row_sums(z_CV: Tensor, columns: int, *, heat: bool = False, squares: bool = False) -> RowSums:
    """Return what a pass over the logits adds up, in blocks of ``columns``.

    Rows that hold NaN, or +inf, or nothing but -inf, come out as NaN, as from `torch.log_softmax`.
    """
    top, top_id = z_CV.max(1)
    z_CV.scatter_(1, top_id[:, None], -torch.inf)
    rest = top - top  # 0, or NaN where the highest logit is not finite
    sums = RowSums(
        top=top,
        top_id=top_id,
        rest=rest,
        heat=torch.zeros_like(top) if heat else None,
        squares=torch.zeros_like(top) if squares else None,
    )
    for part in column_blocks(z_CV.shape[1], columns):
        below = z_CV[:, part] - top[:, None]
        e = below.exp() if heat else below.exp_()
        rest += e.sum(1)
        if sums.heat is not None:
            sums.heat += below.clamp_(min=FLOOR).mul_(e).sum(1)
        if sums.squares is not None:
            sums.squares += e.square_().sum(1)
    z_CV.scatter_(1, top_id[:, None], top[:, None])
    return sums


@dataclass(kw_only=True)
class Upstream:
    """What each row's values are multiplied with on their way to the gradient."""

    logprob: Tensor | None = None  # [C, K]
    entropy: Tensor | None = None  # [C]
    lse: Tensor | None = None  # [C]
    mean_logit: Tensor | None = None  # [C]

    def part(self, rows: slice | Tensor) -> "Upstream":
        """Return the same for some of the rows."""
        return Upstream(**{name: None if x is None else x[rows] for name, x in vars(self).items()})

    def times(self, factor_C: Tensor) -> "Upstream":
        """Return each row's times its factor."""
        return Upstream(
            **{
                name: None if x is None else x * (factor_C[:, None] if x.dim() == 2 else factor_C)
                for name, x in vars(self).items()
            }
        )

    def largest(self, V: int) -> Tensor:
        """Return each row's largest magnitude [C], of what reaches a logit: the mean's is one V-th."""
        given = [
            x.abs().amax(1) if x.dim() == 2 else x.abs()
            for x in (self.logprob, self.entropy, self.lse)
            if x is not None
        ]
        if self.mean_logit is not None:
            given.append(self.mean_logit.abs() / V)
        return torch.stack(given).amax(0)


@dataclass(kw_only=True)
class Known:
    """What forward found for each row and backward needs."""

    lse: Tensor  # [C]
    entropy: Tensor | None  # [C], where its gradient is wanted
    ids: Tensor  # [C, 1 + K] the highest class, and the targets; the highest one again where a target is ignored
    logprobs: Tensor  # [C, 1 + K] of these

    def part(self, rows: slice | Tensor) -> "Known":
        """Return the same for some of the rows."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return Known(lse=self.lse[rows], entropy=entropy, ids=self.ids[rows], logprobs=self.logprobs[rows])


def stats_gradient_(
    z_CV: Tensor,
    known: Known,
    upstream: Upstream,
    logit_scale: Tensor | None,
    softcap: float | None,
    columns: int,
    *,
    classes: int | None = None,
) -> None:
    """Turn logits, in place, into the gradient of the upstream-weighted sum with respect to ``x @ w.T + bias``.

    With p the softmax, g_k, h, l and m the upstream gradients of the log-probabilities of targets y_k, of the entropy
    H, of the logsumexp and of the mean logit, and f_v = 1 - (z_v / softcap)**2 (1 without a cap):

        scale f_v (sum_k g_k ([v = y_k] - p_v) - h p_v (log p_v + H) + l p_v + m / V)

    The entries of the targets and of the highest class are built from their log-probabilities, in which nothing has
    cancelled, and 1 - p = -expm1(log p). V is ``classes``, where the logits are of some of them.
    """
    V = classes or z_CV.shape[1]
    if logit_scale is not None:
        upstream = upstream.times(logit_scale.expand_as(known.lse))
    g, h, m = upstream.logprob, upstream.entropy, upstream.mean_logit
    a = torch.zeros_like(known.lse) if upstream.lse is None else upstream.lse
    if h is not None:
        assert known.entropy is not None
        a = a - h * known.entropy
    of_targets = None if g is None else g.sum(1)
    at_ids = _entries(known, g, h, a, of_targets)
    if m is not None:
        at_ids += (m / V)[:, None]
    if softcap is not None:
        at_ids *= 1 - (z_CV.gather(1, known.ids) / softcap).square_()
    a = (a if of_targets is None else a - of_targets)[:, None]
    for part in column_blocks(z_CV.shape[1], columns):
        z = z_CV[:, part]
        slope = None if softcap is None else (z / softcap).square_().neg_().add_(1)
        z.sub_(known.lse[:, None])
        if h is None:
            z.exp_().mul_(a)
        else:
            p = z.exp()
            z.clamp_(min=FLOOR).mul_(-h[:, None]).add_(a).mul_(p)
        if m is not None:
            z.add_((m / V)[:, None])
        if slope is not None:
            z.mul_(slope)
    z_CV.scatter_(1, known.ids, at_ids)


def _entries(known: Known, g: Tensor | None, h: Tensor | None, a: Tensor, of_targets: Tensor | None) -> Tensor:
    """Return the gradient at ``known.ids`` [C, 1 + K], but for scale, cap and the mean logit's part."""
    logprobs = known.logprobs
    p = logprobs.exp()
    at_ids = a[:, None] * p
    if h is not None:
        at_ids -= h[:, None] * logprobs.clamp(min=FLOOR) * p
    if g is not None and of_targets is not None:
        own = _sum_of_equal(known.ids, g)
        at_ids += own * -torch.expm1(logprobs) - (of_targets[:, None] - own) * p
    return at_ids


def _sum_of_equal(ids: Tensor, g_CK: Tensor) -> Tensor:
    """Return, for each of the ids [C, 1 + K], the sum of the g of those targets that are the same class.

    The targets are the ids but the first. In an order that is the same from run to run, which scatter_add_ is not.
    """
    own = torch.empty(ids.shape, dtype=g_CK.dtype, device=g_CK.device)
    for part in column_blocks(ids.shape[1], 8):
        same = ids[:, part, None] == ids[:, None, 1:]
        own[:, part] = torch.where(same, g_CK[:, None], 0).sum(2)
    return own
