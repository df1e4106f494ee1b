"""Data-set tests as questions: an expression for the program, and the right answer, which the program never sees.

    assert f(2, [3]) == [6]                 ask f(2, [3]); the answer must be [6]
    assert f(x)   assert not f(x)           ask whether it is true
    assert abs(f(x) - 2.5) < 1e-6           ask f(x); the answer must be near 2.5
    assert math.isclose(f(x), 2.5, ...)     the same

Tests that need to run themselves (loops, helpers of the data set) run in a second isolated process, with a stand-in for
the function whose calls go to the program's process and come back as plain values.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, TypeGuard

from gropius.sandbox.base import WRONG
from gropius.sandbox.values import difference, near


class NotAQuestion(Exception):
    """A test that cannot be split into a question and an expected value."""


@dataclass(frozen=True)
class Question:
    """ask: the expression to send. expected: a plain value. tolerance: (relative, absolute), None compares exactly.

    negate: any value but the expected one is right.
    """

    ask: str
    expected: Any
    tolerance: tuple[float, float] | None = None
    negate: bool = False

    def judge(self, actual: Any) -> str:
        """ "" when the answer is right, else the reason."""
        if self.tolerance is not None:
            return near(actual, self.expected, *self.tolerance)
        found = difference(actual, self.expected)
        if self.negate:
            return "" if found else WRONG
        return found


def questions_of(source: str, entry: str) -> list[Question]:
    """The questions of a test's source. Raises NotAQuestion when any statement is more than an assertion.

    entry: the function's name in the program; the parameter of `check(candidate)`, or a bare `candidate`, stands for
    it. A question whose right answer is a truth value must be a plain call of it: around anything else (such as
    `isinstance(f(1), int)`) the program could put names of its own that answer True.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as problem:
        raise NotAQuestion(str(problem)) from problem
    body, own, stand_in = tree.body, set[str](), "candidate"
    if len(body) and all(isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign)) for node in body):
        checks = [node for node in body if isinstance(node, ast.FunctionDef)]
        if len(checks) != 1 or any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body):
            raise NotAQuestion("more than one function")
        if not checks[0].name.startswith(("check", "test")):
            raise NotAQuestion(f"nobody calls {checks[0].name}")
        own = {name.id for node in body if isinstance(node, ast.Assign) for name in ast.walk(node) if _is_stored(name)}
        stand_in, body = _parameter(checks[0]), checks[0].body
    out = []
    for node in body:
        if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if not isinstance(node, ast.Assert):
            raise NotAQuestion(f"line {node.lineno} is not an assertion")
        for name in ast.walk(node.test):
            if isinstance(name, ast.Name) and name.id in own:
                raise NotAQuestion(f"line {node.lineno} mentions {name.id}, which the tests define")
            if isinstance(name, ast.Name) and name.id == stand_in:
                name.id = entry
        question = _question(node.test, entry)
        if question is not None:
            out.append(question)
    return out


def _is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _parameter(check: ast.FunctionDef) -> str:
    """The name that the function under test has inside of a check; without any parameter, `candidate`."""
    names = [a.arg for a in (*check.args.posonlyargs, *check.args.args)]
    if len(names) > 1 or check.args.kwonlyargs or check.args.vararg or check.args.kwarg:
        raise NotAQuestion(f"{check.name} takes more than the function under test")
    return names[0] if names else "candidate"


def as_check(source: str) -> str:
    """Tests that must run, as source that defines `check(candidate)`. Raises ValueError when it would check nothing.

    Bare statements become its body; without any, functions named test… are called, and a `check` stays as it is.
    """
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "check" in functions:
        return source
    indented = "def check(candidate):\n" + "\n".join(f"    {line}" for line in source.splitlines())
    definitions = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef, ast.Pass)
    if any(not isinstance(node, definitions) for node in tree.body):
        return indented
    named = [name for name, node in functions.items() if name.startswith("test") and not node.args.args]
    if not named:
        raise ValueError("the test has no assertion, no check(candidate), no function named test…: it checks nothing")
    return "\n".join([source, "def check(candidate):", *(f"    {name}()" for name in named)])


def _question(test: ast.expr, entry: str) -> Question | None:
    """One assertion; None when it asks nothing (`assert True, "…"`)."""
    if isinstance(test, ast.Constant):
        return None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return Question(f"not ({_plain_call(test.operand, entry)})", True)
    if isinstance(test, ast.Call) and ast.unparse(test.func) in ("math.isclose", "isclose"):
        return _isclose(test)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right, operator = test.left, test.comparators[0], test.ops[0]
        if isinstance(operator, (ast.Eq, ast.Is)):
            question = _equal(left, right)
            if isinstance(question.expected, bool):
                _plain_call(ast.parse(question.ask, mode="eval").body, entry)
            return question
        if (
            isinstance(operator, (ast.Lt, ast.LtE))
            and isinstance(left, ast.Call)
            and ast.unparse(left.func) in ("abs", "math.fabs")
        ):
            inner = left.args[0]
            if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub):
                return Question(ast.unparse(inner.left), value_of(inner.right), (0.0, float(value_of(right))))
        raise NotAQuestion(ast.unparse(test))
    return Question(f"True if ({_plain_call(test, entry)}) else False", True)


def _plain_call(node: ast.expr, entry: str) -> str:
    """The source of a call of the function itself. Raises NotAQuestion for anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == entry:
        return ast.unparse(node)
    raise NotAQuestion(ast.unparse(node))


def _equal(left: ast.expr, right: ast.expr) -> Question:
    try:
        return Question(ast.unparse(left), value_of(right))
    except NotAQuestion:
        return Question(ast.unparse(right), value_of(left))


def _isclose(test: ast.Call) -> Question:
    tolerances = {k.arg: float(value_of(k.value)) for k in test.keywords}
    if len(test.args) != 2:
        raise NotAQuestion(ast.unparse(test))
    return Question(
        ast.unparse(test.args[0]),
        value_of(test.args[1]),
        (tolerances.get("rel_tol", 1e-9), tolerances.get("abs_tol", 0.0)),
    )


def value_of(node: ast.expr) -> Any:
    """The plain value of a literal expression: constants, containers, signs, sums and products of numbers, set(…)."""
    if isinstance(node, ast.Constant) and (
        node.value is None or isinstance(node.value, (bool, int, float, complex, str, bytes))
    ):
        return node.value
    if isinstance(node, ast.List):
        return [value_of(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(value_of(item) for item in node.elts)
    if isinstance(node, ast.Set):
        return {value_of(item) for item in node.elts}
    if isinstance(node, ast.Dict) and all(k is not None for k in node.keys):
        return {value_of(k): value_of(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        number = value_of(node.operand)
        if isinstance(number, (int, float, complex)):
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        a, b = value_of(node.left), value_of(node.right)
        if isinstance(a, (int, float, complex)) and isinstance(b, (int, float, complex)):
            return _arithmetic(node.op, a, b)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords and len(node.args) <= 1:
        kinds = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list, "dict": dict, "float": float}
        if node.func.id in kinds:
            return kinds[node.func.id](*(value_of(a) for a in node.args))
    raise NotAQuestion(ast.unparse(node))


def _arithmetic(op: ast.operator, a: complex, b: complex) -> complex:
    if isinstance(op, ast.Add):
        return a + b
    if isinstance(op, ast.Sub):
        return a - b
    if isinstance(op, ast.Mult):
        return a * b
    if b == 0:
        raise NotAQuestion("division by zero")
    return a / b
