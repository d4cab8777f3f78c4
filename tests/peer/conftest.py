"""What tests of real federations share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from live import Start

from peer.plan import Plan
from simulations.processes import Federation


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Start]:
    """Make federations that end with the test; no process may be left."""
    with ExitStack() as stack:

        def make(
            plan: Plan, name: str = "run", *, start: int | None = None, **more: Any
        ) -> Federation:
            made = Federation(plan, tmp_path / name, **more)
            stack.callback(made.terminate, 2.0)
            made.bootstrap.start()
            for worker in made.peers[:start]:
                worker.start()
            return made

        yield make
    assert psutil.Process().children(recursive=True) == []
