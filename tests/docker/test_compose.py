"""docker-compose.yml as it stands: eight containers form a federation and find their clusters."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from compose import BUILD_SECONDS, compose

from peer.rundir import merge

PEERS = 8
RUN_SECONDS = 300

pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUILD_SECONDS + RUN_SECONDS + 120)]


class Project:
    """One compose project under a name of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *arguments: str, timeout: float = 120) -> str:
        return compose("--project-name", self.name, *arguments, timeout=timeout)

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's containers, ended ones included."""
        return self.run("ps", "--all", "--quiet", service).split()


def inspect(container: str) -> dict[str, object]:
    report = subprocess.check_output(["docker", "inspect", container], text=True)
    found: dict[str, object] = json.loads(report)[0]
    return found


def states(containers: list[str]) -> list[dict[str, object]]:
    found = [inspect(container)["State"] for container in containers]
    return [state for state in found if isinstance(state, dict)]


@pytest.fixture
def project(image: None) -> Iterator[Project]:
    project = Project(f"panmesh-test-{os.getpid()}")
    try:
        yield project
    finally:
        project.run("down", "--volumes", "--timeout", "5")


def test_eight_containers_find_their_clusters(project: Project, tmp_path: Path) -> None:
    project.run("up", "--detach", "--scale", f"peer={PEERS}", timeout=RUN_SECONDS)
    peers = project.containers("peer")
    assert len(peers) == PEERS
    deadline = time.monotonic() + RUN_SECONDS
    while any(state["Running"] for state in states(peers)):
        assert time.monotonic() < deadline, project.run("logs", "--tail", "10")
        time.sleep(1)
    assert [state["ExitCode"] for state in states(peers)] == [0] * PEERS, project.run("logs")
    for number, container in enumerate(peers):
        target = tmp_path / f"peer-{number}"
        subprocess.run(["docker", "cp", f"{container}:/state", target], check=True)
    summary = merge(sorted(tmp_path.glob("peer-*")), tmp_path / "run")
    assert summary["finished"] == PEERS
    assert summary["precision"] == 1.0
    assert summary["clusters_found"] == 2
    assert summary["accuracy_mean"] > 0.88


def test_containers_are_contained(project: Project) -> None:
    project.run("up", "--detach", "--scale", "peer=1", timeout=RUN_SECONDS)
    for service in ("bootstrap", "peer"):
        (container,) = project.containers(service)
        report = inspect(container)
        host, config = report["HostConfig"], report["Config"]
        assert isinstance(host, dict)
        assert isinstance(config, dict)
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert host["Memory"] > 0
        assert config["User"] not in ("", "root", "0")
    tools = ["sh", "-c", "command -v gcc cc make pip || true"]
    assert project.run("exec", "-T", "bootstrap", *tools).strip() == ""
