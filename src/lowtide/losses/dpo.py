"""DPO and its variants: losses of the policy's and a reference's log-probabilities of two answers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn.functional import logsigmoid

from lowtide.arguments import check_number
from lowtide.errors import ArgumentValueError, message
from lowtide.losses.checks import bounded_expm1, check_choice, check_floats, check_like, check_positive
from lowtide.losses.reduction import SequenceReduction, reduce_sequences

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")


def dpo_loss(
    chosen_logprob: Tensor,
    rejected_logprob: Tensor,
    ref_chosen_logprob: Tensor,
    ref_rejected_logprob: Tensor,
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    divergence: Divergence = "reverse_kl",
    alpha: float = 0.5,
    tau: float = 0.05,
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
    reduction: SequenceReduction = "mean",
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return a preference loss of the DPO family, one value a pair of answers.

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
        reduction: ``"mean"`` over pairs, ``"sum"``, or ``"none"``: one value a pair [...], for AOT in sorted order.
        num_items: Number of pairs above 0, or 0-d tensor (not inspected), that replaces the mean's denominator.

    Returns:
        Tensor: Scalar, or [...] with "none"; float32, or float64 for float64.

    Raises:
        ArgumentValueError: A shape, device, number or word that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.

    Source (arXiv): DPO, Rafailov et al. 2305.18290; cDPO, Mitchell 2023, "A note on DPO with noisy preferences"; Robust
    DPO, Chowdhury et al. 2403.00409; SLiC-HF, Zhao et al. 2305.10425; RSO, Liu et al. 2309.06657; IPO, Azar et al.
    2310.12036, eq. 17; length-normalised DPO, Lambert et al. 2411.15124; EXO, Ji et al. 2402.00856, eq. 16; NCA, Chen
    et al. 2402.05369; BCO, Jung et al. 2404.04656; SPPO, Wu et al. 2405.00675; APO, D'Oosterlinck et al. 2408.06266,
    eqs. 7 and 8; DiscoPOP, Lu et al. 2406.08414; AOT, Melnyk et al. 2406.05882; f-DPO, Wang et al. 2309.16240.
    """
    check_choice("kind", kind, _KINDS)
    check_choice("divergence", divergence, DIVERGENCES)
    chosen = check_floats("chosen_logprob", chosen_logprob)
    rejected = check_like("rejected_logprob", rejected_logprob, "chosen_logprob", chosen)
    ref_chosen = check_like("ref_chosen_logprob", ref_chosen_logprob, "chosen_logprob", chosen).detach()
    ref_rejected = check_like("ref_rejected_logprob", ref_rejected_logprob, "chosen_logprob", chosen).detach()
    if divergence != "reverse_kl" and kind not in _OF_DIFFERENCE:
        kinds = ", ".join(map(repr, _OF_DIFFERENCE))
        raise ArgumentValueError(
            message("divergence", f"'reverse_kl' with kind={kind!r}", f"{divergence!r}", f"It goes with {kinds}.")
        )
    pairs = _Pairs(
        a=chosen - ref_chosen,
        b=rejected - ref_rejected,
        policy=chosen - rejected,
        reference=ref_chosen - ref_rejected,
        beta=check_positive("beta", beta),
        smoothing=_smoothing(kind, label_smoothing),
        divergence=divergence,
        alpha=check_number("alpha", alpha, -math.inf, math.inf, above=True),
        tau=_tau(tau),
        lengths=_lengths(kind, chosen_length, rejected_length, chosen),
    )
    return reduce_sequences(_KINDS[kind](pairs), reduction, num_items)


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """What a kind's formula is made of, in the letters of `dpo_loss`."""

    a: Tensor
    b: Tensor
    policy: Tensor
    reference: Tensor
    beta: float
    smoothing: float
    divergence: Divergence
    alpha: float
    tau: float
    lengths: tuple[Tensor, Tensor] | None

    def score(self, log_ratio: Tensor) -> Tensor:
        if self.divergence == "forward_kl":
            return -bounded_expm1(-log_ratio)
        if self.divergence == "js":
            return math.log(2) + logsigmoid(log_ratio)
        if self.divergence == "alpha" and self.alpha != 1:
            order = self.alpha - 1
            return bounded_expm1(order * log_ratio) / order
        return log_ratio

    @property
    def margin(self) -> Tensor:
        """beta d."""
        return self.beta * (self.score(self.a) - self.score(self.b))

    @property
    def margin_per_token(self) -> Tensor:
        """s(a)/n_a - s(b)/n_b."""
        assert self.lengths is not None
        n_a, n_b = self.lengths
        return self.score(self.a) / n_a - self.score(self.b) / n_b

    def smoothed(self, margin: Tensor) -> Tensor:
        return -(1 - self.smoothing) * logsigmoid(margin) - self.smoothing * logsigmoid(-margin)


def _robust(p: _Pairs) -> Tensor:
    e, margin = p.smoothing, p.margin
    return (-(1 - e) * logsigmoid(margin) + e * logsigmoid(-margin)) / (1 - 2 * e)


def _exo(p: _Pairs) -> Tensor:
    e, margin = p.smoothing, p.margin
    won = margin.sigmoid() * (logsigmoid(margin) - math.log1p(-e))
    lost = (-margin).sigmoid() * (logsigmoid(-margin) - math.log(e))
    return won + lost


def _nca(p: _Pairs) -> Tensor:
    a, b = p.beta * p.a, p.beta * p.b
    return -logsigmoid(a) - (logsigmoid(-a) + logsigmoid(-b)) / 2


def _discopop(p: _Pairs) -> Tensor:
    margin = p.margin
    mixed = margin / p.tau
    # m exp(-margin) as one exponential: apart, m underflows where exp(-margin) overflows, and 0 * inf is NaN
    return -(-mixed).sigmoid() * logsigmoid(margin) + (logsigmoid(mixed) - margin).exp()


def _aot(p: _Pairs) -> Tensor:
    return p.smoothed(p.beta * _sorted_difference(p.policy, p.reference))


def _aot_unpaired(p: _Pairs) -> Tensor:
    return p.smoothed(p.beta * _sorted_difference(p.a, p.b))


def _sorted_difference(x: Tensor, y: Tensor) -> Tensor:
    return (x.flatten().sort().values - y.flatten().sort().values).view(x.shape)


_KINDS: dict[str, Callable[[_Pairs], Tensor]] = {
    "sigmoid": lambda p: p.smoothed(p.margin),
    "robust": _robust,
    "hinge": lambda p: (1 - p.margin).relu(),
    "ipo": lambda p: (p.margin_per_token - 1 / (2 * p.beta)) ** 2,
    "sigmoid_norm": lambda p: -logsigmoid(p.beta * p.margin_per_token),
    "exo_pair": _exo,
    "nca_pair": _nca,
    "bco_pair": lambda p: -logsigmoid(p.beta * p.a) - logsigmoid(-p.beta * p.b),
    "sppo_hard": lambda p: (p.a - 1 / (2 * p.beta)) ** 2 + (p.b + 1 / (2 * p.beta)) ** 2,
    "apo_zero": lambda p: (-p.beta * p.a).sigmoid() + (p.beta * p.b).sigmoid(),
    "apo_down": lambda p: (p.beta * p.a).sigmoid() + (-p.beta * (p.a - p.b)).sigmoid(),
    "discopop": _discopop,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
}
DPO_KINDS = tuple(_KINDS)
"""The words that `dpo_loss` takes as ``kind``; its docstring has the formula of each."""
_SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")
_OF_DIFFERENCE = ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "exo_pair", "discopop")
_PER_TOKEN = ("ipo", "sigmoid_norm")


def _smoothing(kind: str, label_smoothing: float) -> float:
    e = check_number("label_smoothing", label_smoothing, 0, 0.5)
    if e != 0 and kind not in _SMOOTHED:
        hint = f"It goes with {', '.join(map(repr, _SMOOTHED))}."
        raise ArgumentValueError(message("label_smoothing", f"0 with kind={kind!r}", f"{e!r}", hint))
    if kind == "robust" and e == 0.5:
        raise ArgumentValueError(message("label_smoothing", "a number below 1/2 with kind='robust'", f"{e!r}"))
    if kind == "exo_pair" and e == 0:
        raise ArgumentValueError(
            message("label_smoothing", "a number above 0 with kind='exo_pair'", f"{e!r}", "Its paper takes 1e-3.")
        )
    return e


def _tau(tau: float) -> float:
    if (value := check_positive("tau", tau)) > 1:  # above 1 the loss grows as an exponential of the margin
        raise ArgumentValueError(message("tau", "a number above 0, at most 1", f"{tau!r}"))
    return value


def _lengths(
    kind: str, chosen_length: Tensor | None, rejected_length: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor] | None:
    given = {"chosen_length": chosen_length, "rejected_length": rejected_length}
    if kind not in _PER_TOKEN:
        for name, value in given.items():
            if value is not None:
                raise ArgumentValueError(message(name, f"None with kind={kind!r}", "a tensor"))
        return None
    lengths = []
    for name, value in given.items():
        if value is None:
            hint = "Pass mask.sum(-1)."
            raise ArgumentValueError(message(name, f"tokens of each answer with kind={kind!r}", "None", hint))
        length = value.to(like.dtype) if isinstance(value, Tensor) else value
        lengths.append(check_like(name, length, "chosen_logprob", like).detach().clamp(min=1))
    return lengths[0], lengths[1]
