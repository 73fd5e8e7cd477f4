"""Elementary functions of float32 numbers with full relative precision where the obvious formula cancels."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """tanh(x): its series near 0, where 1 - exp(-2|x|) would cancel."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    xx = x * x
    near = x * (1.0 + xx * (-1.0 / 3.0 + xx * (2.0 / 15.0 - xx * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0.0, -far, far))


@triton.jit
def log1p_near(r):  # type: ignore[no-untyped-def]
    """log(1 + r) of r from -1/2 to 1 as 2 atanh(r / (2 + r)), to the last bits also where r is 1e-7."""
    s = r / (2.0 + r)
    ss = s * s
    high = 1.0 / 9.0 + ss * (1.0 / 11.0 + ss * (1.0 / 13.0 + ss * (1.0 / 15.0 + ss * (1.0 / 17.0))))
    return 2.0 * s * (1.0 + ss * (1.0 / 3.0 + ss * (1.0 / 5.0 + ss * (1.0 / 7.0 + ss * high))))


@triton.jit
def log1p(r):  # type: ignore[no-untyped-def]
    """log(1 + r) of r >= -1/2."""
    return tl.where(r <= 1.0, log1p_near(r), tl.log(1.0 + r))


@triton.jit
def expm1(x):  # type: ignore[no-untyped-def]
    """exp(x) - 1 of x <= 0 (Kahan)."""
    u = tl.exp(x)
    far = x < -20.0  # further on u is subnormal, and its logarithm is not x
    near = (u == 1.0) | far
    return tl.where(near, tl.where(far, -1.0, x), (u - 1.0) * (x / tl.where(near, 1.0, tl.log(u))))
