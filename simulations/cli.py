"""The `simulate` command."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from peer.command import run_command
from peer.errors import FederationError
from peer.plan import Plan

FAILED = 1

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Federations on one machine: run them, compare them, draw them.",
)


class Backend(StrEnum):
    """What a plan is run by."""

    PROCESSES = "processes"
    ONE_PROCESS = "one-process"


def main() -> None:
    """Run the command line."""
    run_command(_run)


def _run() -> None:
    try:
        app()
    except FederationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILED)


@app.command()
def demo(
    rounds: Annotated[int | None, typer.Option(help="Rounds to run.")] = None,
    peers: Annotated[int | None, typer.Option(help="Number of peers.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random draw.")] = None,
    out: Annotated[Path, typer.Option(help="Run directory to write.")] = Path("runs/demo"),
    show: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the pictures, where there is a screen.")
    ] = True,
) -> None:
    """Eight real peers in two hidden clusters find out who is like them."""
    from simulations.demo import run_demo

    pictures = run_demo(out, peers=peers, rounds=rounds, seed=seed)
    if show and _has_screen():
        typer.launch(str(pictures[0].resolve()))


@app.command()
def run(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    *,
    method: Annotated[str | None, typer.Option(help="Method, instead of the plan's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, instead of the plan's.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds, instead of the plan's.")] = None,
    peers: Annotated[int | None, typer.Option(help="Peers, instead of the plan's n.")] = None,
    backend: Annotated[
        Backend, typer.Option(help="Real processes, or the one-process reference.")
    ] = Backend.PROCESSES,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; runs/NAME-METHOD if not given.")
    ] = None,
) -> None:
    """Run a plan on this machine, and draw it."""
    from simulations.report import write_report
    from simulations.runs import changed, run_population, run_processes

    chosen = changed(Plan.load(plan), method=method, seed=seed, rounds=rounds, n=peers)
    target = out or Path("runs") / f"{chosen.name}-{chosen.method}"
    runner = run_processes if backend is Backend.PROCESSES else run_population
    print(json.dumps(runner(chosen, target), indent=2))
    print(f"Pictures: {write_report(target)[0].parent}/")


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="A run directory, or peers' state directories.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Run directory to merge several peers' into.")
    ] = None,
) -> None:
    """Draw a run: accuracy, who averaged with whom, and the final topology."""
    from simulations.report import locate, write_report

    for picture in write_report(locate(runs, out)):
        print(picture)


def _has_screen() -> bool:
    """Tell whether a picture can be shown to somebody: a terminal, and a desktop behind it."""
    desktop = sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ
    return sys.stdout.isatty() and desktop
