"""One peer of the soak: all of `peer` but for torch, so that twenty of them start on two cores.

Its learner is of numpy alone and takes a second a round. SIGUSR1 blocks its event loop, as a
mistake in a program would: the process lives, its sockets accept, and nothing answers.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "simulations"))

from softmax import Softmax

from peer.command import end_on_signal, run_command
from peer.display import configure_logging
from peer.hosting import host
from peer.learning.learner import Vector
from peer.settings import PeerSettings

PACE = 1.0
"""Seconds of a round's training, which happens in a thread as that of any learner."""
BLOCKED = 45.0
"""Seconds for which SIGUSR1 blocks the loop."""


class Paced(Softmax):
    """A learner that takes its time."""

    def fit(self, model: Vector, t: int) -> Vector:
        """Return w^{t-1/2} [e], a second later."""
        time.sleep(PACE)
        return super().fit(model, t)


def main() -> None:
    """Run the peer that the flags describe."""
    parser = argparse.ArgumentParser()
    for name in ("bootstrap", "state", "index", "listen"):
        parser.add_argument(f"--{name}")
    settings = PeerSettings.gather(
        config=None, log="json", insecure=True, **vars(parser.parse_args())
    )
    configure_logging(settings.log)
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(BLOCKED))
    end_on_signal(host(settings, make_learner=Paced))


if __name__ == "__main__":
    run_command(main)
