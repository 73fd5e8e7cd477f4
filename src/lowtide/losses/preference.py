"""Preference losses: DPO's family, those without a reference model (SimPO, ORPO, CPO), and KTO, of single answers."""

import math
from typing import Literal, Unpack, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lowtide.arguments import check_name, check_number, scalar_tensor
from lowtide.errors import ArgumentValueError, message
from lowtide.head.options import Reduction
from lowtide.losses.reduction import (
    NumItems,
    SequenceReductionOptions,
    bounded_expm1,
    check_alike,
    check_bool,
    check_floats,
    check_like,
    check_not_negative,
    check_place,
    check_positive,
    reduce_sequences,
)

DPOKind = Literal[
    "sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
    "apo_down", "discopop", "aot", "aot_unpaired",
]  # fmt: skip
DPO_KINDS = get_args(DPOKind)
"""The words that `dpo_loss` takes as ``kind``; its docstring has the formula of each."""
Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
KTOKind = Literal["kto", "apo_zero"]


def dpo_loss(
    chosen_logprob: Tensor,
    rejected_logprob: Tensor,
    ref_chosen_logprob: Tensor,
    ref_rejected_logprob: Tensor,
    *,
    kind: DPOKind = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    divergence: Divergence = "reverse_kl",
    alpha: float = 0.5,
    tau: float = 0.05,
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
    reduction: Reduction = "mean",
    num_items: NumItems = None,
) -> Tensor:
    """Return a preference loss of the DPO family, one value per pair of answers.

    With the log-ratios a = ``chosen_logprob - ref_chosen_logprob`` and b = ``rejected_logprob - ref_rejected_logprob``,
    S the logistic function, the score s of the divergence (below), d = s(a) - s(b), and e = ``label_smoothing``:

        "sigmoid"        -(1-e) log S(beta d) - e log S(-beta d)                    DPO; with e > 0 cDPO
        "robust"         (-(1-e) log S(beta d) + e log S(-beta d)) / (1-2e)         Robust DPO
        "hinge"          max(0, 1 - beta d)                                         SLiC-HF, RSO
        "ipo"            (s(a)/n_a - s(b)/n_b - 1 / (2 beta))^2                     IPO
        "sigmoid_norm"   -log S(beta (s(a)/n_a - s(b)/n_b))                         length-normalised DPO
        "exo_pair"       S(beta d) (log S(beta d) - log(1-e))
                         + S(-beta d) (log S(-beta d) - log e)                      EXO
        "nca_pair"       -log S(beta a) - (log S(-beta a) + log S(-beta b)) / 2     NCA
        "bco_pair"       -log S(beta a) - log S(-beta b)                            BCO with delta = 0
        "sppo_hard"      (a - 1 / (2 beta))^2 + (b + 1 / (2 beta))^2                SPPO with P = 1 and 0
        "apo_zero"       1 - S(beta a) + S(beta b)                                  APO
        "apo_down"       S(beta a) + 1 - S(beta (a - b))                            APO
        "discopop"       -(1-m) log S(beta d) + m exp(-beta d), m = S(beta d / tau) DiscoPOP
        "aot"            "sigmoid" with beta (sort(a - b + r)_i - sort(r)_i) in place of beta d, where
                         r = ref_chosen_logprob - ref_rejected_logprob              AOT, paired
        "aot_unpaired"   "sigmoid" with beta (sort(a)_i - sort(b)_i)                AOT, unpaired

    The scores, with t = exp(log-ratio), are f'(t) of the divergence that holds the policy near the reference (f-DPO):

        "reverse_kl"    log t               "js"        log(2 t / (1 + t))
        "forward_kl"    1 - 1 / t           "alpha"     (t^(alpha-1) - 1) / (alpha - 1); log t where alpha is 1

    1 / t and t^(alpha-1) are held at e^80, where float32 would overflow.

    Args:
        chosen_logprob: Log-probability of each preferred answer [...], summed over its tokens (`sequence_logprobs`).
        rejected_logprob: That of the other answer [...].
        ref_chosen_logprob: The reference model's for the preferred answer [...], not differentiated.
        ref_rejected_logprob: The reference model's for the other answer [...], not differentiated.
        kind: One of the words above.
        beta: Above 0: how hard the policy is held to the reference (IPO's tau; SPPO's 1 / eta).
        label_smoothing: Probability that a pair is labelled the wrong way round, from 0 to 1/2, below 1/2 for "robust";
            above 0 for "exo_pair" (its paper: 1e-3). Only with "sigmoid", "robust", "exo_pair" and the two AOT.
        divergence: One of the four scores; another than "reverse_kl" only where the loss is one of d.
        alpha: Order of the alpha divergence; read with ``divergence="alpha"`` alone.
        tau: DiscoPOP's temperature, above 0, at most 1; read with ``kind="discopop"`` alone.
        chosen_length: Number of tokens n_a of each preferred answer [...], 0 counting as 1; for "ipo" and
            "sigmoid_norm" alone, which need both. (IPO's authors mean averages over tokens.)
        rejected_length: Number of tokens n_b of the other answer [...].
        reduction: ``"mean"`` over pairs, ``"sum"``, or ``"none"``: one value per pair [...], for AOT in sorted order.
        num_items: Number of pairs above 0, or 0-d tensor (not inspected), that replaces the mean's denominator.

    Returns:
        Tensor: Scalar, or [...] with "none"; float32, or float64 for float64.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source (arXiv): DPO, Rafailov et al. 2305.18290; cDPO, Mitchell 2023, "A note on DPO with noisy preferences"; Robust
    DPO, Chowdhury et al. 2403.00409; SLiC-HF, Zhao et al. 2305.10425; RSO, Liu et al. 2309.06657; IPO, Azar et al.
    2310.12036, eq. 17; length-normalised DPO, Lambert et al. 2411.15124; EXO, Ji et al. 2402.00856, eq. 16; NCA, Chen
    et al. 2402.05369; BCO, Jung et al. 2404.04656; SPPO, Wu et al. 2405.00675; APO, D'Oosterlinck et al. 2408.06266,
    eqs. 7 and 8; DiscoPOP, Lu et al. 2406.08414; AOT, Melnyk et al. 2406.05882; f-DPO, Wang et al. 2309.16240.
    """
    check_name("kind", kind, DPO_KINDS)
    check_name("divergence", divergence, get_args(Divergence))
    chosen, rejected, *refs = check_alike(
        chosen_logprob=chosen_logprob, rejected_logprob=rejected_logprob,
        ref_chosen_logprob=ref_chosen_logprob, ref_rejected_logprob=ref_rejected_logprob,
    )  # fmt: skip
    ref_chosen, ref_rejected = (ref.detach() for ref in refs)
    if divergence != "reverse_kl" and kind not in _OF_DIFFERENCE:
        hint = f"It goes with {', '.join(map(repr, _OF_DIFFERENCE))}."
        raise ArgumentValueError(message("divergence", f"'reverse_kl' with kind={kind!r}", f"{divergence!r}", hint))
    beta, e = check_positive("beta", beta), _smoothing(kind, label_smoothing)
    alpha = check_number("alpha", alpha, -math.inf, math.inf, above=True)
    if check_positive("tau", tau) > 1:  # above 1 the loss grows as an exponential of the margin
        raise ArgumentValueError(message("tau", "a number above 0, at most 1", f"{tau!r}"))
    lengths = _lengths(kind, {"chosen_length": chosen_length, "rejected_length": rejected_length}, chosen)
    a, b = chosen - ref_chosen, rejected - ref_rejected
    if kind in ("aot", "aot_unpaired"):
        x, y = (chosen - rejected, ref_chosen - ref_rejected) if kind == "aot" else (a, b)
        d = (x.flatten().sort().values - y.flatten().sort().values).view(x.shape)
    else:
        x, y = _score(a, divergence, alpha), _score(b, divergence, alpha)
        d = x / lengths[0] - y / lengths[1] if lengths else x - y
    return reduce_sequences(_pair_loss(kind, a, b, d, beta, e, tau), reduction=reduction, num_items=num_items)


def simpo_loss(
    chosen_mean_logprob: Tensor,
    rejected_mean_logprob: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    **reduce: Unpack[SequenceReductionOptions],
) -> Tensor:
    """Return SimPO's loss: the answers' mean log-probabilities are the rewards, without a reference model.

    With m = beta (mean log p(chosen) - mean log p(rejected)) - gamma and e = ``label_smoothing``:

        -(1 - e) log sigmoid(m) - e log sigmoid(-m)

    Args:
        chosen_mean_logprob: Mean log-probability of the tokens of each preferred answer [...]:
            ``sequence_logprobs(logprob, mask, average=True)``.
        rejected_mean_logprob: That of the other answer [...].
        beta: Scale of the rewards, above 0.
        gamma: Margin by which the preferred answer's reward should exceed the other's, 0 or above. The defaults are the
            paper's for Llama-3-Base; it takes beta from 2 to 2.5 and gamma from 0.3 to 1.6.
        label_smoothing: Probability that a pair is labelled the wrong way round, from 0 to 1/2.
        reduce: ``reduction`` and ``num_items`` of `dpo_loss`, which also describes the result.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Meng et al. 2024, "SimPO: Simple Preference Optimization with a Reference-Free Reward", arXiv 2405.14734.
    """
    chosen, rejected = check_alike(chosen_mean_logprob=chosen_mean_logprob, rejected_mean_logprob=rejected_mean_logprob)
    margin = check_positive("beta", beta) * (chosen - rejected) - check_not_negative("gamma", gamma)
    e = check_number("label_smoothing", label_smoothing, 0, 0.5)
    return reduce_sequences(_weighed(margin, 1 - e, e), **reduce)


def cpo_loss(
    chosen_logprob: Tensor,
    rejected_logprob: Tensor,
    chosen_nll: Tensor | None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    **reduce: Unpack[SequenceReductionOptions],
) -> Tensor:
    """Return CPO's loss: DPO with a uniform reference, and the preferred answer's negative log-likelihood.

    With m = beta (log p(chosen) - log p(rejected)) and e = ``label_smoothing``:

        -(1 - e) log sigmoid(m) - e log sigmoid(-m) + chosen_nll

    Args:
        chosen_logprob: Log-probability of each preferred answer [...], summed over its tokens.
        rejected_logprob: That of the other answer [...].
        chosen_nll: What is added, times its weight: one value per pair [...], such as
            ``-sequence_logprobs(logprob, mask, average=True)``, or a 0-d tensor, such as `sft_loss`'s mean over the
            tokens of all preferred answers, which counts once in a mean. None: the preference alone.
        beta: Scale of the difference, above 0.
        label_smoothing: Probability that a pair is labelled the wrong way round, from 0 to 1/2.
        reduce: ``reduction`` and ``num_items`` of `dpo_loss`, which also describes the result.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Xu et al. 2024, "Contrastive Preference Optimization", arXiv 2401.08417.
    """
    chosen, rejected = check_alike(chosen_logprob=chosen_logprob, rejected_logprob=rejected_logprob)
    margin = check_positive("beta", beta) * (chosen - rejected)
    e = check_number("label_smoothing", label_smoothing, 0, 0.5)
    return _with_nll(_weighed(margin, 1 - e, e), chosen_nll, chosen, **reduce)


def orpo_loss(
    chosen_mean_logprob: Tensor,
    rejected_mean_logprob: Tensor,
    chosen_nll: Tensor | None = None,
    *,
    beta: float = 0.1,
    **reduce: Unpack[SequenceReductionOptions],
) -> Tensor:
    """Return ORPO's loss: the preferred answer's negative log-likelihood, and the log of the odds ratio.

    With p the geometric mean of an answer's token probabilities and odds(p) = p / (1 - p):

        chosen_nll - beta log sigmoid(log odds(p_chosen) - log odds(p_rejected))

    log(1 - p) is computed as log(-expm1(log p)). Where p rounds to 1 in float32 (log p above -1e-19), the odds are
    those of log p = -1e-19 and have no gradient.

    Args:
        chosen_mean_logprob: log p, at most 0, of each preferred answer [...], as in `simpo_loss`.
        rejected_mean_logprob: That of the other answer [...].
        chosen_nll: Negative log-likelihood of the preferred answer, a tensor as in `cpo_loss`. None:
            ``-chosen_mean_logprob``, as in the paper.
        beta: The paper's lambda, above 0.
        reduce: ``reduction`` and ``num_items`` of `dpo_loss`, which also describes the result.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Hong et al. 2024, "ORPO: Monolithic Preference Optimization without Reference Model", arXiv 2403.07691.
    """
    chosen, rejected = check_alike(chosen_mean_logprob=chosen_mean_logprob, rejected_mean_logprob=rejected_mean_logprob)
    loss = -check_positive("beta", beta) * logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    return _with_nll(loss, -chosen if chosen_nll is None else chosen_nll, chosen, **reduce)


def kto_loss(
    logprob: Tensor,
    ref_logprob: Tensor,
    desirable: Tensor,
    kl: float | Tensor,
    *,
    kind: KTOKind = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    **reduce: Unpack[SequenceReductionOptions],
) -> Tensor:
    """Return KTO's loss of single answers, each good or bad; no pairs are needed.

    With a = ``logprob - ref_logprob`` and w the weight of the answer's side:

        "kto"        w (1 - sigmoid(beta (a - kl))) where desirable, else w (1 - sigmoid(beta (kl - a)))
        "apo_zero"   the same with kl = 0: APO-zero (arXiv 2408.06266, eq. 7) of single answers

    Args:
        logprob: Log-probability of each answer [...], summed over its tokens.
        ref_logprob: The reference model's [...], not differentiated.
        desirable: bool or integers [...], not 0 where the answer is a good one.
        kl: Number or 0-d tensor, not differentiated and not inspected: what `kto_reference` returns, averaged over
            ranks where there are several. 0 for "apo_zero", which does without.
        kind: ``"kto"`` or ``"apo_zero"``.
        beta: How hard the policy is held to the reference, above 0.
        desirable_weight: w of good answers, 0 or above. The paper keeps the ratio of both sides, number times weight,
            between 1 and 4/3 (its eq. 8).
        undesirable_weight: w of bad answers, 0 or above.
        reduce: ``reduction`` and ``num_items`` of `dpo_loss`, here of answers, not pairs; it also describes the result.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv 2402.01306.
    """
    check_name("kind", kind, get_args(KTOKind))
    logprob, ref = check_alike(logprob=logprob, ref_logprob=ref_logprob)
    log_ratio = logprob - ref.detach()
    desirable = check_bool("desirable", desirable, "logprob", logprob)
    reference = scalar_tensor("kl", kl, logprob.dtype).detach().to(logprob.dtype)
    if kind == "apo_zero" and (isinstance(kl, Tensor) or kl != 0):
        raise ArgumentValueError(message("kl", "0 with kind='apo_zero'", "a tensor" if isinstance(kl, Tensor) else kl))
    gain = check_positive("beta", beta) * (log_ratio - reference)
    good = check_not_negative("desirable_weight", desirable_weight) * (-gain).sigmoid()
    bad = check_not_negative("undesirable_weight", undesirable_weight) * gain.sigmoid()
    return reduce_sequences(good.where(desirable, bad), **reduce)


def kto_reference(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Return KTO's reference point: how far the policy is from the reference on answers that do not belong.

        kl = max(0, mean(logprob - ref_logprob))

    over answers paired with another example's prompt. With several ranks, average the mean before the maximum:
    ``kto_reference`` of all ranks' log-probabilities, gathered.

    Args:
        logprob: The policy's log-probability of each mismatched answer [...], summed over its tokens.
        ref_logprob: The reference model's [...].

    Returns:
        Tensor: 0-d, not differentiated; 0 where there are no answers.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: as `kto_loss`.
    """
    logprob, ref = check_alike(logprob=logprob, ref_logprob=ref_logprob)
    log_ratio = (logprob - ref).detach()
    return (log_ratio.sum() / max(log_ratio.numel(), 1)).clamp(min=0)


def _log_odds(logprob: Tensor) -> Tensor:
    nearly_one = -(torch.finfo(logprob.dtype).tiny ** 0.5)  # its odds' gradient, its inverse, still is finite
    logprob = logprob.clamp(max=nearly_one)
    return logprob - (-logprob.expm1()).log()


def _with_nll(loss: Tensor, nll: Tensor | None, like: Tensor, **reduce: Unpack[SequenceReductionOptions]) -> Tensor:
    if nll is not None:
        nll = check_floats("chosen_nll", nll)
        loss = loss + (nll if nll.dim() == 0 else check_place("chosen_nll", nll, "the log-probabilities", like))
    return reduce_sequences(loss, **reduce)


def _smoothing(kind: str, label_smoothing: float) -> float:
    e = check_number("label_smoothing", label_smoothing, 0, 0.5)
    expected, hint = "", ""
    if e != 0 and kind not in _SMOOTHED:
        expected, hint = f"0 with kind={kind!r}", f"It goes with {', '.join(map(repr, _SMOOTHED))}."
    elif kind == "robust" and e == 0.5:
        expected = "a number below 1/2 with kind='robust'"
    elif kind == "exo_pair" and e == 0:
        expected, hint = "a number above 0 with kind='exo_pair'", "Its paper takes 1e-3."
    if expected:
        raise ArgumentValueError(message("label_smoothing", expected, f"{e!r}", hint))
    return e


def _lengths(kind: str, given: dict[str, Tensor | None], like: Tensor) -> list[Tensor]:
    """Return n_a and n_b where a kind divides by them, else nothing."""
    lengths = []
    for name, value in given.items():
        if kind not in _PER_TOKEN:
            if value is not None:
                raise ArgumentValueError(message(name, f"None with kind={kind!r}", "a tensor"))
            continue
        if value is None:
            hint = "Pass mask.sum(-1)."
            raise ArgumentValueError(message(name, f"tokens of each answer with kind={kind!r}", "None", hint))
        length = value.to(like.dtype) if isinstance(value, Tensor) else value
        lengths.append(check_like(name, length, "chosen_logprob", like).detach().clamp(min=1))
    return lengths


def _score(log_ratio: Tensor, divergence: Divergence, alpha: float) -> Tensor:
    if divergence == "forward_kl":
        return -bounded_expm1(-log_ratio)
    if divergence == "js":
        return math.log(2) + logsigmoid(log_ratio)
    if divergence == "alpha" and alpha != 1:
        return bounded_expm1((alpha - 1) * log_ratio) / (alpha - 1)
    return log_ratio


def _weighed(margin: Tensor, won: float, lost: float) -> Tensor:
    return -won * logsigmoid(margin) - lost * logsigmoid(-margin)


def _pair_loss(kind: DPOKind, a: Tensor, b: Tensor, d: Tensor, beta: float, e: float, tau: float) -> Tensor:
    """Return a kind's formula, in the letters of `dpo_loss`; d also per token, or sorted."""
    margin = beta * d
    match kind:
        case "robust":
            loss = _weighed(margin, 1 - e, -e) / (1 - 2 * e)
        case "hinge":
            loss = (1 - margin).relu()
        case "ipo":
            loss = (d - 1 / (2 * beta)) ** 2
        case "exo_pair":
            won = margin.sigmoid() * (logsigmoid(margin) - math.log1p(-e))
            loss = won + (-margin).sigmoid() * (logsigmoid(-margin) - math.log(e))
        case "nca_pair":
            loss = -logsigmoid(beta * a) - (logsigmoid(-beta * a) + logsigmoid(-beta * b)) / 2
        case "bco_pair":
            loss = -logsigmoid(beta * a) - logsigmoid(-beta * b)
        case "sppo_hard":
            loss = (a - 1 / (2 * beta)) ** 2 + (b + 1 / (2 * beta)) ** 2
        case "apo_zero":
            loss = (-beta * a).sigmoid() + (beta * b).sigmoid()
        case "apo_down":
            loss = (beta * a).sigmoid() + (-margin).sigmoid()
        case "discopop":
            mixed = margin / tau
            # m exp(-margin) as one exponential: apart, m underflows where exp(-margin) overflows, and 0 * inf is NaN
            loss = -(-mixed).sigmoid() * logsigmoid(margin) + (logsigmoid(mixed) - margin).exp()
        case _:  # "sigmoid" and "sigmoid_norm", and the two AOT
            loss = _weighed(margin, 1 - e, e)
    return loss


_SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")
_OF_DIFFERENCE = ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "exo_pair", "discopop")
_PER_TOKEN = ("ipo", "sigmoid_norm")
