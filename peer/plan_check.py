"""Whether a plan can be run by what is installed here, told before anything is started.

It imports neither torch nor numpy, so that a bootstrap node can ask, too.
"""

from __future__ import annotations

import logging
from functools import cache

from peer.errors import UserError
from peer.learning.names import CUSTOM, DATA_SETS, ESTIMATORS, MODELS, OWN, TEXT_MODELS
from peer.matching.registry import CENTRAL, check_method
from peer.plan import Plan

log = logging.getLogger(__name__)


def check_plan(plan: Plan, *, central: bool = False, data: str | None = None) -> None:
    """Raise UserError when no peer could run `plan`: a name that there is not, or a contradiction.

    `central`: whether methods of a coordinator can be run, too. `data`: what is dealt or used
    instead of the plan's data, which then do not matter. Warns when peers must share samples.
    """
    if not (central and plan.method in CENTRAL):
        check_method(plan.method)
    if plan.method in CENTRAL and plan.training.statistics == "local":
        raise UserError(
            f"training.statistics: {plan.method} has one model for all of a cluster, and averages "
            "all of it",
            'local is for peers among themselves; set "average"',
        )
    _check_defence(plan)
    if plan.privacy.acts:
        check_privacy(plan)
    l, k = plan.matching.l, plan.matching.k  # noqa: E741
    # NSMC adds the last neighbours to its l candidates; PENS has the l alone to choose k of.
    if plan.method == "pens" and k > l:
        raise UserError(f"matching: pens cannot choose k = {k} of l = {l} candidates")
    if plan.model not in (*MODELS, CUSTOM):
        known = ", ".join((*MODELS, CUSTOM))
        raise UserError(f"model: there is no built-in model {plan.model!r}", f"there are {known}")
    if data is None and plan.data != OWN:
        _check_data(plan)


def _check_defence(plan: Plan) -> None:
    """Raise UserError for a defence that could not do what its name says."""
    defence, k = plan.defence, plan.matching.k
    if plan.method in CENTRAL:
        if defence.gate:
            raise UserError(
                f"defence.gate: the coordinator of {plan.method} has no samples to judge by",
                "leave it out; defence.clip and defence.rule need none",
            )
    elif plan.method != "local" and k + 1 < defence.needs:
        raise UserError(
            f"defence: {defence.rule} against byzantine = {defence.byzantine} needs "
            f"{defence.needs} models, a peer's own and k = {defence.needs - 1}, not k = {k}",
            "raise matching.k, or set rule = median, which needs no byzantine",
        )


def check_privacy(plan: Plan) -> None:
    """Raise UserError where more of the samples would be told than epsilon says, or no DP-SGD is.

    Whom a peer averages with, or which model it takes, is seen by others; where losses on its
    training samples choose, that is told without any noise.
    """
    if plan.method in ("panm-loss", "pens", "ifca"):
        raise UserError(
            f"privacy: {plan.method} chooses by losses on the training samples, which epsilon does "
            "not count",
            "panm-grad, cfl and fedavg go by what was trained with noise",
        )
    if plan.defence.gate:
        raise UserError(
            "privacy: the gate chooses by losses on samples of the peer, which epsilon does not "
            "count",
            "leave out defence.gate",
        )
    if plan.model in ESTIMATORS or plan.model in TEXT_MODELS:
        raise UserError(
            f"privacy: {plan.model} cannot be trained by DP-SGD", "take mlp, lenet, cnn or custom"
        )


def _check_data(plan: Plan) -> None:
    """Check the name of a data set that is dealt, and whether it can be dealt like that."""
    if plan.data not in DATA_SETS:
        known = ", ".join((*DATA_SETS, OWN))
        raise UserError(f"data: there is no data set {plan.data!r}", f"there are {known}")
    if plan.model in TEXT_MODELS:
        raise UserError(
            f"model: {plan.model} needs text, and {plan.data} has images",
            'set data = "own"; give it --data text:FILE',
        )
    if plan.partition.kind == "natural":
        raise UserError(
            f"partition: natural needs data that name their groups, {plan.data} does not",
            'set data = "own"; every peer gets --data csv:FILE#label=COLUMN&group=COLUMN',
        )
    taken, there_are = plan.n * (plan.partition.train_per_peer or 0), DATA_SETS[plan.data]
    if taken > there_are:
        _warn(
            f"{plan.n} peers with train_per_peer = {plan.partition.train_per_peer} take {taken} "
            f"samples of the {there_are} in {plan.data}: some are dealt to several peers"
        )


@cache
def _warn(message: str) -> None:
    """Log a warning once, for however many plans of a study it is true."""
    log.warning(message)
