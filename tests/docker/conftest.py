"""What tests in containers need: an engine, and the image of this tree."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from compose import BUILD_SECONDS, compose


@pytest.fixture(scope="session")
def image() -> None:
    """Build the image of the tree as it is. Skips where there is no Docker engine."""
    if shutil.which("docker") is None:
        pytest.skip("no docker command")
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("no Docker engine answers")
    compose("build", "bootstrap", timeout=BUILD_SECONDS)
