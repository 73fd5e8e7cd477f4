"""What happens to one chunk of logits between the GEMMs: scale, cap, row sums, and the loss's gradient in their place.

C rows of the chunk, V vocabulary; z logits, t the target's. A row's statistics are lse, the logsumexp, and 1 - p_y.
Every function works on blocks of columns, so that no second [C, V] comes to life.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The loss of one token with logits z, target y and class weights q (all 1 if None, Q their sum):

    ``(1 - a) q_y (lse - z_y) + (a / V) (Q lse - sum_v q_v z_v) + u lse**2``, a = label_smoothing, u = z_loss.
    """

    class_weight: Tensor | None
    label_smoothing: float
    z_loss: float

    def classes(self, V: int) -> int:
        """Return the number of classes, where ``V`` of them are here."""
        return V

    def weight_of(self, y_C: Tensor) -> Tensor:
        """Return the class weights of the targets, where there are any."""
        assert self.class_weight is not None
        return self.class_weight[y_C]

    def target_share(self, y_C: Tensor) -> Tensor | float:
        """Return ``(1 - a) q_y``, the weight of the target's own log-probability."""
        if self.class_weight is None:
            return 1 - self.label_smoothing
        return (1 - self.label_smoothing) * self.weight_of(y_C)

    def total_class_weight(self, V: int) -> Tensor | float:
        """Return Q."""
        return V if self.class_weight is None else self.class_weight.sum()


def column_blocks(V: int, columns: int) -> Iterator[slice]:
    """Yield slices of at most ``columns`` that cover V."""
    for start in range(0, V, columns):
        yield slice(start, min(start + columns, V))


def finish_logits_(
    z_CV: Tensor, bias_V: Tensor | None, logit_scale: Tensor | None, softcap: float | None, columns: int
) -> None:
    """Turn ``x @ w.T`` into logits in place: ``softcap * tanh((z + bias) * logit_scale / softcap)``."""
    if bias_V is None and logit_scale is None and softcap is None:
        return
    for part in column_blocks(z_CV.shape[1], columns):
        z = z_CV[:, part]
        if bias_V is not None:
            z.add_(bias_V[part])
        if logit_scale is not None:
            z.mul_(logit_scale)
        if softcap is not None:
            z.div_(softcap).tanh_().mul_(softcap)


def row_stats(z_CV: Tensor, y_C: Tensor, columns: int) -> Tensor:
    """Return each row's logsumexp and the probability that misses its target [2, C].

    1 - p_y is summed over the other classes, so that it keeps its precision where the model is sure. NaN and
    infinities come out as from `torch.log_softmax`.
    """
    highest, t = z_CV.amax(1), z_CV.gather(1, y_C[:, None])
    z_CV.scatter_(1, y_C[:, None], -torch.inf)
    others = torch.zeros_like(highest)
    for part in column_blocks(z_CV.shape[1], columns):
        others += (z_CV[:, part] - highest[:, None]).exp_().sum(1)
    z_CV.scatter_(1, y_C[:, None], t)
    total = others + (t[:, 0] - highest).exp_()
    return torch.stack((highest + total.log(), others / total))


def lse_of_others(z_CV: Tensor, y_C: Tensor, columns: int) -> Tensor:
    """Return the logsumexp of each row's classes but the target [C]; -inf where there is none, or none but -inf."""
    t = z_CV.gather(1, y_C[:, None])
    z_CV.scatter_(1, y_C[:, None], -torch.inf)
    highest = z_CV.amax(1)
    highest = highest.where(highest != -torch.inf, 0)
    others = torch.zeros_like(highest)
    for part in column_blocks(z_CV.shape[1], columns):
        others += (z_CV[:, part] - highest[:, None]).exp_().sum(1)
    z_CV.scatter_(1, y_C[:, None], t)
    return highest + others.log()


def loss_rows(z_CV: Tensor, stats_2C: Tensor, y_C: Tensor, terms: LossTerms) -> Tensor:
    """Return the loss of each row [C]: see `LossTerms`."""
    lse, miss = stats_2C
    nll = torch.where(miss < 0.5, -torch.log1p(-miss), lse - z_CV.gather(1, y_C[:, None])[:, 0])
    weighted_sum = None
    if terms.label_smoothing:
        weighted_sum = z_CV.sum(1) if terms.class_weight is None else z_CV @ terms.class_weight
    return loss_from(nll, lse, weighted_sum, y_C, terms, z_CV.shape[1])


def loss_from(nll: Tensor, lse: Tensor, weighted_sum: Tensor | None, y_C: Tensor, terms: LossTerms, V: int) -> Tensor:
    """Return the loss of each row [C] from ``lse - z_y``, the logsumexp, and with smoothing ``sum_v q_v z_v``."""
    loss = terms.target_share(y_C) * nll
    if weighted_sum is not None:
        each = terms.label_smoothing / terms.classes(V)
        loss = loss + each * (terms.total_class_weight(V) * lse - weighted_sum)
    if terms.z_loss:
        loss += terms.z_loss * lse.square()
    return loss


def loss_gradient_(
    z_CV: Tensor,
    stats_2C: Tensor,
    y_C: Tensor,
    factor_C: Tensor,
    terms: LossTerms,
    logit_scale: Tensor | None,
    softcap: float | None,
    columns: int,
) -> None:
    """Turn logits, in place, into the gradient of ``sum(factor * loss)`` with respect to ``x @ w.T + bias``.

    With p the softmax, m the logit scale and f_v = 1 - (z_v / softcap)**2 (1 without a cap):
    ``factor m f_v (k p_v - (1 - a) q_y [v = y] - (a / V) q_v)`` and ``k = (1 - a) q_y + a Q / V + 2 u lse``.
    The target's entry is built from 1 - p_y, so that nothing cancels where the model is sure.
    """
    V = z_CV.shape[1]
    lse_C, miss_C = stats_2C
    scaled = factor_C if logit_scale is None else factor_C * logit_scale
    share = terms.target_share(y_C) * scaled
    each = terms.label_smoothing / terms.classes(V)
    rest = (each * terms.total_class_weight(V) + 2 * terms.z_loss * lse_C) * scaled
    uniform = each * scaled
    at_target = rest * (1 - miss_C) - share * miss_C
    if terms.label_smoothing:
        at_target -= uniform if terms.class_weight is None else uniform * terms.weight_of(y_C)
    if softcap is not None:
        at_target *= 1 - (z_CV.gather(1, y_C[:, None])[:, 0] / softcap).square_()
    k = (share + rest)[:, None]
    for part in column_blocks(V, columns):
        z = z_CV[:, part]
        slope = None if softcap is None else (z / softcap).square_().neg_().add_(1)
        z.sub_(lse_C[:, None]).exp_().mul_(k)
        if terms.label_smoothing and terms.class_weight is None:
            z.sub_(uniform[:, None])
        elif terms.label_smoothing:
            assert terms.class_weight is not None
            z.addcmul_(uniform[:, None], terms.class_weight[None, part], value=-1)
        if slope is not None:
            z.mul_(slope)
    z_CV.scatter_(1, y_C[:, None], at_target[:, None])
