"""Puts a peer's learner together from the plan and from what the person gave on this machine, and
builds it again, without the data, to use what was learned.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from peer.errors import UserError
from peer.learning import estimator_learner
from peer.learning.budget import Budget
from peer.learning.learner import Learner, ModelCard
from peer.learning.names import CUSTOM, ESTIMATORS, TEXT_MODELS
from peer.learning.partition import PeerData, Poison, blank_inputs, deal
from peer.learning.sources import Dataset, is_text, load_dataset
from peer.plan import Plan

_shared_dataset = lru_cache(maxsize=1)(load_dataset)
"""A data set that is dealt is loaded once for all peers of a process."""


def make_learner(plan: Plan, index: int, *, data: str | None = None) -> Learner:
    """Return the learner of peer `index` of a plan whose model is built in, on the CPU.

    `data` as in `prepare`. Raises UserError.
    """
    learner, _ = prepare(plan, index, data=data)
    return learner


def prepare(
    plan: Plan,
    index: int,
    *,
    data: str | None = None,
    dealt: bool = False,
    model: str | None = None,
    device: str = "cpu",
    threads: int = 1,
    poison: Poison | None = None,
    cluster: int | None = None,
    part: float = 1.0,
    budget: Budget | None = None,
) -> tuple[Learner, ModelCard]:
    """Return the learner of peer `index`, and what is needed to build its model again.

    `data` is a spec of the peer's own data instead of its share of the plan's, or, if `dealt`, of
    data that all peers have and that are dealt to them as the plan's would be; `model` the import
    path of a module factory, for plans whose model is `custom`; `device` is cpu or cuda; `threads`
    is how many torch uses in this process; `poison`, `cluster` and `part` are an experiment's, see
    `deal`; `budget` is what a plan with privacy has spent, nothing if not given. Raises UserError
    when something is missing or does not fit.

    [choice] One thread if not told otherwise: small models gain little from a second, lose tenfold
    when peers share the cores, and one thread repeats bit by bit.
    """
    check_model(plan, model)
    if data is None and plan.data == "own":
        raise UserError("the plan wants each peer's own data", "name them: --data SPEC")
    own = data is not None and not dealt
    load = load_dataset if own else _shared_dataset
    dataset = load(data or plan.data, seed=plan.seed, classes=plan.classes)
    check_inputs(plan.model, dataset)
    share = deal(dataset, plan, index, own=own, poison=poison, cluster=cluster, part=part)
    card = ModelCard(
        model=plan.model,
        factory=model,
        shape=dataset.shape,
        classes=dataset.classes,
        labels=dataset.labels,
        scale=dataset.scale,
        seed=plan.seed,
        left_out=dataset.left_out,
        text=is_text(dataset.train_x),
    )
    learner = _learner(card, share, plan, index, device=device, threads=threads, budget=budget)
    return learner, card


def check_model(plan: Plan, model: str | None) -> None:
    """Raise UserError unless `model`, an import path, is given just where the plan wants one."""
    if (plan.model == "custom") != (model is not None):
        if model is None:
            raise UserError("the plan's model is custom", "name it: --model module:function")
        raise UserError(f"the plan's model is {plan.model}, not custom", "leave out --model")


def check_inputs(model: str, dataset: Dataset) -> None:
    """Raise UserError when a built-in model takes token ids and the data are numbers, or not."""
    text = is_text(dataset.train_x)
    if model == CUSTOM or (model in TEXT_MODELS) == text:
        return
    if text:
        raise UserError(f"the model {model} takes numbers, not text", "use the model lstm")
    raise UserError(f"the model {model} takes text, not numbers", "give it --data text:FILE")


def rebuild(card: ModelCard) -> Learner:
    """Return a learner of the card's model that has no data: it can evaluate and predict nothing of
    its own, but applies any vector of its manifest. Raises UserError when it cannot be built."""
    blank = blank_inputs(2, card.shape, text=card.text)
    labels = np.arange(2, dtype=np.int64)
    data = PeerData(blank, labels, blank, labels, card.classes, card.shape)
    return _learner(card, data, Plan(n=2, seed=card.seed), 0)


def _learner(
    card: ModelCard,
    data: PeerData,
    plan: Plan,
    index: int,
    *,
    device: str = "cpu",
    threads: int = 1,
    budget: Budget | None = None,
) -> Learner:
    if card.model in ESTIMATORS:
        if device != "cpu":
            raise UserError(f"the model {card.model} runs on the cpu only, not on {device}")
        return estimator_learner.EstimatorLearner(card.model, data, plan, index)

    import torch

    from peer.learning.models import build_model
    from peer.learning.torch_learner import TorchLearner

    torch.set_num_threads(threads)
    module = build_model(card.model, card.shape, card.classes, card.seed, factory=card.factory)
    return TorchLearner(module, data, plan, index, device=device, budget=budget)
