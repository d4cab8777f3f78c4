"""The `simulate` command."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peer.command import run_command
from peer.errors import FederationError, UserError
from peer.learning.local_import import import_module
from peer.plan import Plan

if TYPE_CHECKING:
    from simulations.attacks import Threat
    from simulations.runs import Equipment
    from simulations.scenarios.runs import Ground

FAILED = 1
EQUIPMENT = "--exact, --data, --model, --import, --device and --precision are for"
ATTACKERS_HINT = "a scenario says for itself who attacks, in [peers] or in a class of peers"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Federations on one machine: run them, compare them, draw them.",
)


class Backend(StrEnum):
    """What a plan is run by."""

    PROCESSES = "processes"
    LABORATORY = "laboratory"
    ONE_PROCESS = "one-process"
    VIRTUAL = "virtual"
    DOCKER = "docker"


class Device(StrEnum):
    """Where the laboratory computes."""

    CPU = "cpu"
    CUDA = "cuda"


class Precision(StrEnum):
    """What the laboratory's products take."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


PlanFile = Annotated[Path, typer.Argument(help="Plan file.")]
ScenarioFile = Annotated[
    Path, typer.Argument(help="Scenario file, or the name of one that simulate list shows.")
]
DataSpec = Annotated[
    str | None,
    typer.Option(help="Data to deal to the peers, instead of the plan's.", metavar="SPEC"),
]
ModelPath = Annotated[
    str | None,
    typer.Option(help="Factory of the model of a custom plan.", metavar="MODULE:FUNCTION"),
]
Exact = Annotated[
    bool,
    typer.Option("--exact", help="Train one peer at a time: bit by bit as live peers, slower."),
]
OnDevice = Annotated[Device, typer.Option(help="Where to compute.")]
InPrecision = Annotated[
    Precision,
    typer.Option(help="What the laboratory's products take: bfloat16 is faster and rounds more."),
]
AttackName = Annotated[
    str | None,
    typer.Option("--attack", help="What some peers do, in the laboratory (simulate attacks)."),
]
EvaluateEvery = Annotated[
    int | None,
    typer.Option(help="Rounds from one evaluation to the next; a 20th of all if not given.", min=1),
]
Attackers = Annotated[
    float, typer.Option("--attackers", help="Share of every cluster that attacks.", metavar="SHARE")
]
AttackScale = Annotated[
    float | None, typer.Option(help="How strongly; the attack's usual if not given.")
]
Feign = Annotated[
    bool, typer.Option("--feign", help="Attackers lie about g, which nobody can check.")
]
Modules = Annotated[
    list[str] | None,
    typer.Option("--import", help="Module with methods of your own; repeatable.", metavar="MODULE"),
]


def main() -> None:
    """Run the command line."""
    run_command(_run)


def _run() -> None:
    try:
        app()
    except FederationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILED)


@app.command()
def demo(
    rounds: Annotated[int | None, typer.Option(help="Rounds to run.")] = None,
    peers: Annotated[int | None, typer.Option(help="Number of peers.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random draw.")] = None,
    out: Annotated[Path, typer.Option(help="Run directory to write.")] = Path("runs/demo"),
    show: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the pictures, where there is a screen.")
    ] = True,
) -> None:
    """Eight real peers in two hidden clusters find out who is like them."""
    from simulations.demo import run_demo

    files = run_demo(out, peers=peers, rounds=rounds, seed=seed)
    if show and _has_screen():
        typer.launch(str(files[0].resolve()))


@app.command()
def run(
    plan: Annotated[
        Path, typer.Argument(help="Plan or scenario file, or a scenario that simulate list shows.")
    ],
    *,
    method: Annotated[str | None, typer.Option(help="Method, instead of the plan's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, instead of the plan's.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds, instead of the plan's.")] = None,
    peers: Annotated[int | None, typer.Option(help="Peers, instead of the plan's n.")] = None,
    backend: Annotated[
        Backend | None,
        typer.Option(
            help="Real processes (for methods of peers among themselves, if not given), the "
            "laboratory, its one-process reference, or for scenarios the virtual network (if not "
            "given) or containers."
        ),
    ] = None,
    netns: Annotated[
        bool,
        typer.Option("--netns", help="Scenarios: real processes, each in a network namespace."),
    ] = False,
    animate: Annotated[
        bool, typer.Option("--animate", help="Scenarios: make a GIF of the bags forming, too.")
    ] = False,
    data: DataSpec = None,
    model: ModelPath = None,
    exact: Exact = False,
    device: OnDevice = Device.CPU,
    precision: InPrecision = Precision.FLOAT32,
    modules: Modules = None,
    attack: AttackName = None,
    attackers: Attackers = 0.2,
    attack_scale: AttackScale = None,
    feign: Feign = False,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; runs/NAME-METHOD if not given.")
    ] = None,
) -> None:
    """Run a plan or a scenario on this machine, and draw it."""
    from simulations.runs import Equipment, changed
    from simulations.scenarios.commands import run as run_scenario
    from simulations.scenarios.scenario import find, is_scenario

    import_methods(modules)
    threat = _threat(attack, attackers, attack_scale, feign)
    equipment = Equipment(False, exact, device.value, data, model, threat, precision.value)
    usual = equipment == Equipment() and not modules
    changes = {"method": method, "seed": seed, "rounds": rounds, "n": peers}
    if is_scenario(found := find(plan)):
        ground = _ground(backend, netns=netns)
        if threat is not None:
            raise UserError("--attack is for plans", ATTACKERS_HINT)
        if ground is not None and not usual:
            raise UserError(f"{EQUIPMENT} the virtual network", "leave out --backend")
        own = {f"plan.{key}": value for key, value in changes.items()}
        run_scenario(found, own, out, equipment=equipment, ground=ground, animate=animate)
        return
    if backend in (Backend.VIRTUAL, Backend.DOCKER) or animate or netns:
        raise UserError(
            f"{plan} is a plan, not a scenario: there is no network to simulate",
            "docs/scenarios.md says how to make one of it",
        )
    _run_plan(changed(Plan.load(plan), changes), backend, equipment, usual=usual, out=out)


def _ground(backend: Backend | None, *, netns: bool) -> Ground | None:
    """Return what a scenario is run on, None for the virtual network. Raises UserError."""
    from simulations.scenarios.runs import Ground

    if backend is Backend.ONE_PROCESS:
        raise UserError("scenarios do not run by one-process", "leave out --backend")
    if netns:
        if backend not in (None, Backend.PROCESSES):
            raise UserError("--netns is for real processes", "use --backend processes")
        return Ground.NAMESPACES
    real = {Backend.PROCESSES: Ground.PROCESSES, Backend.DOCKER: Ground.CONTAINERS}
    return None if backend is None else real.get(backend)


def _run_plan(
    plan: Plan, backend: Backend | None, equipment: Equipment, *, usual: bool, out: Path | None
) -> None:
    """Run a plan, by default where it can be with that equipment, and say what came of it."""
    from rich.console import Console

    from peer.matching.registry import CENTRAL
    from peer.rundir import SUMMARY
    from simulations.demo import comparison_table
    from simulations.report import write_report
    from simulations.runs import PopulationMaker, run_population, run_processes

    target = out or Path("runs") / f"{plan.name}-{plan.method}"
    if backend is None:
        live = usual and plan.method not in CENTRAL
        backend = Backend.PROCESSES if live else Backend.LABORATORY
    if backend is Backend.PROCESSES:
        if not usual:
            raise UserError(f"--attack, {EQUIPMENT} the laboratory", "use --backend laboratory")
        summary = run_processes(plan, target)
    else:
        equipment = replace(equipment, reference=backend is Backend.ONE_PROCESS)
        with PopulationMaker(equipment) as maker:
            summary = run_population(plan, target, maker=maker)
    Console(highlight=False).print(comparison_table([(backend.value, summary)]))
    if "attack" in summary:
        names = ", ".join(map(str, summary["attackers"]))
        print(f"Attack:   {summary['attack']} by peers {names}; all figures are of the others")
    print(f"Summary:  {target / SUMMARY}")
    print(f"Report:   {write_report(target)[0]}")


@app.command()
def compare(
    plan: Annotated[
        Path, typer.Argument(help="Plan or scenario file, or a scenario that simulate list shows.")
    ],
    *,
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas.")
    ] = "local,random,oracle,pens,panm-loss,panm-grad",
    seeds: Annotated[str, typer.Option(help="Seeds, as 0,1,2 or 0-9.")] = "0",
    variations: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A key of the plan (or scenario) and its values, as matching.l=6,10; repeatable.",
            metavar="KEY=V1,V2",
        ),
    ] = None,
    data: DataSpec = None,
    model: ModelPath = None,
    exact: Exact = False,
    device: OnDevice = Device.CPU,
    precision: InPrecision = Precision.FLOAT32,
    modules: Modules = None,
    attack: AttackName = None,
    attackers: Attackers = 0.2,
    attack_scale: AttackScale = None,
    feign: Feign = False,
    baseline: Annotated[
        bool, typer.Option(help="Run local too, and count the peers that do better alone.")
    ] = True,
    evaluate_every: EvaluateEvery = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of all runs; runs/NAME-compare if not given.")
    ] = None,
) -> None:
    """Run methods x seeds x settings, and put them in one table. The same command goes on."""
    from simulations.compare import compare as run_comparison
    from simulations.compare import parse_seeds
    from simulations.runs import Equipment
    from simulations.scenarios.commands import sweep as sweep_scenario
    from simulations.scenarios.scenario import find, is_scenario

    import_methods(modules)
    threat = _threat(attack, attackers, attack_scale, feign)
    equipment = Equipment(False, exact, device.value, data, model, threat, precision.value)
    if is_scenario(found := find(plan)):
        if equipment != Equipment() or modules:
            raise UserError(
                "scenarios say for themselves who attacks, and run with built-in things on the cpu",
                "leave these options out: methods, --seeds and --set remain",
            )
        if evaluate_every or not baseline:
            raise UserError("--evaluate-every and --no-baseline are for plans, not for scenarios")
        listed = ",".join(map(str, parse_seeds(seeds)))
        grid = [f"plan.method={methods}", f"plan.seed={listed}", *(variations or [])]
        sweep_scenario(found, grid, {}, out, processes=None)
        return
    chosen = Plan.load(plan)
    run_comparison(
        chosen,
        [name.strip() for name in methods.split(",") if name.strip()],
        parse_seeds(seeds),
        variations or [],
        out or Path("runs") / f"{chosen.name}-compare",
        equipment=equipment,
        baseline=baseline,
        evaluate_every=evaluate_every,
    )


@app.command()
def attacks(
    plan: PlanFile,
    *,
    names: Annotated[
        str | None,
        typer.Option("--attacks", help="Attacks, separated by commas; all if not given."),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas.")
    ] = "random,pens,panm-loss,panm-grad,cfl",
    defences: Annotated[
        list[str] | None,
        typer.Option(
            "--defence",
            help="Keys of [defence] as gate=true,clip=2, beside no defence; repeatable.",
            metavar="KEY=V,KEY=V",
        ),
    ] = None,
    undefended: Annotated[
        bool,
        typer.Option(help="Attack plans without a defence too, not only those with one."),
    ] = True,
    attackers: Attackers = 0.2,
    attack_scale: AttackScale = None,
    feign: Feign = False,
    seeds: Annotated[str, typer.Option(help="Seeds, as 0,1,2 or 0-9.")] = "0",
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A key of the plan and its value in all runs.", metavar="KEY=VALUE"
        ),
    ] = None,
    device: OnDevice = Device.CPU,
    precision: InPrecision = Precision.FLOAT32,
    evaluate_every: EvaluateEvery = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of all runs; runs/NAME-attacks if not given.")
    ] = None,
) -> None:
    """Run methods under attacks, with and without a defence, in one table. It can be resumed."""
    from simulations.attack_matrix import Matrix, parse_defences, run_matrix
    from simulations.attacks import attack_names
    from simulations.compare import parse_seeds, parse_single
    from simulations.runs import Equipment, changed

    chosen = changed(Plan.load(plan), dict(map(parse_single, overrides or [])))
    listed = attack_names() if names is None else [part.strip() for part in names.split(",")]
    threats = [_threat(name, attackers, attack_scale, feign) for name in listed]
    matrix = Matrix(
        chosen,
        [threat for threat in threats if threat is not None],
        [name.strip() for name in methods.split(",") if name.strip()],
        parse_defences(defences),
        parse_seeds(seeds),
        undefended=undefended,
    )
    run_matrix(
        matrix,
        out or Path("runs") / f"{chosen.name}-attacks",
        equipment=Equipment(device=device.value, precision=precision.value),
        evaluate_every=evaluate_every,
    )


def _threat(
    attack: str | None, attackers: float, scale: float | None, feign: bool
) -> Threat | None:
    """Return the threat that the options name. Raises UserError."""
    from simulations.attacks import Threat

    return None if attack is None else Threat(attack, attackers, scale, feign)


@app.command()
def show(
    scenario: ScenarioFile,
    *,
    out: Annotated[
        Path | None, typer.Option(help="Picture to write; runs/NAME-scenario.png if not given.")
    ] = None,
) -> None:
    """Draw a scenario's topology and script before anything runs."""
    from simulations.scenarios.commands import show as show_scenario
    from simulations.scenarios.scenario import find

    show_scenario(find(scenario), out)


@app.command()
def calibrate(
    scenario: ScenarioFile,
    *,
    peers: Annotated[int | None, typer.Option(help="Peers, instead of the plan's n.")] = None,
) -> None:
    """Measure how fast a scenario's peers train here, all at a time: what peers.speed may be."""
    from simulations.scenarios.commands import calibrate as calibrate_scenario
    from simulations.scenarios.scenario import find

    calibrate_scenario(find(scenario), {"plan.n": peers})


@app.command("list")
def list_scenarios() -> None:
    """Say which scenarios there are, and what each shows."""
    from simulations.scenarios.commands import listing

    listing()


@app.command()
def sweep(
    scenario: ScenarioFile,
    *,
    grid: Annotated[
        list[str],
        typer.Option(
            help="A key of the scenario and its values, as plan.method=pens,panm-grad; repeatable.",
            metavar="KEY=V1,V2",
        ),
    ],
    rounds: Annotated[int | None, typer.Option(help="Rounds, instead of the plan's.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; a core each if not given.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of all runs; runs/NAME-sweep if not given.")
    ] = None,
) -> None:
    """Run a scenario with every combination of some keys' values. The same command goes on."""
    from simulations.scenarios.commands import sweep as sweep_scenario
    from simulations.scenarios.scenario import find

    sweep_scenario(find(scenario), grid, {"plan.rounds": rounds}, out, processes=processes)


@app.command()
def paper(
    table: Annotated[str | None, typer.Argument(help="Table or figure; see --list.")] = None,
    *,
    full: Annotated[bool, typer.Option("--full", help="The paper's size: many hours.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Say which tables there are.")] = False,
    seeds: Annotated[str | None, typer.Option(help="Seeds, as 0,1,2 or 0-9.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A key of the plan and its value in all runs.", metavar="KEY=VALUE"
        ),
    ] = None,
    exact: Exact = False,
    device: OnDevice = Device.CPU,
    precision: InPrecision = Precision.FLOAT32,
    out: Annotated[
        Path | None, typer.Option(help="Directory of all runs; runs/paper-TABLE if not given.")
    ] = None,
) -> None:
    """Make a table or figure of a paper, and say which of its claims were seen."""
    from simulations.compare import parse_seeds
    from simulations.paper import run_paper, table_names
    from simulations.runs import Equipment

    if show or table is None:
        for name, title, runs in table_names():
            print(f"{name:<11} {runs:>3} runs  {title}")
        return
    size = "-full" if full else ""
    run_paper(
        table,
        out or Path("runs") / f"paper-{table}{size}",
        full=full,
        seeds=None if seeds is None else parse_seeds(seeds),
        overrides=overrides or [],
        equipment=Equipment(False, exact, device.value, precision=precision.value),
    )


@app.command()
def bench(
    *,
    models: Annotated[
        str, typer.Option(help="Models to measure, separated by commas.")
    ] = "mlp,lenet,cnn",
    sizes: Annotated[
        str, typer.Option(help="Numbers of peers, separated by commas.")
    ] = "20,100,1000",
    precisions: Annotated[
        str, typer.Option(help="Of the products: float32, bfloat16, or both, separated by commas.")
    ] = "float32",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements; the best counts.")] = 5,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Worker processes; a core each if not given.")
    ] = None,
    device: OnDevice = Device.CPU,
    table: Annotated[
        Path | None, typer.Option("--json", help="File for the rows, as JSON.", dir_okay=False)
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(help="File for the rules' rows, as JSON.", dir_okay=False)
    ] = None,
) -> None:
    """Measure the laboratory's speed against a naive loop and the machine's own peak, and rules."""
    from peer.learning.models import MODELS
    from peer.learning.names import TEXT_MODELS
    from peer.rundir import write_json
    from simulations.bench import bench_table, run_bench
    from simulations.bench_rules import rules_table, run_rules

    names = models.split(",")
    known = [name for name in MODELS if name not in TEXT_MODELS]
    if unknown := set(names) - set(known):
        raise UserError(
            f"no built-in model of images {sorted(unknown)[0]!r}", f"there are {', '.join(known)}"
        )
    try:
        numbers = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise UserError(f"--sizes {sizes} is not a list of numbers", "write 20,100,1000") from None
    if min(numbers) < 2:
        raise UserError(f"--sizes {sizes}: a population has at least 2 peers")
    chosen = precisions.split(",")
    if unknown := set(chosen) - set(Precision):
        raise UserError(f"no precision {sorted(unknown)[0]!r}", f"there are {', '.join(Precision)}")
    for file in filter(None, (table, rules)):
        file.touch()  # to fail now, not after all the measuring
    rows = []
    for row in run_bench(
        names,
        numbers,
        chosen,
        repeats=repeats,
        workers=workers,
        device=device.value,
        progress=lambda what: print(what, file=sys.stderr, flush=True),
    ):
        rows.append(row)
        if table is not None:
            write_json(table, rows)  # after every row: what is measured outlives Ctrl-C
    of_rules = run_rules(repeats=repeats)
    if rules is not None:
        write_json(rules, of_rules)
    print(bench_table(rows), rules_table(of_rules), sep="\n\n")


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="A run directory, peers' state directories, or the directory of a comparison, a "
            "sweep or a paper's table."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Run directory to merge several peers' into.")
    ] = None,
) -> None:
    """Write pictures, tables and a page about a run, or about many."""
    from simulations.report import locate, write_report

    for file in write_report(locate(runs, out), animate=True):
        print(file)


def import_methods(modules: list[str] | None) -> None:
    """Import modules that register methods. Raises UserError when one cannot be imported."""
    for name in modules or []:
        import_module(name, "--import")


def _has_screen() -> bool:
    """Tell whether a picture can be shown to somebody: a terminal, and a desktop behind it."""
    desktop = sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ
    return sys.stdout.isatty() and desktop
