"""What a person sees of a running peer or federation: log lines, one live line, or a live table.

Live views are for terminals only; elsewhere there are a few plain lines, so that the output of a
service or a test stays readable. Rich is imported when a live view is made.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

from peer.plan import Plan
from peer.rundir import MetricRow

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

log = logging.getLogger(__name__)

LogFormat = Literal["text", "json"]

LINE_SECONDS = 10.0
"""Seconds after which a peer without a live view has something to tell of its rounds again."""
LINES = 10
"""Lines about its rounds that a peer tells at least, if it runs as many."""

CLUSTER_COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6D00", "#5A5A5A",
)  # fmt: skip
"""Colour of true cluster c, c modulo the length: Okabe and Ito's palette, safe for colour-blind
eyes, its yellow darkened to be seen on white."""

_context: ContextVar[dict[str, Any]] = ContextVar("log_fields", default={})  # noqa: B039 - never mutated
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


@contextmanager
def log_fields(**fields: Any) -> Iterator[None]:
    """Add fields (peer, index, t, ...) to every log line of this task and of those it starts."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def configure_logging(
    form: LogFormat = "text", *, level: int = logging.INFO, stream: TextIO | None = None
) -> None:
    """Send all log lines to `stream` (stderr if not given), replacing earlier handlers.

    text: a line for people. json: an object a line with time (ISO 8601, UTC), level, logger,
    message, the fields of `log_fields` and of `extra=`, and, where there is one, the exception.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_add_context)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def _add_context(record: logging.LogRecord) -> bool:
    for key, value in _context.get().items():
        if key not in vars(record):
            setattr(record, key, value)
    return True


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        line = super().formatMessage(record)
        fields = _extra(record)
        if not fields:
            return line
        return line + "  " + " ".join(f"{key}={value}" for key, value in fields.items())


def human_bytes(count: float) -> str:
    """Return a byte count for people: 950 B, 1.2 kB, 34 MB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 9.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def percent(share: float | None) -> str:
    """Return a share in [0, 1] as a percentage, or a dash where there is none."""
    return "-" if share is None else f"{100 * share:.1f} %"


def ratio(share: float | None) -> str:
    """Return precision or recall with two decimals, or a dash where there is none."""
    return "-" if share is None else f"{share:.2f}"


class _LiveView:
    """Shows `__rich__` of a subclass while the block runs, if the output is a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live: Live | None = None

    @property
    def live(self) -> bool:
        """Whether the view redraws itself; otherwise it only prints a first and a last line."""
        return self._live is not None

    def first_line(self) -> str:
        """Return what to print at the start when there is no terminal; nothing if empty."""
        return ""

    def last_line(self) -> str:
        """Return what to print at the end when there is no terminal; nothing if empty."""
        return ""

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)
            self._live.start()
        elif line := self.first_line():
            print(line, file=self._stream, flush=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif error is None and (line := self.last_line()):
            print(line, file=self._stream, flush=True)

    def _render(self) -> Table | Text:
        raise NotImplementedError


def round_line(plan: Plan, row: MetricRow) -> str:
    """Return a line about a finished round of one peer."""
    parts = [f"{plan.name} ({plan.method}, {plan.data})", f"peer {row.index}"]
    parts.append(f"round {row.t}/{plan.rounds}")
    parts.append(f"accuracy {percent(row.accuracy)}")
    if row.bag_size is not None:
        parts.append(f"bag {row.bag_size}")
    if row.precision is not None:
        parts.append(f"precision {ratio(row.precision)}")
    if row.epsilon is not None:
        parts.append(f"epsilon {row.epsilon:.2f}")
    parts.append(f"sent {human_bytes(row.wire_sent)}")
    parts.append(f"received {human_bytes(row.wire_received)}")
    return "  ".join(parts)


class RoundLog:
    """Logs some of the finished rounds of a process's peers, so that one sees that they train.

    A peer's last round, every tenth of the plan's rounds, and any that ends `LINE_SECONDS` or more
    after what was told of the peer before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._told: dict[int, float] = {}

    def update(self, plan: Plan, row: MetricRow) -> None:
        """Log a finished round, or keep still."""
        now, told = self._clock(), self._told.get(row.index, self._began)
        due = row.t % max(1, plan.rounds // LINES) == 0 or row.t >= plan.rounds
        if due or now - told >= LINE_SECONDS:
            self._told[row.index] = now
            log.info(round_line(plan, row))


class PeerView(_LiveView):
    """One live line about a single peer."""

    def __init__(self, *, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._latest: tuple[Plan, MetricRow] | None = None

    def update(self, plan: Plan, row: MetricRow) -> None:
        """Show a finished round."""
        self._latest = plan, row

    def _render(self) -> Text:
        from rich.text import Text

        # Nothing until then: what the peer waits for is in the log.
        line = round_line(*self._latest) if self._latest else ""
        return Text(line, no_wrap=True, overflow="ellipsis")


class FederationView(_LiveView):
    """A live table of a whole federation, a line a peer and one of totals."""

    def __init__(self, plan: Plan, *, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._plan = plan
        self._rows: dict[int, MetricRow] = {}
        self._states: dict[int, str] = {}

    def update(self, row: MetricRow) -> None:
        """Show a finished round of one peer."""
        self._rows[row.index] = row
        self._states[row.index] = "finished" if row.t >= self._plan.rounds else "running"

    def state(self, index: int, word: str) -> None:
        """Show the state of one peer: running, finished, killed, failed."""
        self._states[index] = word

    def first_line(self) -> str:
        plan = self._plan
        return f"starting {plan.n} peers: {plan.method} on {plan.data}, {plan.rounds} rounds"

    def last_line(self) -> str:
        total = self._totals()
        finished = sum(row.t >= self._plan.rounds for row in self._rows.values())
        return (
            f"{finished} of {self._plan.n} peers finished: accuracy {total['accuracy']}, "
            f"precision {total['precision']}, {total['sent']} sent"
        )

    def _totals(self) -> Mapping[str, str]:
        rows = list(self._rows.values())
        accuracy = [row.accuracy for row in rows if row.accuracy is not None]
        precision = [row.precision for row in rows if row.precision is not None]
        return {
            "round": str(min((row.t for row in rows), default=0)),
            "accuracy": percent(sum(accuracy) / len(accuracy) if accuracy else None),
            "precision": ratio(sum(precision) / len(precision) if precision else None),
            "sent": human_bytes(sum(row.wire_sent for row in rows)),
            "received": human_bytes(sum(row.wire_received for row in rows)),
        }

    def _render(self) -> Table:
        from rich import box
        from rich.table import Table

        total = self._totals()
        table = Table(
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_footer=True,
            title_style="bold",
            title=f"{self._plan.method} on {self._plan.data}, {self._plan.rounds} rounds",
            title_justify="left",
        )
        table.add_column("peer", "all", justify="right")
        table.add_column("cluster")
        table.add_column("round", total["round"], justify="right")
        table.add_column("accuracy", total["accuracy"], justify="right")
        table.add_column("bag", justify="right")
        table.add_column("precision", total["precision"], justify="right")
        table.add_column("sent", total["sent"], justify="right")
        table.add_column("received", total["received"], justify="right")
        table.add_column("state")
        for index in range(self._plan.n):
            table.add_row(*self._cells(index))
        return table

    def _cells(self, index: int) -> list[str | Text]:
        from rich.text import Text

        state = self._states.get(index, "starting")
        row = self._rows.get(index)
        if row is None:
            return [str(index), "", "", "", "", "", "", "", Text(state, style="dim")]
        mark = Text("-")
        if row.cluster is not None:
            mark = Text(f"■ {row.cluster}", CLUSTER_COLOURS[row.cluster % len(CLUSTER_COLOURS)])
        style = {"killed": "red", "failed": "red", "finished": "green"}.get(state, "")
        return [
            str(index),
            mark,
            str(row.t),
            percent(row.accuracy),
            "-" if row.bag_size is None else str(row.bag_size),
            ratio(row.precision),
            human_bytes(row.wire_sent),
            human_bytes(row.wire_received),
            Text(state, style=style),
        ]
