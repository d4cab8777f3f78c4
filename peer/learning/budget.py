"""What of its epsilon a peer has spent. Imports neither torch nor, before it is asked, Opacus."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from peer.errors import UserError
from peer.plan import PrivacyPlan

log = logging.getLogger(__name__)

_ORDERS = [1 + x / 10 for x in range(1, 100)] + [*range(12, 64), 128, 256, 512, 1024]


class Spent(NamedTuple):
    """Steps of DP-SGD that were taken: each with the noise multiplier `noise` (sigma), on samples
    drawn with the probability `rate` (q)."""

    noise: float
    rate: float
    steps: int


class Budget:
    """The epsilon of one peer's training samples, over all its lives: what is spent stays spent.

    Raises UserError when Opacus is not installed.
    """

    def __init__(self, plan: PrivacyPlan, spent: Iterable[Spent] = ()) -> None:
        self._plan = plan
        self.spent = list(spent)
        self.epsilon = self._epsilon(self.spent)
        """What is spent of epsilon, at the plan's delta."""
        self.exhausted = False
        """Whether there was too little left of it for the last round that was asked for."""

    def check(self, rate: float, steps: int) -> None:
        """Raise UserError when nothing is spent yet and there is too little for a first round of
        so many steps on samples drawn with probability `rate`."""
        assert self._plan.noise is not None
        needed = self._epsilon([Spent(self._plan.noise, rate, steps)])
        if not self.spent and needed > self._plan.epsilon:
            raise UserError(
                f"privacy.epsilon = {self._plan.epsilon:g} is too little: one round spends "
                f"{needed:.2f}, and nothing would ever be learned",
                "more samples a peer, smaller batches, fewer epochs or more noise spend less",
            )

    def spend(self, rate: float, steps: int) -> bool:
        """Book steps on samples drawn with probability `rate`, if there is enough left for all."""
        assert self._plan.noise is not None
        *earlier, last = self.spent or [Spent(self._plan.noise, rate, 0)]
        if (last.noise, last.rate) == (self._plan.noise, rate):
            spent = [*earlier, last._replace(steps=last.steps + steps)]
        else:
            spent = [*earlier, last, Spent(self._plan.noise, rate, steps)]
        epsilon = self._epsilon(spent)
        if epsilon > self._plan.epsilon and not self.exhausted:
            log.warning(
                "%.2f of epsilon = %g is spent, a round more would make it %.2f: training stops",
                self.epsilon, self._plan.epsilon, epsilon,
            )  # fmt: skip
        self.exhausted = epsilon > self._plan.epsilon
        if not self.exhausted:
            self.spent, self.epsilon = spent, epsilon
        return not self.exhausted

    def _epsilon(self, spent: list[Spent]) -> float:
        """Return an upper bound on the epsilon of steps (Mironov et al. 2019, by Opacus)."""
        try:
            from opacus.accountants import RDPAccountant
        except ImportError:
            raise UserError(
                "the plan trains with differential privacy, and Opacus is not installed",
                "pip install 'panmesh[dp]'",
            ) from None
        accountant = RDPAccountant()
        accountant.history = [tuple(part) for part in spent]
        return float(accountant.get_epsilon(self._plan.delta, alphas=_ORDERS))
