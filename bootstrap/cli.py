"""The `bootstrap` command."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootstrap.server import BootstrapNode
from bootstrap.tree_cli import theory, tree
from bootstrap.view import live_table
from peer.command import end_on_signal, run_command
from peer.display import configure_logging
from peer.errors import UserError
from peer.learning.local_import import import_module
from peer.network.address import BOOTSTRAP_PORT
from peer.plan import Plan
from peer.plan_check import check_plan

if TYPE_CHECKING:
    from peer.network.federation import Credentials

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class LogForm(StrEnum):
    """Form of the log lines."""

    TEXT = "text"
    JSON = "json"


def main() -> None:
    """Run the command line."""
    run_command(app)


@app.callback(invoke_without_command=True)
def bootstrap(
    context: typer.Context,
    *,
    plan: Annotated[
        Path | None, typer.Option(help="Plan file to serve.", envvar="PANMESH_BOOTSTRAP_PLAN")
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            help="Address to listen on; 0.0.0.0 for all interfaces.",
            metavar="HOST:PORT",
            envvar="PANMESH_BOOTSTRAP_LISTEN",
        ),
    ] = f"127.0.0.1:{BOOTSTRAP_PORT}",
    state: Annotated[
        Path | None,
        typer.Option(
            help="Directory that keeps indices, and what a coordinator knows, across restarts.",
            envvar="PANMESH_BOOTSTRAP_STATE",
        ),
    ] = None,
    reclaim_after: Annotated[
        float,
        typer.Option(
            help="Seconds unseen after which a peer's index can go to another, if none is free.",
            min=0,
            envvar="PANMESH_BOOTSTRAP_RECLAIM_AFTER",
        ),
    ] = 60.0,
    exit_when_done: Annotated[
        bool,
        typer.Option(
            "--exit-when-done",
            help="End once all peers have finished.",
            envvar="PANMESH_BOOTSTRAP_EXIT_WHEN_DONE",
        ),
    ] = False,
    federation: Annotated[
        Path | None,
        typer.Option(
            help="Federation file; connections are then encrypted.",
            envvar="PANMESH_BOOTSTRAP_FEDERATION",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            help="The bootstrap node's secret key, with --federation.",
            envvar="PANMESH_BOOTSTRAP_KEY",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Listen beyond loopback without keys.",
            envvar="PANMESH_BOOTSTRAP_INSECURE",
        ),
    ] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import", help="Module with methods of your own; repeatable.", metavar="MODULE"
        ),
    ] = None,
    log: Annotated[
        LogForm, typer.Option(help="Form of the log lines.", envvar="PANMESH_BOOTSTRAP_LOG")
    ] = LogForm.TEXT,
) -> None:
    """Serve a plan to those who join, and tell them of each other; coordinate central methods."""
    if context.invoked_subcommand is not None:
        return
    if plan is None:
        raise UserError("there is no plan to serve", "give --plan FILE, see docs/plans.md")
    configure_logging("json" if log is LogForm.JSON else "text")
    for module in imports or []:
        import_module(module, "--import")
    served = Plan.load(plan)
    check_plan(served, central=True)
    node = BootstrapNode(
        served,
        listen=listen,
        state=state,
        reclaim_after=reclaim_after,
        exit_when_done=exit_when_done,
        credentials=_credentials(federation, key),
        insecure=insecure,
    )
    end_on_signal(_serve(node))


app.command()(tree)
app.command()(theory)


def _credentials(federation: Path | None, key: Path | None) -> Credentials | None:
    """Return the node's credentials, None without any. Raises UserError when they do not fit."""
    if federation is None and key is None:
        return None
    if federation is None or key is None:
        raise UserError(
            "--federation and --key go together", "peer federation new makes federation and key"
        )
    from peer.network.federation import Credentials
    from peer.network.identity import IdentityKey

    credentials = Credentials(IdentityKey.load(key), federation)
    if credentials.key.peer != credentials.federation.bootstrap.peer:
        raise UserError(f"{key} is not the key of the bootstrap node that {federation} names")
    return credentials


async def _serve(node: BootstrapNode) -> None:
    async with node:
        with live_table(node):
            await node.serve()
