"""What happens to one chunk of logits between the GEMMs: scale, cap, row sums, and the loss's gradient in their place.

C rows of the chunk, V vocabulary; z logits, t the target's. A row's statistics are lse, the logsumexp, and 1 - p_y.
No function needs a second [C, V]: `softmax_` is one operator on whole rows, what else needs memory beside the logits
takes blocks of rows or columns.
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
    z_CV: Tensor, bias_V: Tensor | None, logit_scale: Tensor | None, softcap: float | Tensor | None, columns: int
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


def softmax_(z_CV: Tensor, y_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits, in place, into probabilities, and 0 at the target.

    Few operators, each over all of the chunk: on a CPU each one wakes all threads, and waits for the last.

    Args:
        z_CV: [C, V], or with more columns of -inf, so that the rows lie one after another.
        y_C: Targets.

    Returns:
        tuple[Tensor, Tensor, Tensor]: logsumexp [C], 1 - p_y [C], summed over the other classes so that it keeps its
        precision where the model is sure, and -log p_y [C]. NaN and infinities come out as from `torch.log_softmax`.
    """
    t = z_CV.gather(1, y_C[:, None])[:, 0]
    highest = z_CV.amax(1)
    torch.ops.aten.softmax.int_out(z_CV, 1, out=z_CV)  # not torch.softmax, which a user may have replaced
    lse = highest - z_CV.amax(1).log()  # the highest logit's probability is 1 / sum
    z_CV.scatter_(1, y_C[:, None], 0)
    miss = z_CV.sum(1)
    return lse, miss, torch.where(miss < 0.5, -torch.log1p(-miss), lse - t)


def loss_from(nll: Tensor, lse: Tensor, weighted_sum: Tensor | None, y_C: Tensor, terms: LossTerms, V: int) -> Tensor:
    """Return the loss of each row [C] from ``lse - z_y``, the logsumexp, and with smoothing ``sum_v q_v z_v``."""
    loss = terms.target_share(y_C) * nll
    if weighted_sum is not None:
        each = terms.label_smoothing / terms.classes(V)
        loss = loss + each * (terms.total_class_weight(V) * lse - weighted_sum)
    if terms.z_loss:
        loss += terms.z_loss * lse.square()
    return loss


def _factors_of_rows(
    lse_C: Tensor, miss_C: Tensor, y_C: Tensor, scaled: Tensor, terms: LossTerms, V: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the gradient of a row is made of, times ``scaled``: k, a / V, and the target's entry without a cap.

    The entry is built from 1 - p_y, so that nothing cancels where the model is sure.
    """
    each = terms.label_smoothing / terms.classes(V)
    share, uniform = terms.target_share(y_C) * scaled, each * scaled
    rest = (each * terms.total_class_weight(V) + 2 * terms.z_loss * lse_C) * scaled
    at_target = rest * (1 - miss_C) - share * miss_C
    if terms.label_smoothing:
        at_target -= uniform if terms.class_weight is None else uniform * terms.weight_of(y_C)
    return share + rest, uniform, at_target


def loss_and_gradient_(
    z_CP: Tensor,
    y_C: Tensor,
    V: int,
    terms: LossTerms,
    bias_V: Tensor | None,
    logit_scale: Tensor | None,
    softcap: float | None,
    *,
    gradient: bool,
) -> Tensor:
    """Turn ``x @ w.T`` of a chunk, in place, into the gradient of each row's loss, and return the losses [C].

    The gradient is with respect to ``(x @ w.T + bias) * logit_scale``: the factor of a row, and the scale, are left to
    the products with ``w`` and ``x``, which are narrower. A soft cap takes the memory of a second [C, V].

    Args:
        z_CP: [C, P] whose first V columns count, P >= V.
        y_C: Targets.
        V: Vocabulary.
        terms: The loss.
        bias_V: As in `finish_logits_`, like the next two.
        logit_scale: See there.
        softcap: See there.
        gradient: Whether it is wanted; else what is left in ``z_CP`` has no meaning.
    """
    z_CV = z_CP[:, :V]
    finish_logits_(z_CV, bias_V, logit_scale, softcap, V)
    z_CP[:, V:] = -torch.inf
    squared = (z_CV / softcap).square_() if gradient and softcap is not None else None
    weighted_sum = None
    if terms.label_smoothing:
        weighted_sum = z_CV.sum(1) if terms.class_weight is None else z_CV @ terms.class_weight
    lse, miss, nll = softmax_(z_CP, y_C)
    loss = loss_from(nll, lse, weighted_sum, y_C, terms, V)
    if not gradient:
        return loss
    k, uniform, at_target = _factors_of_rows(lse, miss, y_C, torch.ones_like(lse), terms, V)
    if terms.class_weight is not None or terms.z_loss:  # else it is 1
        z_CV.mul_(k[:, None])
    if terms.label_smoothing and terms.class_weight is None:
        z_CV.sub_(uniform[:, None])
    elif terms.class_weight is not None and terms.label_smoothing:
        z_CV.addcmul_(uniform[:, None], terms.class_weight[None], value=-1)
    if squared is not None:
        at_target = at_target * (1 - squared.gather(1, y_C[:, None])[:, 0])
        z_CV.addcmul_(z_CV, squared, value=-1)
    z_CV.scatter_(1, y_C[:, None], at_target[:, None])
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
    """
    V = z_CV.shape[1]
    lse_C, miss_C = stats_2C
    scaled = factor_C if logit_scale is None else factor_C * logit_scale
    k, uniform, at_target = _factors_of_rows(lse_C, miss_C, y_C, scaled, terms, V)
    if softcap is not None:
        at_target *= 1 - (z_CV.gather(1, y_C[:, None])[:, 0] / softcap).square_()
    for part in column_blocks(V, columns):
        z = z_CV[:, part]
        slope = None if softcap is None else (z / softcap).square_().neg_().add_(1)
        z.sub_(lse_C[:, None]).exp_().mul_(k[:, None])
        if terms.label_smoothing and terms.class_weight is None:
            z.sub_(uniform[:, None])
        elif terms.label_smoothing:
            assert terms.class_weight is not None
            z.addcmul_(uniform[:, None], terms.class_weight[None, part], value=-1)
        if slope is not None:
            z.mul_(slope)
    z_CV.scatter_(1, y_C[:, None], at_target[:, None])
