"""The grammar of one expression: a recursive descent over the characters of the plain spelling.

    sum      := ['+'|'-'] product (('+'|'-'|'±') product)*
    product  := power (('*'|'/'|nothing) power)*
    power    := atom '!'* ['^' exponent]
    atom     := number | letter | constant | function argument | \\frac A B | \\sqrt[k] A
                | '(' sum ')' | '{' sum '}' | '|' sum '|'

Length, nesting and every intermediate number are limited, so the work is bounded before it starts.
"""

from __future__ import annotations

import re
from fractions import Fraction

from gropius.rewards.answers.answer import POWER_OF_TEN, Expression
from gropius.rewards.answers.errors import TOO_LARGE, UNPARSABLE, AnswerError
from gropius.rewards.answers.expressions import absolute, lift, over, pair, plus, times
from gropius.rewards.answers.values import binomial, factorial_of, key, letter, negate, number, power, rational, root

MAX_DEPTH = 60
MAX_DIGITS = 400
FUNCTIONS: tuple[str, ...] = ("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot")
FUNCTIONS += ("sec", "csc", "log", "ln", "lg", "exp")
CONSTANTS = {"pi": "π", "infty": "∞", "infinity": "∞"}
_NUMBER = re.compile(r"(?:\d+\.\d+|\d+\.?(?![.\d])|\d+|\.\d+)(?:[eE][+-]?\d{1,4}(?![\d.]))?")
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?")
_MIXED = re.compile(
    r"\s*(?:\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|\\frac\s*(\d)\s*(\d)(?!\d)|(?<=\s)(\d+)\s*/\s*(\d+))"
)


class Parser:
    """Reads one plain spelling. `bracketed` counts open brackets: inside them a comma never groups digits."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.bracketed = 0

    # characters

    def space(self) -> None:
        """Skip blanks."""
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def peek(self) -> str:
        """The next character that is not blank; "" at the end."""
        self.space()
        return self.text[self.at] if self.at < len(self.text) else ""

    def take(self, token: str) -> bool:
        """Consume `token` if it comes next; a command only as a whole word."""
        self.space()
        if not self.text.startswith(token, self.at):
            return False
        end = self.at + len(token)
        if token[-1].isalpha() and end < len(self.text) and self.text[end].isalpha():
            return False
        self.at = end
        return True

    def expect(self, token: str) -> None:
        """Consume `token` or fail."""
        if not self.take(token):
            raise AnswerError(UNPARSABLE)

    def deeper(self) -> None:
        """Count one level of nesting; the caller counts it back."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise AnswerError(TOO_LARGE)

    # the grammar

    def sum(self) -> Expression:
        """sum of the grammar."""
        self.deeper()
        total = self.product()
        while True:
            if self.take("+"):
                total = plus(total, self.product(), 1)
            elif self.peek() == "-":
                self.take("-")
                total = plus(total, self.product(), -1)
            elif self.take(r"\pm") or self.take("+-") or self.take(r"\mp"):
                right = self.product()
                both = plus(total, right, 1), plus(total, right, -1)
                total = Expression(both[0].values + both[1].values, "expression", both[0].terms, 1)
            else:
                break
            if len(total.values) > 8:
                raise AnswerError(TOO_LARGE)
        self.depth -= 1
        return total

    def product(self) -> Expression:
        """product of the grammar."""
        sign = 1
        while self.peek() in ("-", "+"):
            sign = -sign if self.text[self.at] == "-" else sign
            self.at += 1
        if self.take(r"\pm"):
            right = self.power()
            if len(right.values) > 4:
                raise AnswerError(TOO_LARGE)
            return Expression(
                right.values + tuple(negate(v) for v in right.values), "expression", right.terms, right.factors
            )
        left = self.power()
        while True:
            if self.take("*") or self.take(r"\cdot") or self.take(r"\times"):
                left = times(left, self.signed_power())
            elif self.take("/") or self.take(r"\div"):
                left = over(left, self.signed_power())
            elif self.starts_atom():
                left = times(left, self.power())
            else:
                break
        return left if sign > 0 else lift(negate, left, left.form)

    def signed_power(self) -> Expression:
        """A power that may carry a sign: 3 * -2."""
        if self.take("-"):
            inner = self.power()
            return lift(negate, inner, inner.form)
        self.take("+")
        return self.power()

    def power(self) -> Expression:
        """power of the grammar."""
        base = self.atom()
        while self.take("!"):
            base = lift(factorial_of, base)
        if self.take("^") or self.take("**"):
            exponent = self.exponent()
            copies = rational(exponent.values[0])
            if base.form == exponent.form == "numeral" and rational(base.values[0]) == 10 and copies is not None:
                raised = pair(power, base, exponent, terms=1)
                return Expression(raised.values, "ten" if 0 < copies < 4 else "numeral", digits=POWER_OF_TEN)
            factors = base.factors * max(1, int(copies)) if copies is not None and abs(copies) < 100 else base.factors
            return pair(power, base, exponent, "expression", base.terms, factors)
        return base

    def exponent(self) -> Expression:
        """What follows ^: a group, or a number, or one atom; a sign may come first."""
        sign = -1 if self.take("-") else 1
        self.deeper()
        inner = self.power() if self.peek() not in "0123456789" else self.numeral()
        self.depth -= 1
        return inner if sign > 0 else lift(negate, inner, inner.form)

    def starts_atom(self) -> bool:
        """True when an atom follows without an operator (2π, 3√2, (a+5)(b+2)); a numeral never does: 4 2 is not 8."""
        c = self.peek()
        if not c:
            return False
        if c == "\\":
            word = re.match(r"\\([A-Za-z]+)", self.text[self.at :])
            known = ("frac", "sqrt", "pi", "infty", "binom", "theta", "alpha", "beta", "lambda", "omega", *FUNCTIONS)
            return word is not None and word.group(1) in known
        if c == "|" or c in "[])},;=<>!^_&'\"?":
            return False
        return (c.isalpha() and not re.match(r"(?:and|or|cup)\b", self.text[self.at :])) or c in "({"

    def atom(self) -> Expression:
        """atom of the grammar."""
        self.deeper()
        inner = self.open_atom()
        self.depth -= 1
        return inner

    def open_atom(self) -> Expression:
        """An atom, without the count of the depth."""
        c = self.peek()
        if c and (c in "0123456789" or c == "."):
            return self.numeral()
        if self.take("("):
            return self.closed(")")
        if self.take("["):
            return self.closed("]")
        if self.take("{"):
            return self.closed("}")
        if self.take("|"):
            inner = self.closed("|")
            return lift(absolute, inner)
        if c == "\\":
            return self.command()
        if c.isalpha() and c.isascii():
            return self.word()
        raise AnswerError(UNPARSABLE)

    def closed(self, bracket: str) -> Expression:
        """A sum and its closing bracket; the parenthesised sum counts as one factor."""
        self.bracketed += bracket in ")]"
        inner = self.sum()
        self.expect(bracket)
        self.bracketed -= bracket in ")]"
        return inner

    def numeral(self) -> Expression:
        """A number: 42, 1,000, 4.2, .5, 1e3, or a mixed number such as 1 1/2."""
        self.space()
        match = None if self.bracketed else _GROUPED.match(self.text, self.at)
        match = match or _NUMBER.match(self.text, self.at)
        if match is None:
            raise AnswerError(UNPARSABLE)
        spelled = match.group().replace(",", "")
        mantissa, _, exponent = spelled.lower().partition("e")
        if len(mantissa) > MAX_DIGITS or abs(int(exponent or 0)) > MAX_DIGITS:
            raise AnswerError(TOO_LARGE)
        self.at = match.end()
        value = Fraction(mantissa.rstrip(".") or "0") * Fraction(10) ** int(exponent or 0)
        places = len(mantissa.partition(".")[2])
        if not places and not exponent:
            mixed = _MIXED.match(self.text, self.at)
            if mixed:
                top, bottom = (int(g) for g in mixed.groups() if g is not None)
                if 0 < top < bottom:
                    self.at = mixed.end()
                    return Expression((number(value + Fraction(top, bottom)),), "numeral")
        digits = len(mantissa.replace(".", "").lstrip("0")) if places else 0
        return Expression((number(value),), "numeral", digits=digits, places=places)

    def word(self) -> Expression:
        """A function name, a constant, or letters side by side (at most three: a product of variables)."""
        match = re.match(r"[A-Za-z]+", self.text[self.at :])
        name = match.group() if match else ""
        for function in ("sqrt", *FUNCTIONS):
            if name == function:
                self.at += len(name)
                return self.root_of() if name == "sqrt" else self.function(name)
        if name in CONSTANTS:
            self.at += len(name)
            return Expression((letter(CONSTANTS[name]),))
        if len(name) > 3:
            raise AnswerError(UNPARSABLE)
        self.at += 1
        return Expression((letter(self.indexed(name[0])),))

    def indexed(self, name: str) -> str:
        """The name of a variable with its index: x_{1} → x_1."""
        match = re.match(r"_\s*(?:\{([A-Za-z0-9]{1,8})\}|([A-Za-z0-9]))", self.text[self.at :])
        if match is None:
            return name
        self.at += match.end()
        return f"{name}_{match.group(1) or match.group(2)}"

    def command(self) -> Expression:
        r"""A LaTeX command: \frac, \sqrt, \pi, \binom, a function or a Greek letter."""
        match = re.match(r"\\([A-Za-z]+)", self.text[self.at :])
        if match is None:
            raise AnswerError(UNPARSABLE)
        name = match.group(1)
        self.at += match.end()
        if name == "frac":
            return over(self.argument(), self.argument())
        if name == "sqrt":
            return self.root_of()
        if name in CONSTANTS:
            return Expression((letter(CONSTANTS[name]),))
        if name == "binom":
            return pair(binomial, self.argument(), self.argument())
        if name in FUNCTIONS:
            return self.function(name)
        if name in ("theta", "alpha", "beta", "gamma", "lambda", "omega", "phi", "mu", "sigma", "tau"):
            return Expression((letter(name),))
        if name in ("lfloor", "lceil", "lvert", "vert"):
            raise AnswerError(UNPARSABLE)
        if name == "{":
            return self.closed(r"\}")
        raise AnswerError(UNPARSABLE)

    def argument(self) -> Expression:
        r"""One LaTeX argument: {group}, or a single digit, letter or command (\frac43, \sqrt2)."""
        c = self.peek()
        if c and c in "0123456789":
            self.at += 1
            return Expression((number(int(c)),), "numeral")
        if c.isalpha():
            self.at += 1
            return Expression((letter(c),))
        return self.atom()

    def root_of(self) -> Expression:
        """What a root sign covers, with its index."""
        index = 2
        match = re.match(r"\s*\[\s*(\d{1,2})\s*\]", self.text[self.at :])
        if match:
            index = int(match.group(1))
            self.at += match.end()
        c = self.peek()
        inner = self.numeral() if c and c in "0123456789" else self.argument()
        return lift(lambda v: root(v, index), inner)

    def function(self, name: str) -> Expression:
        """A named function: opaque, compared by its name and argument."""
        base = ""
        if name == "log" and self.take("_"):
            base = "_" + key(self.argument().values[0])
        raised = ""
        if self.take("^"):
            raised = "^" + key(self.exponent().values[0])
        inner = self.power() if self.peek() in ("(", "{", "\\") else self.product()
        if name == "exp":
            return lift(lambda v: power(letter("e"), v), inner)
        return lift(lambda v: letter(f"{name}{base}{raised}({key(v)})"), inner)
