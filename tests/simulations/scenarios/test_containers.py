"""Where no containers can be made, one is told why, before anything else happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.errors import UserError
from simulations.scenarios.containers import Containers

ANSWERS = {
    "no engine": ("echo Cannot connect to the Docker daemon. >&2; exit 1", "Cannot connect"),
    "no image": ("exit 0", "no image panmesh"),
}


@pytest.mark.parametrize(("body", "message"), ANSWERS.values(), ids=ANSWERS)
def test_without_engine_or_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, message: str
) -> None:
    command = tmp_path / "docker"
    command.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=message) as caught:
        Containers(4)
    assert caught.value.hint


def test_without_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="needs the command docker"):
        Containers(4)
