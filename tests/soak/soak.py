"""Run the bars of membership at any length, and print what was measured as a Markdown table.

    python tests/soak/soak.py --minutes 30 --out runs/soak

`--minutes` is the length of the healthy and of the churning run; a partition lasts for five at
most. The rest takes what it takes: about ten minutes in all. Partitions are made of network
namespaces, which need root; any user is root of a network of its own by

    unshare --user --map-root-user --net sh -c 'ip link set lo up; python tests/soak/soak.py'
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bars import BARS, Outcome


def table(outcomes: Iterable[Outcome]) -> str:
    """Return outcomes as a Markdown table."""
    words = {True: "yes", False: "NO", None: "not measured"}
    rows = [f"| {o.bar} | {o.limit} | {o.measured} | {words[o.met]} |" for o in outcomes]
    return "\n".join(["| bar | limit | measured | met |", "|---|---|---|---|", *rows])


def main() -> int:
    """Measure what was asked for; return 0 when every bar was measured and is met."""
    parser = argparse.ArgumentParser(description="Soak the membership of real peers.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--only", choices=BARS, action="append", help="repeatable")
    parser.add_argument("--out", type=Path, default=None, help="keeps states and logs there")
    asked = parser.parse_args()
    # However it ends, no process of a federation is left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        for name in asked.only or BARS:
            outcomes += BARS[name]((asked.out or Path(temporary)) / name, asked.minutes)
            print(f"{name}: done", file=sys.stderr)
    print(table(outcomes))
    return 0 if all(outcome.met for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
