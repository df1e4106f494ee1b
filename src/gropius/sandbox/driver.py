"""The inner side: runs one program and answers questions about it. Standard library only; nothing here is trusted.

Standard input carries frames from the grader (a decimal length, a line end, that many bytes), standard output carries
one JSON object a line back, standard error takes whatever the program prints. Before the program's first line runs,
those three are moved out of its sight: it reads an empty input and prints into the third.

The program could find the pipe and write to it. It gains nothing: it knows questions, never the right answers.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any

MAX_DEPTH = 60
MAX_NODES = 300_000


class Unserialisable(Exception):
    """A value that is not made of plain types."""


def read_frame(fd: int) -> bytes | None:
    """One frame of bytes; None at the end of the input."""
    head = b""
    while not head.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            return None
        head += byte
    left, parts = int(head), []
    while left:
        part = os.read(fd, min(left, 1 << 16))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def limit(settings: dict[str, Any]) -> None:
    """Give up privileges and set the limits that hold for the program and all its children."""
    import resource

    if settings["uid"]:
        os.setgroups([])
        os.setresgid(settings["uid"], settings["uid"], settings["uid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])
    pairs = (
        (resource.RLIMIT_AS, settings["memory_bytes"]),
        (resource.RLIMIT_CPU, settings["cpu_s"]),
        (resource.RLIMIT_FSIZE, settings["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, 64 << 20),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    )
    for kind, value in pairs:
        resource.setrlimit(kind, (value, value))
    if settings["processes"]:
        resource.setrlimit(resource.RLIMIT_NPROC, (settings["processes"], settings["processes"]))


def make_encoder() -> Callable[[Any], str]:
    """encode(value) → JSON text of plain types, tagged so that tuple and list, 1 and True stay different."""
    from _json import encode_basestring_ascii as quote

    kinds, exact = isinstance, type
    left = [0]

    def walk(x: Any, depth: int) -> str:
        """One value and what it holds."""
        left[0] -= 1
        if depth > MAX_DEPTH or left[0] < 0:
            raise Unserialisable("too deep, cyclic or too large")
        t = exact(x)
        if x is None:
            return '["n"]'
        if t is bool:
            return '["b",true]' if x else '["b",false]'
        if t is int:
            return f'["i","{x}"]'
        if t is float:
            return f'["f","{x!r}"]'
        if t is complex:
            return f'["c","{x.real!r}","{x.imag!r}"]'
        if t is str:
            return f'["s",{quote(x)}]'
        if t is bytes or t is bytearray:
            return f'["y","{x.hex()}"]'
        for base, tag in ((list, "l"), (tuple, "t"), (set, "e"), (frozenset, "z")):
            if t is base or (kinds(x, base) and standard(t)):
                return f'["{tag}",[{",".join([walk(item, depth + 1) for item in base.__iter__(x)])}]]'
        if t is dict or (kinds(x, dict) and standard(t)):
            pairs = [f"[{walk(k, depth + 1)},{walk(v, depth + 1)}]" for k, v in dict.items(x)]
            return f'["d",[{",".join(pairs)}]]'
        return f'["x",{quote(str(t.__name__))}]'

    def standard(t: type) -> bool:
        return t.__module__ == "collections" or (issubclass(t, tuple) and hasattr(t, "_fields"))

    def encode(value: Any) -> str:
        left[0] = MAX_NODES
        return walk(value, 0)

    return encode


def describe(problem: BaseException) -> tuple[str, str]:
    """The class of an exception, and "memory" or "limit" when a limit raised it."""
    if isinstance(problem, MemoryError):
        return "memory", "MemoryError"
    if isinstance(problem, BlockingIOError) or "can't start new thread" in str(problem)[:200]:
        return "limit", type(problem).__name__
    if isinstance(problem, OSError) and problem.errno in (27, 28):
        return "limit", "file size"
    return "error", str(type(problem).__name__)[:60]


def main() -> None:
    """Read the settings and the program, run it, answer each question."""
    settings = eval(read_frame(0) or b"", {"__builtins__": {}})
    source = (read_frame(0) or b"").decode("utf-8", "surrogatepass")
    nothing = os.open("/dev/null", os.O_RDONLY)
    limit(settings)
    questions, answers, printed = os.dup(0), os.dup(1), 2
    os.dup2(nothing, 0)
    os.dup2(printed, 1)
    os.close(nothing)
    encode = make_encoder()
    from _json import encode_basestring_ascii as quote

    def send(text: str, write: Callable[[int, bytes], int] = os.write) -> None:
        data = text.encode() + b"\n"
        while data:
            data = data[write(answers, data) :]

    def fail(problem: BaseException, extra: str = "") -> None:
        kind, name = describe(problem)
        send(f'{{{extra}"{kind}":{quote(name)},"text":{quote(message(problem))}}}')

    send('{"hello":true}')
    try:
        code = compile(source.lstrip("\ufeff"), "<program>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, UnicodeError, RecursionError, MemoryError, OverflowError) as problem:
        send(f'{{"syntax":{quote(message(problem))}}}')
        return
    if settings["mode"] == "stdin":
        send('{"ready":true}')
        run_with_input(code, questions, send)
        return
    namespace = {"__name__": "__program__", "__builtins__": __builtins__, "inf": float("inf"), "nan": float("nan")}
    module = type(sys)("__program__")
    namespace = module.__dict__ | namespace
    module.__dict__.update(namespace)
    namespace = module.__dict__
    sys.modules["__program__"] = module
    if settings["mode"] == "tests":
        namespace["candidate"] = make_remote(questions, send, encode)
    try:
        exec(code, namespace)
    except SystemExit:
        send('{"exited":true}')
        return
    except BaseException as problem:  # the program's own: whatever it raises is its failure
        fail(problem)
        return
    send('{"ready":true}')
    answer_questions(questions, namespace, send, fail, encode)


def answer_questions(
    questions: int,
    namespace: dict[str, Any],
    send: Callable[[str], None],
    fail: Callable[[BaseException, str], None],
    encode: Callable[[Any], str],
) -> None:
    """Evaluate one expression after another in the program's own namespace."""
    from _json import encode_basestring_ascii as quote

    number = 0
    while (frame := read_frame(questions)) is not None:
        place = f'"i":{number},'
        number += 1
        try:
            value = eval(compile(frame.decode("utf-8", "surrogatepass"), "<question>", "eval"), namespace)
            send(f'{{{place}"value":{encode(value)}}}')
        except SystemExit:
            send('{"exited":true}')
            return
        except Unserialisable as problem:
            send(f'{{{place}"unserialisable":{quote(str(problem))}}}')
        except BaseException as problem:  # as above
            fail(problem, place)


def message(problem: BaseException) -> str:
    """At most 300 characters of an exception's text, whatever it does when asked."""
    try:
        return str(problem)[:300]
    except BaseException:
        return ""


def make_remote(questions: int, send: Callable[[str], None], encode: Callable[[Any], str]) -> Callable[..., Any]:
    """The function under test, as the tests see it: a call goes to the grader and its answer comes back."""

    def candidate(*args: Any, **kwargs: Any) -> Any:
        """Ask the grader to call the program."""
        send(f'{{"call":{encode([list(args), kwargs])}}}')
        frame = read_frame(questions)
        if frame is None:
            os._exit(0)
        return eval(
            frame, {"__builtins__": {"set": set, "frozenset": frozenset}, "inf": float("inf"), "nan": float("nan")}
        )

    return candidate


def run_with_input(code: CodeType, questions: int, send: Callable[[str], None]) -> None:
    """Every frame is the standard input of one fresh run; what it prints is the answer."""
    from _json import encode_basestring_ascii as quote

    number = 0
    while (frame := read_frame(questions)) is not None:
        given = os.memfd_create("input")
        os.write(given, frame) if frame else None
        os.lseek(given, 0, 0)
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(given, 0)
            os.dup2(into, 1)
            os.close(out)
            os.close(questions)
            os._exit(run_once(code))
        os.close(into)
        os.close(given)
        parts, size = [], 0
        while part := os.read(out, 1 << 16):
            size += len(part)
            if size <= 4 << 20:
                parts.append(part)
        os.close(out)
        _, status = os.waitpid(child, 0)
        text = b"".join(parts).decode("utf-8", "replace")
        code_of = os.waitstatus_to_exitcode(status)
        send(f'{{"i":{number},"out":{quote(text)},"size":{size},"code":{code_of}}}')
        number += 1


def run_once(code: CodeType) -> int:
    """The whole program as a script; its exit code. 67 out of memory, 68 a limit."""
    status = 0
    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    try:
        exec(code, module.__dict__)
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as problem:  # the program's own
        status = {"memory": 67, "limit": 68}.get(describe(problem)[0], 1)
        os.write(2, f"{type(problem).__name__}: {message(problem)}".encode("utf-8", "replace"))
    try:
        sys.stdout.flush()
    except BaseException:
        status = status or 1
    return status & 0xFF


if __name__ == "__main__":
    main()
    os._exit(0)
