"""What `bootstrap` says of CFL without a network: the tree of a run, and the theorem's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peer.errors import UserError


def tree(
    run: Annotated[Path, typer.Argument(help="Run directory of a federation by cfl.")],
    *,
    out: Annotated[
        Path | None, typer.Option(help="Picture to write (.png, .svg, .pdf).", metavar="FILE")
    ] = None,
) -> None:
    """Draw the parameter tree of a run: which cluster came apart when, and who is where."""
    from bootstrap.coordination.tree_picture import tree_figure
    from bootstrap.coordination.tree_store import INDEX, TREE, read_index
    from peer.plan import Plan
    from peer.rundir import PLAN

    if not (run / TREE / INDEX).is_file():
        raise UserError(f"{run} holds no parameter tree", "runs by the method cfl leave one")
    index = read_index(run / TREE / INDEX)
    plan = Plan.load(run / PLAN)
    known = None
    if plan.partition.kind != "none":
        known = [plan.cluster_of(i) for i in range(plan.n)]
    target = out or run / "tree.png"
    figure = tree_figure(index, known)
    try:
        figure.savefig(target, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {target}: {error}") from None
    members: dict[int, list[int]] = {}
    for peer, place in sorted(index.places.items()):
        members.setdefault(place, []).append(peer)
    for v, node in enumerate(index.nodes):
        told = ", ".join(map(str, members.get(v, []))) or "none left"
        if node.children is None:
            typer.echo(f"cluster {v}, since round {node.t}: peers {told}")
        elif v in members:
            typer.echo(f"node {v}, split since: peers {told}, to be routed when they return")
    typer.echo(f"picture: {target}")


def theory(
    *,
    clusters: Annotated[
        int, typer.Option("--clusters", "-K", help="Number of clusters, K.", min=2)
    ],
    gamma: Annotated[
        float, typer.Option(help="Relative error of the peers' updates, in [0, 1).", metavar="G")
    ],
) -> None:
    """Say whether K clusters can be told apart for certain, whatever they are, at this noise."""
    from bootstrap.coordination.theory import answer

    if not 0 <= gamma < 1:
        raise UserError(
            f"gamma = {gamma:g} is not in [0, 1)",
            "it is ||true - empirical gradient|| / ||true gradient||; the theorem ends at 1",
        )
    typer.echo(answer(clusters, gamma))
