"""The repository's compose file, by whichever compose command this machine has."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD_SECONDS = 900


def compose_command() -> list[str]:
    """Return the compose command of this machine: $COMPOSE_CMD, version 2's, or version 1's."""
    if "COMPOSE_CMD" in os.environ:
        return os.environ["COMPOSE_CMD"].split()
    probe = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker", "compose"] if probe.returncode == 0 else ["docker-compose"]


def compose(*arguments: str, timeout: float = 120) -> str:
    """Run the compose command, and return what it prints; fail the test when it fails."""
    done = subprocess.run(
        [*compose_command(), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout
