"""Puts a peer's learner together from the plan and from what the person gave on this machine."""

from __future__ import annotations

from functools import lru_cache

from peer.errors import UserError
from peer.learning import estimator_learner
from peer.learning.learner import Learner
from peer.learning.partition import deal
from peer.learning.sources import load_dataset
from peer.plan import Plan

_plan_dataset = lru_cache(maxsize=1)(load_dataset)
"""A built-in data set never changes: peers of one process share it."""


def make_learner(
    plan: Plan,
    index: int,
    *,
    data: str | None = None,
    model: str | None = None,
    device: str = "cpu",
    threads: int = 1,
) -> Learner:
    """Return the learner of peer `index`.

    `data` is a spec of the peer's own data instead of its share of the plan's; `model` the import
    path of a module factory, for plans whose model is `custom`; `device` is cpu or cuda; `threads`
    is how many torch uses in this process. Raises UserError when something is missing or does not
    fit.

    [choice] One thread if not told otherwise: small models gain little from a second, lose tenfold
    when peers share the cores, and one thread repeats bit by bit.
    """
    if (plan.model == "custom") != (model is not None):
        if model is None:
            raise UserError("the plan's model is custom", "name it: --model module:function")
        raise UserError(f"the plan's model is {plan.model}, not custom", "leave out --model")
    if data is None and plan.data == "own":
        raise UserError("the plan wants each peer's own data", "name them: --data SPEC")
    load = _plan_dataset if data is None else load_dataset
    dataset = load(data or plan.data, seed=plan.seed, classes=plan.classes)
    dealt = deal(dataset, plan, index, own=data is not None)
    if plan.model in estimator_learner.KINDS:
        if device != "cpu":
            raise UserError(f"the model {plan.model} runs on the cpu only, not on {device}")
        return estimator_learner.EstimatorLearner(plan.model, dealt, plan, index)

    import torch

    from peer.learning import models
    from peer.learning.torch_learner import TorchLearner

    torch.set_num_threads(threads)
    if model is None:
        module = models.build_model(plan.model, dealt.shape, dealt.classes, plan.seed)
    else:
        factory = models.load_factory(model)
        module = models.instantiate(factory, dealt.shape, dealt.classes, plan.seed)
    return TorchLearner(module, dealt, plan, index, device=device)
