"""The `peer` command: run a peer, and use what it learned."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peer.command import end_on_signal, run_command
from peer.display import PeerView, RoundLog, configure_logging
from peer.errors import UserError
from peer.learning.local_import import import_module
from peer.memory import return_freed_memory
from peer.plan import Plan
from peer.plan_check import check_plan
from peer.rundir import HEALTH, MetricRow
from peer.settings import PeerSettings, replica_states

if TYPE_CHECKING:
    from peer.network.mqtt import Login

logger = logging.getLogger(__name__)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A peer that finds the peers worth learning with.",
)
config_app = typer.Typer(no_args_is_help=True, help="What this peer would run with.")
app.add_typer(config_app, name="config")
federation_app = typer.Typer(no_args_is_help=True, help="Who belongs to a federation.")
app.add_typer(federation_app, name="federation")
keys_app = typer.Typer(no_args_is_help=True, help="Who this peer is.")
app.add_typer(keys_app, name="keys")

HEALTHY_AGE = 15.0
"""Seconds after which a health file is too old: the event loop stands, or the process is gone."""

Strings = list[str] | None
StateOption = Annotated[Path | None, typer.Option(help="Directory of this peer's state.")]
BrokerOption = Annotated[
    str | None,
    typer.Option(
        help="Broker to meet at without a bootstrap node.",
        metavar="mqtts://USER@HOST[:PORT]/FEDERATION",
    ),
]
BrokerCa = Annotated[
    Path | None, typer.Option(help="File with the CA certificate that the broker's is from.")
]
BrokerPassword = Annotated[
    Path | None, typer.Option("--mqtt-password", help="File with the broker's password.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file with settings.", envvar="PANMESH_CONFIG")
]


def main() -> None:
    """Run the command line."""
    run_command(app)


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    *,
    bootstrap: Annotated[
        Strings, typer.Option(help="Bootstrap node; repeatable.", metavar="HOST:PORT")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Plan file, to run without a bootstrap node.")
    ] = None,
    index: Annotated[int | None, typer.Option(help="This peer's index, with --plan.")] = None,
    peer: Annotated[
        Strings, typer.Option(help="Another peer to dial; repeatable.", metavar="HOST:PORT")
    ] = None,
    mqtt: BrokerOption = None,
    mqtt_ca: BrokerCa = None,
    mqtt_password_file: BrokerPassword = None,
    state: StateOption = None,
    data: Annotated[str | None, typer.Option(help="This peer's own data.", metavar="SPEC")] = None,
    model: Annotated[
        str | None, typer.Option(help="Factory of the model.", metavar="MODULE:FUNCTION")
    ] = None,
    imports: Annotated[
        Strings,
        typer.Option(
            "--import", help="Module with methods of your own; repeatable.", metavar="MODULE"
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="Address to listen on.", metavar="HOST:PORT")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="What others dial; auto finds it.", metavar="HOST[:PORT]")
    ] = None,
    federation: Annotated[
        Path | None,
        typer.Option(help="Federation file: who is admitted. Connections are then encrypted."),
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Listen beyond loopback without keys.")
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option("--secret", help="File with the secret by which updates are permuted."),
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Peers in this process.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of one training step.")] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="Where Prometheus finds this process's metrics.", metavar="HOST:PORT"),
    ] = None,
    log: Annotated[str | None, typer.Option(help="text or json.")] = None,
    config: ConfigFile = None,
) -> None:
    """Join a federation and run it to its last round.

    Every setting can also come from the environment (PANMESH_BOOTSTRAP, PANMESH_STATE, ...) or from
    the --config file.
    """
    flags = {name: value for name, value in locals().items() if name not in ("context", "config")}
    if context.invoked_subcommand is not None:
        context.obj = (config, flags)
        return
    settings = PeerSettings.gather(config=config, **flags)
    settings.check()
    for module in settings.imports:
        import_module(module, "--import")
    configure_logging(settings.log)
    if settings.plan is not None:
        check_plan(Plan.load(settings.plan), data=settings.data)
    return_freed_memory()
    end_on_signal(_host(settings))


async def _host(settings: PeerSettings) -> None:
    from peer.hosting import host

    if settings.log == "json":
        await host(settings, on_round=_log_round, traces=False)
        return
    if settings.replicas > 1 or not sys.stdout.isatty():
        await host(settings, on_round=RoundLog().update, traces=False)
        return
    with PeerView() as view:
        await host(settings, on_round=view.update, traces=False)


def _log_round(plan: Plan, row: MetricRow) -> None:
    """Log a finished round for programs, which have no live view to look at."""
    facts = row.model_dump(include={"t", "index", "accuracy", "precision", "bag_size"})
    traffic = row.model_dump(include={"wire_sent", "wire_received"})
    logger.info("round %d of %d", row.t, plan.rounds, extra=facts | traffic)


@app.command()
def health(
    context: typer.Context,
    state: StateOption = None,
    ready: Annotated[
        bool, typer.Option("--ready", help="Ask, too, whether it has found another peer.")
    ] = False,
) -> None:
    """Exit with 0 if the peer of this state directory, or every replica there, is alive, else 1."""
    path = _state_of(context, state)
    replicas = replica_states(path)
    reports = [_health(one, ready=ready) for one in replicas or [path]]
    alive = sum(healthy for healthy, _ in reports)
    if replicas:
        print(f"{alive} of {len(replicas)} replicas are {'ready' if ready else 'alive'}")
    for place, (healthy, line) in zip(replicas or [path], reports, strict=True):
        if not (replicas and healthy):
            print(f"{place.name} {line}" if replicas else line)
    raise typer.Exit(0 if alive == len(reports) else 1)


def _health(state: Path, *, ready: bool) -> tuple[bool, str]:
    """Return whether the peer of a state directory is alive, and `ready` if that is asked for, and
    a line about it."""
    try:
        report = json.loads((state / HEALTH).read_text(encoding="utf-8"))
        age = time.time() - float(report["time"])
        finished, found = report["status"]["finished"], bool(report["ready"])
    except (OSError, ValueError, KeyError, TypeError):
        return False, f"no peer has run in {state}"
    # A file from the future was written before somebody set the clock back.
    healthy = abs(age) < HEALTHY_AGE
    word = "alive" if healthy else "silent"
    if healthy and ready:
        healthy, word = found, "ready" if found else "alive, but it has found no other peer"
    return healthy, f"{word}: heard of {age:.0f} s ago, after round {finished}"


@app.command()
def export(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="File to write.")],
    state: StateOption = None,
    form: Annotated[
        str | None,
        typer.Option("--format", help="safetensors, torch or onnx; by the file's ending."),
    ] = None,
) -> None:
    """Write the model of a state directory's last finished round for use elsewhere."""
    from peer.export import export_model

    kind = export_model(_state_of(context, state), out, form)
    print(f"wrote {out} ({kind})")


@app.command()
def predict(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="npz (key x), csv with a header, or an image.")],
    state: StateOption = None,
    out: Annotated[Path | None, typer.Option(help="File to write; else printed.")] = None,
    label: Annotated[str | None, typer.Option(help="Column of a csv to leave out.")] = None,
) -> None:
    """Apply the model of a state directory to the samples in FILE: a class a line."""
    from peer.export import predict_file

    lines = predict_file(_state_of(context, state), file, label=label)
    text = "".join(f"{line}\n" for line in lines)
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, encoding="utf-8")
        print(f"wrote {len(lines)} predictions to {out}")


@app.command()
def watch(
    context: typer.Context,
    *,
    mqtt: BrokerOption = None,
    mqtt_ca: BrokerCa = None,
    mqtt_password_file: BrokerPassword = None,
    plan: Annotated[Path | None, typer.Option(help="The plan that the federation runs.")] = None,
    federation: Annotated[
        Path | None, typer.Option(help="Federation file, whose root has signed the plan.")
    ] = None,
) -> None:
    """Follow a federation that meets at a broker, live, until its peers have finished."""
    from peer.network.federation import Federation
    from peer.watch import watch as follow

    settings, login = _broker_of(
        context,
        mqtt=mqtt,
        mqtt_ca=mqtt_ca,
        mqtt_password_file=mqtt_password_file,
        plan=plan,
        federation=federation,
    )
    configure_logging(settings.log)
    known = None if settings.plan is None else Plan.load(settings.plan)
    members = None if settings.federation is None else Federation.load(settings.federation)
    end_on_signal(follow(login, plan=known, federation=members))


@federation_app.command("publish")
def publish_plan(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(help="The plan that the federation runs.")],
    root: Annotated[Path, typer.Option(help="The secret key of the federation's root, root.pem.")],
    *,
    mqtt: BrokerOption = None,
    mqtt_ca: BrokerCa = None,
    mqtt_password_file: BrokerPassword = None,
) -> None:
    """Sign a plan and leave it at a broker, where the federation's peers find it."""
    from peer.network.identity import IdentityKey
    from peer.watch import publish

    key = IdentityKey.load(root)
    _, login = _broker_of(
        context, mqtt=mqtt, mqtt_ca=mqtt_ca, mqtt_password_file=mqtt_password_file
    )
    end_on_signal(publish(login, Plan.load(plan), key))
    print(f"the federation {login.federation} at {login.place} runs {plan}")


def _broker_of(context: typer.Context, **flags: object) -> tuple[PeerSettings, Login]:
    """Return the settings of a command that needs a broker, and the broker. Raises UserError."""
    config, general = context.obj
    given = {name: value for name, value in flags.items() if value is not None}
    settings = PeerSettings.gather(config=config, **(general | given))
    login = settings.broker()
    if login is None:
        raise UserError("no broker is named", "give --mqtt mqtts://USER@HOST:8883/FEDERATION")
    return settings, login


@config_app.command("show")
def show_config(context: typer.Context) -> None:
    """Print the settings that this command line, environment and file give, secrets masked."""
    config, flags = context.obj
    settings = PeerSettings.gather(config=config, **flags)
    print(settings.model_dump_json(indent=2))


@keys_app.command("new")
def new_keys(context: typer.Context, state: StateOption = None) -> None:
    """Make this peer's secret key, in its state directory, and print the id that follows from it.

    A key that is there already is never replaced.
    """
    from peer.network.identity import KEY_FILE, IdentityKey

    path = _state_of(context, state) / KEY_FILE
    key = IdentityKey.generate()
    key.save(path)
    print(f"wrote {path}: keep it secret\nid {key.peer}")


@keys_app.command("show")
def show_keys(context: typer.Context, state: StateOption = None) -> None:
    """Print what others may know of this peer's key: its id, the KEY of its addresses
    (KEY@HOST:PORT), and the card by which a federation lists it."""
    from peer.network.federation import Card
    from peer.network.identity import KEY_FILE, IdentityKey

    key = IdentityKey.load(_state_of(context, state) / KEY_FILE)
    card = Card.of(key)
    print(f"id {card.peer}\nkey {card.curve}\ncard {card}")


FederationFile = Annotated[Path, typer.Argument(help="Federation file.")]


@federation_app.command("new")
def new_federation(
    file: FederationFile,
    keys: Annotated[
        Path | None,
        typer.Option(help="Folder for root.pem and bootstrap.pem; that of FILE if not given."),
    ] = None,
    token: Annotated[
        bool, typer.Option(help="Admit whoever has the file, or listed members only.")
    ] = True,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Do nothing when FILE exists.")
    ] = False,
) -> None:
    """Make a federation: FILE for all members, and the secret keys of its root and its bootstrap
    node."""
    from peer.network.federation import found

    if if_missing and file.exists():
        return
    folder = keys or file.parent
    found(file, folder, token=token)
    print(f"wrote {file} for all members, {folder / 'bootstrap.pem'} for the bootstrap node alone")
    print(f"wrote {folder / 'root.pem'}: it signs plans, keep it off the network")


@federation_app.command("add")
def add_member(
    file: FederationFile,
    card: Annotated[str, typer.Argument(help="What peer keys show prints at the new member.")],
    name: Annotated[str, typer.Option(help="A name for people.")] = "",
) -> None:
    """List a member, so that it is admitted by its key."""
    from peer.network.federation import Card, Federation, rewrite

    member = Card.parse(card, name)
    rewrite(file, Federation.load(file).with_member(member))
    print(f"listed {member.peer}")


@federation_app.command("revoke")
def revoke_member(
    file: FederationFile,
    peer: Annotated[str, typer.Argument(help="Id of the peer to refuse from now on.")],
    new_token: Annotated[
        bool, typer.Option("--new-token", help="Refuse all who do not get the new file, too.")
    ] = False,
) -> None:
    """Refuse a peer from now on, at every member that has the new file."""
    from peer.network.federation import Federation, rewrite

    federation = Federation.load(file).without(peer)
    rewrite(file, federation.with_new_token() if new_token else federation)
    print(f"revoked {peer}")


def _state_of(context: typer.Context, state: Path | None) -> Path:
    config, flags = context.obj
    if state is not None:
        flags = flags | {"state": state}
    return PeerSettings.gather(config=config, **flags).state
