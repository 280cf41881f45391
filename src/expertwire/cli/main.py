"""`expertwire`: the entry point. Commands load what they need when they run, so `--help` loads no torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Annotated, Any

import typer

import expertwire
from expertwire.errors import ExpertWireError

COMMANDS = ("demo", "bench", "check", "litmus", "soak", "doctor")
USAGE_EXIT, INTERRUPT_EXIT = 2, 130
# Typer's own copy of click, or click itself: what every kind of wrong use derives from.
_WrongUse: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    name="expertwire",
    help="Expert-parallel dispatch and combine for Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _name in COMMANDS:
    if importlib.util.find_spec(f"expertwire.cli.{_name}"):
        app.command(_name)(getattr(importlib.import_module(f"expertwire.cli.{_name}"), _name))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"expertwire {expertwire.__version__}")
        raise typer.Exit


@app.callback()
def _group(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Expert-parallel dispatch and combine for Mixture-of-Experts models."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 a check failed, 2 wrong use or not possible here, 130 interrupted."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """`main` without the exit. Errors that users can act on are one line on stderr."""
    try:
        code = int(app(args=arguments, prog_name="expertwire", standalone_mode=False) or 0)
    except _WrongUse as error:  # also what no_args_is_help raises, with the help as its message
        message = error.format_message()
        return _fail(message) if message and type(error).__name__ != "NoArgsIsHelpError" else _show_help()
    except ExpertWireError as error:
        where = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
        return _fail(" ".join([str(error), *(f"({note})" for note in where)]))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPT_EXIT
    if code == INTERRUPT_EXIT:  # newer versions of typer return it
        typer.echo("interrupted", err=True)
    return code


def _fail(message: str) -> int:
    typer.echo("error: " + " ".join(message.split()), err=True)
    return USAGE_EXIT


def _show_help() -> int:
    app(args=["--help"], prog_name="expertwire", standalone_mode=False)
    return USAGE_EXIT


if __name__ == "__main__":
    main()
