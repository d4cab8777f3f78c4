"""A real MQTT broker for the tests: Mosquitto on a free loopback port, with TLS and passwords."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import SecretStr

from peer.network.mqtt import Login
from simulations.processes import free_port

PROGRAM = shutil.which("mosquitto", path="/usr/local/sbin:/usr/sbin:/usr/local/bin:/usr/bin:/bin")

needs_mosquitto = pytest.mark.skipif(
    PROGRAM is None, reason="Mosquitto is not installed (Debian: apt-get install mosquitto)"
)

PASSWORD = "correct horse"


@dataclass
class Mosquitto:
    """A broker that can be killed and started again; what it retains is lost with it.

    It knows one user, `panmesh`, and offers TLS with a certificate for 127.0.0.1, signed by `ca`.
    """

    directory: Path
    port: int = field(default_factory=free_port)
    access: str = "topic readwrite #"
    process: subprocess.Popen[bytes] | None = None

    @property
    def ca(self) -> Path:
        """The certificate by which clients check the broker's."""
        return self.directory / "ca.pem"

    @property
    def url(self) -> str:
        """What a person gives to `--mqtt`, but for the federation."""
        return f"mqtts://panmesh@127.0.0.1:{self.port}"

    @property
    def flags(self) -> list[str]:
        """What a person gives to a command."""
        return [
            *("--mqtt", f"{self.url}/town", "--mqtt-ca", str(self.ca)),
            *("--mqtt-password", str(self.directory / "password.txt")),
        ]

    @property
    def login(self) -> Login:
        """How to log in to it."""
        return Login.parse(f"{self.url}/town", password=SecretStr(PASSWORD), ca=self.ca)

    def prepare(self) -> None:
        """Write certificates, passwords and configuration."""
        assert PROGRAM is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        certify(self.directory)
        plain = self.directory / "password.txt"
        plain.write_text(PASSWORD + "\n")
        plain.chmod(0o600)
        (self.directory / "acl").write_text(f"user panmesh\n{self.access}\n")
        tool = shutil.which("mosquitto_passwd")
        assert tool is not None
        passwords = self.directory / "passwords"
        subprocess.run([tool, "-c", "-b", passwords, "panmesh", PASSWORD], check=True)
        passwords.chmod(0o600)
        (self.directory / "mosquitto.conf").write_text(
            f"listener {self.port} 127.0.0.1\n"
            f"certfile {self.directory}/server.pem\nkeyfile {self.directory}/server.key\n"
            f"password_file {passwords}\nacl_file {self.directory}/acl\n"
            "allow_anonymous false\npersistence false\nmax_queued_messages 10000\nuser root\n"
        )

    def start(self) -> None:
        """Start the broker, and return once it listens."""
        assert PROGRAM is not None
        with (self.directory / "mosquitto.log").open("ab") as log:
            self.process = subprocess.Popen(
                [PROGRAM, "-c", str(self.directory / "mosquitto.conf")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                assert self.process.poll() is None, (self.directory / "mosquitto.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            else:
                return

    def kill(self) -> None:
        """End the broker as a crash does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextmanager
def mosquitto(directory: Path, *, access: str = "topic readwrite #") -> Iterator[Mosquitto]:
    """Run a broker for as long as the block runs."""
    broker = Mosquitto(directory, access=access)
    broker.prepare()
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()


def certify(directory: Path) -> None:
    """Write the certificate of a new CA, and one for 127.0.0.1 with its key."""
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "panmesh test CA")])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    basic = x509.BasicConstraints(ca=True, path_length=None)
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)

    def certificate(
        subject: x509.Name, public: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + datetime.timedelta(days=30))
        )

    ca = certificate(ca_name, ca_key.public_key()).add_extension(basic, critical=True)
    server = certificate(name, key.public_key()).add_extension(address, critical=False)
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (directory / "server.key").write_bytes(secret)
    for file, builder in (("ca.pem", ca), ("server.pem", server)):
        signed = builder.sign(ca_key, hashes.SHA256())
        (directory / file).write_bytes(signed.public_bytes(pem))
