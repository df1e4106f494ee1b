"""`gropius VERB …`: find the verb, run it, and turn what a person can mend into one message and an exit code."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from gropius import __version__
from gropius.cli.output import show_error
from gropius.errors import GropiusError, Interrupted

# Verbs in the order of the help. A verb is there when its file is: `gropius.cli.FILE` with a function `command`.
VERBS: dict[str, str] = {
    "train": "train",
    "resume": "resume",
    "sft": "sft",
    "eval": "evaluate",
    "play": "play",
    "explain": "explain",
    "presets": "presets",
    "resolve": "resolve",
    "check": "check",
    "check-reward": "check_reward",
    "rescore": "rescore",
    "doctor": "doctor",
    "plan": "plan",
    "audit": "audit",
    "compare": "compare",
    "show": "show",
    "view": "view",
    "report": "report",
    "export": "export",
    "sandbox": "sandbox",
    "env": "env",
}

EPILOGUE = (
    "Data goes to stdout, progress to stderr. Exit codes: 0 ok, 1 a finding or a failed gate, 2 usage or a refused "
    "recipe, 3 refused for safety, 130 interrupted."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    arguments: without the program's name; None = those of the process. A GropiusError becomes its message on stderr and
    its exit code; with `--debug` or GROPIUS_DEBUG=1 its traceback as well. Any other exception is our fault and shows.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = os.environ.get("GROPIUS_DEBUG", "") not in ("", "0")
    options = words[: words.index("--")] if "--" in words else words
    if "--debug" in options:
        debug = True
        words.remove("--debug")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        application()(args=words, prog_name="gropius")
    except GropiusError as error:
        if debug:
            raise
        show_error(error)
        sys.exit(error.exit_code)


def application() -> typer.Typer:
    """The command line with every verb whose file is there."""
    app = typer.Typer(
        help="Train language models by group-relative policy optimisation: exact, fast on what you have, clear.",
        epilog=EPILOGUE,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_program)
    for verb, file in VERBS.items():
        name = f"gropius.cli.{file}"
        if importlib.util.find_spec(name) is not None:
            module = importlib.import_module(name)
            app.command(verb)(_interruptible(module.command))
    return app


def _program(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of a refusal (or set GROPIUS_DEBUG=1)."),
) -> None:
    del debug  # taken out of the arguments by `main`; declared here so that the help shows it
    if version:
        typer.echo(f"gropius {__version__}")
        raise typer.Exit()


def _interruptible(command: Callable[..., Any]) -> Callable[..., Any]:
    """A verb that says it was interrupted (exit 130) where it has nothing of its own to save."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted") from error

    return run
