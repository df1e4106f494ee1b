"""Exact values of closed and polynomial expressions, with every size bounded.

A `Value` is a quotient of two polynomials with rational coefficients. The letters of a polynomial are variables, π, e,
i and ∞, real roots of integers (√2, ∛5) and opaque functions (cot x). Only true identities are used to simplify
(i² = −1, √a·√b = √ab with squares drawn out), so equal representations always mean equal values; some equal values
with nested radicals are not recognised, which costs an honest answer its score but never pays a wrong one.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from math import comb, factorial, gcd, isqrt

from gropius.rewards.answers.errors import TOO_LARGE, UNPARSABLE, AnswerError

Monomial = tuple[tuple[str, int], ...]
Poly = dict[Monomial, Fraction]

MAX_BITS = 4096
MAX_TERMS = 200
MAX_EXPONENT = 1000
MAX_RADICAND = 10**12
MAX_FACTORIAL = 200
ONE: Monomial = ()


@dataclass(frozen=True)
class Value:
    """num / den, both polynomials; den is never the zero polynomial. Compare with `same`, never with ==."""

    num: Poly
    den: Poly


def number(x: Fraction | int) -> Value:
    """A rational number as a value."""
    x = Fraction(x)
    _check_size(x)
    return Value({ONE: x} if x else {}, {ONE: Fraction(1)})


def letter(name: str) -> Value:
    """A variable or a constant kept by name: "x", "π", "e", "i", "∞", or an opaque function such as "cot(x)"."""
    return Value({((name, 1),): Fraction(1)}, {ONE: Fraction(1)})


def add(a: Value, b: Value) -> Value:
    """a + b."""
    if a.den == b.den:
        return Value(_plus(a.num, b.num), a.den)
    return Value(_plus(_times(a.num, b.den), _times(b.num, a.den)), _times(a.den, b.den))


def negate(a: Value) -> Value:
    """−a."""
    return Value({m: -c for m, c in a.num.items()}, a.den)


def multiply(a: Value, b: Value) -> Value:
    """a · b."""
    return Value(_times(a.num, b.num), _times(a.den, b.den))


def divide(a: Value, b: Value) -> Value:
    """a / b; a division by zero cannot be read as an answer."""
    if not b.num:
        raise AnswerError(UNPARSABLE)
    if len(b.num) == 1:
        return multiply(multiply(a, Value(b.den, {ONE: Fraction(1)})), _inverse_of_term(b.num))
    return Value(_times(a.num, b.den), _times(a.den, b.num))


def power(base: Value, exponent: Value) -> Value:
    """base ** exponent; integer and rational exponents are worked out within the limits, others stay opaque."""
    e = rational(exponent)
    if e is None:
        return letter(f"pow({key(base)};{key(exponent)})")
    if abs(e.numerator) > MAX_EXPONENT or e.denominator > 12:
        raise AnswerError(TOO_LARGE)
    raised = _integer_power(base, e.numerator)
    return raised if e.denominator == 1 else root(raised, e.denominator)


def root(a: Value, k: int = 2) -> Value:
    """The real k-th root (k ≥ 2); √ of a negative number is imaginary, an odd root of one is negative."""
    if k < 2 or k > 12:
        raise AnswerError(UNPARSABLE)
    x = rational(a)
    if x is None:
        return letter(f"root{k}({key(a)})")
    if x == 0:
        return a
    if x < 0:
        positive = root(number(-x), k)
        if k % 2:
            return negate(positive)
        if k == 2:
            return multiply(positive, letter("i"))
        raise AnswerError(UNPARSABLE)
    radicand = x.numerator * x.denominator ** (k - 1)
    outside, k_left, inside = _draw_out(radicand, k)
    coefficient = Fraction(outside, x.denominator)
    name = ((f"√{k_left}|{inside}", 1),) if inside > 1 else ONE
    return Value({name: coefficient}, {ONE: Fraction(1)})


def factorial_of(a: Value) -> Value:
    """a! of a small non-negative integer."""
    x = rational(a)
    if x is None or x.denominator != 1 or x < 0:
        raise AnswerError(UNPARSABLE)
    if x > MAX_FACTORIAL:
        raise AnswerError(TOO_LARGE)
    return number(factorial(x.numerator))


def binomial(n: Value, k: Value) -> Value:
    """n choose k of small non-negative integers."""
    a, b = rational(n), rational(k)
    if a is None or b is None or a.denominator != 1 or b.denominator != 1 or a < 0 or b < 0:
        raise AnswerError(UNPARSABLE)
    if a > MAX_EXPONENT:
        raise AnswerError(TOO_LARGE)
    return number(comb(a.numerator, b.numerator))


def rational(a: Value) -> Fraction | None:
    """The rational number that `a` is, or None."""
    if not a.num:
        return Fraction(0)
    if set(a.num) == {ONE} and set(a.den) == {ONE}:
        return a.num[ONE] / a.den[ONE]
    return None


def same(a: Value, b: Value) -> bool:
    """True when a = b by the identities above: a.num · b.den = b.num · a.den as polynomials."""
    return _times(a.num, b.den) == _times(b.num, a.den)


def proportional(a: Value, b: Value) -> bool:
    """True when a = c · b for a rational c ≠ 0 (two equations a = 0 and b = 0 that say the same)."""
    left, right = _times(a.num, b.den), _times(b.num, a.den)
    if not left or not right or set(left) != set(right):
        return False
    first = next(iter(left))
    ratio = left[first] / right[first]
    return all(c == ratio * right[m] for m, c in left.items())


def letters(a: Value) -> set[str]:
    """The variables (not constants, not roots) that occur in `a`."""
    names = {name for poly in (a.num, a.den) for monomial in poly for name, _ in monomial}
    return {n for n in names if n not in ("π", "e", "i", "∞") and not n.startswith("√")}


def key(a: Value) -> str:
    """A spelling (a digest when long) that is the same for values with the same normalised representation."""
    lead = a.den[min(a.den)]
    parts = []
    for poly in (a.num, a.den):
        parts.append("+".join(f"{c / lead}{m}" for m, c in sorted(poly.items())))
    spelled = "/".join(parts)
    return spelled if len(spelled) <= 100 else sha256(spelled.encode()).hexdigest()  # nested keys must not grow


def _check_size(x: Fraction) -> None:
    if x.numerator.bit_length() > MAX_BITS or x.denominator.bit_length() > MAX_BITS:
        raise AnswerError(TOO_LARGE)


def _plus(a: Poly, b: Poly) -> Poly:
    out = dict(a)
    for monomial, c in b.items():
        total = out.get(monomial, Fraction(0)) + c
        if total:
            out[monomial] = total
        else:
            out.pop(monomial, None)
    _check_poly(out)
    return out


def _times(a: Poly, b: Poly) -> Poly:
    if len(a) * len(b) > 20 * MAX_TERMS:
        raise AnswerError(TOO_LARGE)
    out: Poly = {}
    for ma, ca in a.items():
        for mb, cb in b.items():
            monomial, factor = _join(ma, mb)
            total = out.get(monomial, Fraction(0)) + ca * cb * factor
            if total:
                out[monomial] = total
            else:
                out.pop(monomial, None)
    _check_poly(out)
    return out


def _check_poly(poly: Poly) -> None:
    if len(poly) > MAX_TERMS:
        raise AnswerError(TOO_LARGE)
    for c in poly.values():
        _check_size(c)


def _join(a: Monomial, b: Monomial) -> tuple[Monomial, Fraction]:
    """The product of two monomials and the rational factor that falls out (i² = −1, √2·√6 = 2√3)."""
    if not a or not b:
        return a or b, Fraction(1)
    powers: dict[str, int] = dict(a)
    for name, e in b:
        powers[name] = powers.get(name, 0) + e
    factor = Fraction(1)
    if powers.get("i", 0) > 1:
        if powers["i"] // 2 % 2:
            factor = -factor
        powers["i"] %= 2
    roots: dict[int, int] = {}
    for name in [n for n in powers if n.startswith("√")]:
        index, radicand = (int(part) for part in name[1:].split("|"))
        roots[index] = roots.get(index, 1) * radicand ** powers.pop(name)
    for k, n in roots.items():
        outside, k_left, inside = _draw_out(n, k)
        factor *= outside
        if inside > 1:
            name = f"√{k_left}|{inside}"
            powers[name] = powers.get(name, 0) + 1
    if any(e > MAX_EXPONENT for e in powers.values()):
        raise AnswerError(TOO_LARGE)
    return tuple(sorted((n, e) for n, e in powers.items() if e)), factor


def _inverse_of_term(poly: Poly) -> Value:
    """1 / (c · letters · roots) with roots and i moved out of the denominator."""
    ((monomial, c),) = poly.items()
    top: Value = number(1 / c)
    below: list[tuple[str, int]] = []
    for name, e in monomial:
        if name == "i":
            top = multiply(top, negate(letter("i")))
        elif name.startswith("√"):
            k, n = (int(part) for part in name[1:].split("|"))
            top = multiply(top, multiply(_integer_power(letter(name), e * (k - 1)), number(Fraction(1, n**e))))
        else:
            below.append((name, e))
    return Value(top.num, {tuple(below): Fraction(1)})


def _integer_power(base: Value, e: int) -> Value:
    if e < 0:
        return divide(number(1), _integer_power(base, -e))
    x = rational(base)
    if x is not None:
        if max(x.numerator.bit_length(), x.denominator.bit_length()) * e > MAX_BITS and abs(x) != 1 and x != 0:
            raise AnswerError(TOO_LARGE)
        return number(x**e)
    if e > 64 and len(base.num) + len(base.den) > 2:
        raise AnswerError(TOO_LARGE)
    result, square = number(1), base
    while e:
        if e & 1:
            result = multiply(result, square)
        e >>= 1
        if e:
            square = multiply(square, square)
    return result


def _draw_out(n: int, k: int) -> tuple[int, int, int]:
    """(a, j, b) with the k-th root of n equal to a times the j-th root of b, b free of j-th powers."""
    if n > MAX_RADICAND:
        raise AnswerError(TOO_LARGE)
    exponents: dict[int, int] = {}
    rest, p = n, 2
    while p * p * p <= rest:
        while rest % p == 0:
            exponents[p] = exponents.get(p, 0) + 1
            rest //= p
        p += 1
    if rest > 1:  # one prime, its square, or two different primes (which may stay together: neither can be drawn out)
        side = isqrt(rest)
        if side * side == rest:
            exponents[side] = exponents.get(side, 0) + 2
        else:
            exponents[rest] = exponents.get(rest, 0) + 1
    outside = inside = 1
    left = {}
    for p, e in exponents.items():
        outside *= p ** (e // k)
        if e % k:
            left[p] = e % k
    shared = gcd(k, *left.values()) if left else k
    for p, e in left.items():
        inside *= p ** (e // shared)
    return outside, k // shared, inside
