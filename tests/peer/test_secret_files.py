"""Files with secrets: nobody else's to read, unless a container's runtime has put them there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peer.errors import UserError
from peer.secret_files import MAX_SECRET, read_secret, read_secret_file, write_secret_file
from peer.settings import PeerSettings

SECRET = "sixteen or more bytes"


def written(path: Path, *, mode: int = 0o600, content: str = SECRET + "\r\n") -> Path:
    path.touch(mode=0o600)
    path.write_text(content)
    path.chmod(mode)
    return path


def test_what_a_person_wrote_is_read_without_its_newline(tmp_path: Path) -> None:
    path = written(tmp_path / "secret")
    assert read_secret(path) == SECRET.encode()
    assert PeerSettings(secret_file=path).shared_secret() == SECRET.encode()
    login = PeerSettings(mqtt="mqtts://me@broker", mqtt_password_file=path).broker()
    assert login is not None
    assert login.password is not None
    assert login.password.get_secret_value() == SECRET
    with pytest.raises(UserError, match="cannot read"):
        read_secret(tmp_path / "none")
    with pytest.raises(UserError, match="longer than 65536 bytes"):
        read_secret(written(path, content="x" * (MAX_SECRET + 1)))


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o602, 0o444])
def test_what_others_can_read_is_refused_wherever_it_is_given(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "secret", mode=mode)
    refused = "secret holds a secret that others can read"
    with pytest.raises(UserError, match=refused) as caught:
        read_secret_file(path, 100)
    assert caught.value.hint == f"chmod 600 {path}"
    with pytest.raises(UserError, match=refused):
        PeerSettings(secret_file=path).shared_secret()
    with pytest.raises(UserError, match=refused):
        PeerSettings(mqtt="mqtts://me@broker", mqtt_password_file=path).broker()


def test_what_is_written_can_be_read_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "secret"
    write_secret_file(path, b"key")
    assert read_secret_file(path, 3) == b"key"
    with pytest.raises(UserError, match="exists"):
        write_secret_file(path, b"another")


READ = (
    "import sys, pathlib, peer.secret_files as s; print(s.read_secret(pathlib.Path(sys.argv[1])))"
)


def test_a_container_secret_is_taken_as_it_is_mounted(tmp_path: Path) -> None:
    path = written(tmp_path / "secret", mode=0o444)
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 77; shift; exec "$@"'
    inside = [sys.executable, "-c", READ, str(path)]
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    ended = subprocess.run(
        ["unshare", *user, "--mount", "sh", "-c", script, "sh", str(tmp_path), *inside],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if ended.returncode in (1, 77) and "Error" not in ended.stderr:
        pytest.skip("nothing can be mounted here")
    assert ended.stdout == f"{SECRET.encode()!r}\n", ended.stderr
