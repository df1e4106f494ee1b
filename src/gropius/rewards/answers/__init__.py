"""Reading short mathematical answers: a grammar, exact arithmetic, and rules for what counts as the final answer.

    extract.py   reply → the one answer it commits to        (thinking, hedging, negation, several answers)
    text.py      Unicode and LaTeX spelling → one plain spelling
    units.py     trailing units, percent signs, currency
    parser.py    plain spelling → `Answer`                   (recursive descent, every size bounded)
    values.py    exact arithmetic: rationals, radicals, π, i, variables
    compare.py   is this answer the gold answer?

No text is ever evaluated by an interpreter, and no timer is needed: work is bounded by the sizes that are let in.
"""
