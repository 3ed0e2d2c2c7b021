"""``replayinfer <command>``: finds the command; every error is one line and status 2."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from replayinfer import ReplayError, __version__

__all__ = ["COMMANDS", "main", "run"]

COMMANDS: dict[str, str] = {
    "advise": "Say what replay changes in a model's decode step, and where it does not pay.",
    "bench": "Time decode steps on this machine's GPU, against installed peers.",
    "demo": "Decode small hybrid models by replay and check every token.",
    "describe": "Say which layers of a model recur or attend, and what a sequence costs.",
    "simulate": "Replay arrivals through the real planner and pools, on a CPU without a model.",
    "tune": "Measure launch choices on this machine's GPU, and write them as a launch table.",
}
"""Commands and their one-line help; command ``x`` is the function ``x`` of module ``x``."""

_OF_THE_EXTRA = ("typer", "rich")
_BAD_INPUT = 2
_INTERRUPTED = 130


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status.

    Returns
    -------
    int
        0, 1 where a command's own check failed, 2 for bad input, 130 when interrupted.
    """
    name, *rest = arguments or ["--help"]
    if name == "--version":
        print(f"replayinfer {__version__}")
        return 0
    if name in ("--help", "-h"):
        print(_overview())
        return 0
    if name not in COMMANDS:
        known = ", ".join([*COMMANDS, "--help", "--version"])
        return _fail(f"command: got {name!r}; allowed {known}; pick one")
    try:
        import typer

        module = importlib.import_module(f".{name}", __package__)
        return _call(typer, module, name, rest)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _OF_THE_EXTRA:
            raise
        return _fail(f"{missing}: got no installation; pip install 'replayinfer[cli]'")


def _call(typer: ModuleType, module: ModuleType, name: str, arguments: list[str]) -> int:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(help=COMMANDS[name])(getattr(module, name))
    # Some versions of typer bring a click of their own, so its base of all usage errors is found by
    # way of one that typer does export.
    usage_error: type[Exception] = next(
        c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"
    )
    try:
        outcome = app(args=arguments, prog_name=f"replayinfer {name}", standalone_mode=False)
    except usage_error as error:
        return _fail(error.format_message())  # type: ignore[attr-defined]
    except (typer.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except typer.Exit as done:  # how older versions end --help
        return int(done.exit_code)
    except (ReplayError, OSError) as error:
        return _fail(str(error))
    return outcome if isinstance(outcome, int) else 0


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "Usage: replayinfer COMMAND [OPTIONS]\n\n"
        "Decode recurrent layers of hybrid models by replay.\n\n"
        f"Commands:\n{commands}\n\n"
        "replayinfer COMMAND --help lists a command's options; replayinfer --version."
    )


def _fail(message: str) -> int:
    print(f"replayinfer: {' '.join(message.split())}", file=sys.stderr)
    return _BAD_INPUT


if __name__ == "__main__":
    main()
