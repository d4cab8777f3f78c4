"""What a device decides for itself: addresses, data, state; everything that is not in the plan.

Each setting comes from the command line, else the environment (`PANMESH_` and its name in
capitals), else the file given by `--config`, else its default here.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_serializer, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from peer.errors import UserError
from peer.network.address import dial_address, parse_address, without_password
from peer.plan import MAX_PEERS, describe
from peer.secret_files import read_secret

if TYPE_CHECKING:
    from peer.network.mqtt import Login

REPLICA = "replica-"


class PeerSettings(BaseSettings):
    """Settings of one `peer` process."""

    model_config = SettingsConfigDict(env_prefix="PANMESH_", extra="forbid", frozen=True)

    bootstrap: Annotated[list[str], NoDecode] = Field(
        default=[], description="bootstrap nodes, HOST:PORT; several separated by commas"
    )
    plan: Path | None = Field(
        default=None, description="a plan file, to run without a bootstrap node"
    )
    index: int | None = Field(
        default=None, ge=0, lt=MAX_PEERS, description="this peer's index; needed with a plan file"
    )
    peer: Annotated[list[str], NoDecode] = Field(
        default=[], description="other peers to dial first, HOST:PORT; separated by commas"
    )
    mqtt: str | None = Field(
        default=None,
        description="broker to meet at without a bootstrap node, mqtts://USER@HOST:8883/FEDERATION",
    )
    mqtt_ca: Path | None = Field(
        default=None, description="file with the certificate of the CA that the broker's is from"
    )
    mqtt_password_file: Path | None = Field(
        default=None, description="file with the broker's password"
    )
    mqtt_password: SecretStr | None = Field(
        default=None, description="the password itself; rather not on a command line"
    )
    state: Path = Field(default=Path("peer-state"), description="directory of this peer's state")
    data: str | None = Field(
        default=None, description="this peer's own data; the plan's if not given"
    )
    model: str | None = Field(
        default=None,
        description="module:function that makes the model, for plans with model = custom",
    )
    imports: Annotated[list[str], NoDecode] = Field(
        default=[], description="modules with methods of your own; separated by commas"
    )
    listen: str = Field(
        default="127.0.0.1:0", description="HOST:PORT to listen on; port 0: any free"
    )
    advertise: str | None = Field(
        default=None,
        description="HOST or HOST:PORT that others dial; auto: the one that faces the bootstrap",
    )
    federation: Path | None = Field(
        default=None, description="federation file: who is admitted, by which keys"
    )
    insecure: bool = Field(
        default=False, description="whether to listen beyond loopback without a federation file"
    )
    secret_file: Path | None = Field(
        default=None, description="file with the federation's secret, for plans that permute"
    )
    secret: SecretStr | None = Field(
        default=None, description="the secret itself; rather not on a command line"
    )
    replicas: int = Field(default=1, ge=1, le=1000, description="peers in this process")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where to train")
    threads: int = Field(default=1, ge=1, le=1024, description="threads of one training step")
    metrics: str | None = Field(
        default=None, description="HOST:PORT at which Prometheus finds the metrics of this process"
    )
    log: Literal["text", "json"] = Field(default="text", description="form of the log lines")

    @field_validator("bootstrap", "peer", "imports", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Take values apart at commas: a repeated flag may also hold several."""
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            return value
        return [part.strip() for item in value for part in item.split(",") if part.strip()]

    @field_serializer("mqtt", when_used="json")
    def _shown(self, url: str | None) -> str | None:
        """Mask a password that somebody wrote into the URL: it is refused, but only later."""
        return None if url is None else without_password(url)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the signature is the library's
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: flags, environment, configuration file."""
        file = TomlConfigSettingsSource(settings_cls)
        return (init_settings, env_settings, file)

    @classmethod
    def gather(cls, *, config: Path | None, **flags: Any) -> PeerSettings:
        """Return the settings of a process; `flags` that are None or empty were not given.

        Raises UserError that names the setting and what is wrong with it.
        """
        if config is not None:
            try:
                tomllib.loads(config.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
                raise UserError(f"cannot read the configuration {config}: {error}") from None

        class FromFile(cls):  # type: ignore[valid-type, misc]
            model_config = SettingsConfigDict(toml_file=config)

        given = {name: value for name, value in flags.items() if value not in (None, [], ())}
        try:
            settings: PeerSettings = FromFile(**given)
        except ValidationError as error:
            raise UserError(f"settings: {describe(error)}", "peer config show lists them") from None
        return settings

    def shared_secret(self) -> bytes | None:
        """Return the federation's secret, None without one. Raises UserError for a file that
        cannot be read, by others can, or is too long."""
        if self.secret_file is not None:
            return read_secret(self.secret_file)
        return None if self.secret is None else self.secret.get_secret_value().encode()

    def broker(self) -> Login | None:
        """Return how to log in to the broker, None without one. Raises UserError."""
        if self.mqtt is None:
            return None
        from peer.network.mqtt import Login

        password = self.mqtt_password
        if self.mqtt_password_file is not None:
            password = SecretStr(read_secret(self.mqtt_password_file).decode(errors="replace"))
        return Login.parse(self.mqtt, password=password, ca=self.mqtt_ca)

    def replica(self, number: int) -> PeerSettings:
        """Return the settings of one of the process's replicas: own state, own ports, own index."""
        if self.replicas == 1:
            return self
        host, port = parse_address(self.listen, listening=True)
        # Every peer listens on two ports: control, and data on the next.
        shifted = port + 2 * number if port else 0
        return self.model_copy(
            update={
                "state": self.state / f"{REPLICA}{number}",
                "listen": f"{host}:{shifted}",
                "index": None if self.index is None else self.index + number,
            }
        )

    def check(self) -> None:
        """Raise UserError when these settings do not name a federation to join, or no address."""
        if not self.bootstrap and self.plan is None and self.mqtt is None:
            raise UserError(
                "no federation to join",
                "give --bootstrap HOST:PORT, or --mqtt mqtts://HOST, or --plan FILE --index I "
                "--peer HOST:PORT",
            )
        if (broker := self.broker()) is not None:
            broker.tls_context()
        if self.plan is not None and self.bootstrap:
            raise UserError(
                "--plan and --bootstrap exclude each other", "the bootstrap node has a plan"
            )
        if self.plan is not None and self.index is None and self.mqtt is None:
            raise UserError("--plan needs --index I", "each peer of a plan file has its own index")
        parse_address(self.listen, listening=True)
        for address in (*self.bootstrap, *self.peer):
            dial_address(address)


def replica_states(state: Path) -> list[Path]:
    """Return the directories of the replicas that have run with a state directory, by number."""
    found = [path for path in state.glob(f"{REPLICA}*") if path.name[len(REPLICA) :].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[len(REPLICA) :]))
