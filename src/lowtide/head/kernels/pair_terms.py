"""What one class adds to a divergence, and to its gradient by the student's logits.

s and t are the student's and the teacher's probabilities of the class, a and b their logarithms.
"""

import triton
import triton.language as tl

from lowtide.head.kernels.elementary import log1p_near

TINY = tl.constexpr(2.0**-126)  # float32's smallest normal number
NEAR = tl.constexpr(0.5)  # |a - b| below which a side is measured by the other: there the direct terms would cancel


@triton.jit
def _times(p, x):  # type: ignore[no-untyped-def]
    """p x, with 0 inf = 0."""
    return tl.where(p == 0.0, 0.0, p * x)


@triton.jit
def _curve(x):  # type: ignore[no-untyped-def]
    """exp(-x) - 1 + x of |x| < NEAR, by its series."""
    high = 1.0 / 5040.0 - x * (1.0 / 40320.0 - x * (1.0 / 362880.0))
    return x * x * (0.5 - x * (1.0 / 6.0 - x * (1.0 / 24.0 - x * (1.0 / 120.0 - x * (1.0 / 720.0 - x * high)))))


@triton.jit
def _kl_terms(p, q, x):  # type: ignore[no-untyped-def]
    """p x + q - p for x = log p - log q, never negative but for rounding; q and p sum to the same over a row."""
    return tl.where(tl.abs(x) < NEAR, p * _curve(x), _times(p, x) + q - p)


@triton.jit
def _above_mixture(a, b, s, t, beta):  # type: ignore[no-untyped-def]
    """a - log m and b - log m, for m = beta t + (1 - beta) s."""
    m = s + beta * (t - s)
    log_m = tl.log(tl.where(m < TINY, TINY, m))
    x = a - b
    near = tl.abs(x) < NEAR
    of_student = -log1p_near(tl.where(near, beta * (_curve(x) - x), 0.0))  # of m / s - 1
    return tl.where(near, of_student, a - log_m), tl.where(near, of_student - x, b - log_m)


@triton.jit  # type: ignore[untyped-decorator]
def pair_terms(a, b, s, t, beta, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a class adds to the divergence, to its pivot's numerator, and x of the gradient s (x - pivot).

    The gradient is but for a constant: 1 - beta for the jsd, 1/2 for tv. The forward KL's is s - t.
    """
    if KIND == "forward_kl":
        value, c, x = _kl_terms(t, s, b - a), -t, a
    elif KIND == "reverse_kl":
        value, c, x = _kl_terms(s, t, a - b), _times(s, a - b), tl.where(s == 0.0, 0.0, a - b)
    elif KIND == "jsd":
        of_student, of_teacher = _above_mixture(a, b, s, t, beta)
        c, x = _times(s, of_student), tl.where(s == 0.0, 0.0, of_student)
        value = (1.0 - beta) * c + beta * _times(t, of_teacher)
    else:
        x = s - t
        value = 0.5 * tl.abs(x)
        x = tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, x))  # NaN of NaN
        c = s * x
    return value, c, x
