"""What one class adds to a divergence, and the derivative of it by the student's logit.

s and t are the student's and the teacher's probabilities of the class, a and b their logarithms, x = a - b.
"""

import triton
import triton.language as tl

from lowtide.head.kernels.elementary import log1p_near

TINY = tl.constexpr(2.0**-126)  # float32's smallest normal number
NEAR = tl.constexpr(0.5)  # |x| below which a side is measured by the other: there the direct terms would cancel


@triton.jit
def times(p, x):  # type: ignore[no-untyped-def]
    """p x, with 0 inf = 0."""
    return tl.where(p == 0.0, 0.0, p * x)


@triton.jit
def _curve(x):  # type: ignore[no-untyped-def]
    """exp(-x) - 1 + x of |x| < NEAR, by its series."""
    high = 1.0 / 5040.0 - x * (1.0 / 40320.0 - x * (1.0 / 362880.0))
    return x * x * (0.5 - x * (1.0 / 6.0 - x * (1.0 / 24.0 - x * (1.0 / 120.0 - x * (1.0 / 720.0 - x * high)))))


@triton.jit
def kl_terms(p, q, x):  # type: ignore[no-untyped-def]
    """p x + q - p for x = log p - log q, never negative but for rounding; q and p sum to the same over a row."""
    return tl.where(tl.abs(x) < NEAR, p * _curve(x), times(p, x) + q - p)


@triton.jit
def above_mixture(a, b, s, t, beta):  # type: ignore[no-untyped-def]
    """a - log m and b - log m, for m = beta t + (1 - beta) s."""
    m = s + beta * (t - s)
    log_m = tl.log(tl.where(m < TINY, TINY, m))
    x = a - b
    near = tl.abs(x) < NEAR
    of_student = -log1p_near(tl.where(near, beta * (_curve(x) - x), 0.0))  # of m / s - 1
    return tl.where(near, of_student, a - log_m), tl.where(near, of_student - x, b - log_m)


@triton.jit
def signs(x):  # type: ignore[no-untyped-def]
    """1, 0 or -1, or NaN."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, x))


@triton.jit  # type: ignore[untyped-decorator]
def gradient_terms(a, b, s, t, pivot, beta, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The divergence's derivative by the student's logits, but for a constant: 1 - beta for the jsd, 1/2 for tv."""
    if KIND == "forward_kl":
        g = s - t
    elif KIND == "reverse_kl":
        g = s * (tl.where(s == 0.0, 0.0, a - b) - pivot)
    elif KIND == "jsd":
        of_student, _ = above_mixture(a, b, s, t, beta)
        g = s * (tl.where(s == 0.0, 0.0, of_student) - pivot)
    else:
        g = s * (signs(s - t) - pivot)
    return g
