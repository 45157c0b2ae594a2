"""The command line that every scenario shares.

``python -m bench`` runs all of them, ``python -m bench overhead leaves`` these two,
``python -m bench.scenarios.overhead`` one. Exit status: 0 measured (and, with
``--check``, every limit kept), 1 a limit was passed, 2 it could not be measured.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, Protocol, cast

from .processes import BenchError
from .report import Report
from .routers import PEERS

SCENARIOS: Final = (
    "overhead",
    "scale",
    "memory",
    "websocket",
    "aborts",
    "stalled_clients",
    "slow_consumers",
    "leaves",
    "large_bodies",
    "routing",
    "routing_live",
    "scale_on_paper",
    "failover",
    "rolling_restart",
    "slow_releases",
    "ledger_kills",
    "ledger_sums",
    "counts",
    "features",
    "processes",
    "telemetry",
    "dashboard",
    "overload",
    "fairness",
    "cluster",
)


@dataclass(frozen=True)
class Options:
    """What a run may be told.

    Attributes:
        check: exit with status 1 when a limit is passed.
        runs: interleaved runs whose median counts.
        kind: the dialect the gateway takes the engine for.
        streams: paced streams of `overhead`.
        peers: who stands beside the gateway in `overhead`.
        loads: parts of a scenario to run, by its own names; none: all of them.
        brief: a tenth of the work: shows that everything runs, proves nothing.
        peers_only: leave the gateway out, to see what machine and bench can do.
    """

    check: bool = False
    runs: int = 7
    kind: str = "openai"
    streams: int = 400
    peers: tuple[str, ...] = tuple(PEERS)
    loads: tuple[str, ...] = ()
    brief: bool = False
    peers_only: bool = False

    def some(self, count: int) -> int:
        """Answer the count, or a tenth of it in a brief run."""
        return max(1, count // 10) if self.brief else count

    def chosen(self, parts: Iterable[str]) -> list[str]:
        """Answer the parts of a scenario that are to be run.

        Raises:
            BenchError: none of them is.
        """
        wanted = [name for name in parts if not self.loads or name in self.loads]
        if not wanted:
            raise BenchError(f"no such part; there are {', '.join(parts)}")
        return wanted


class Scenario(Protocol):
    def run(self, options: Options) -> Report: ...


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def progress(message: str) -> None:
    """Say on stderr what is being measured now."""
    _say(f"   {message}")


def _question(scenario: str) -> str:
    """Answer the first line of a scenario's docstring, without running its imports."""
    source = (Path(__file__).parent / "scenarios" / f"{scenario}.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def _parse(arguments: Sequence[str], scenarios: Sequence[str]) -> tuple[list[str], Options]:
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measure the gateway, beside peers where there are any. Without names: all scenarios.",
        epilog="scenarios:\n" + "\n".join(f"  {name:18}{_question(name)}" for name in scenarios or SCENARIOS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if not scenarios:
        parser.add_argument("scenarios", nargs="*", metavar="scenario", help="see below")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a limit is passed")
    parser.add_argument("--runs", type=int, default=7, help="interleaved runs [7]")
    parser.add_argument("--kind", default="openai", help="dialect of the engine: openai, vllm [openai]")
    parser.add_argument("--streams", type=int, default=400, help="paced streams of overhead [400]")
    parser.add_argument(
        "--peers", default=",".join(PEERS), help="who stands beside the gateway in overhead [all]"
    )
    parser.add_argument("--loads", default="", help="only these parts of a scenario, by commas [all]")
    parser.add_argument("--brief", action="store_true", help="a tenth of the work: only shows that it runs")
    parser.add_argument("--peers-only", action="store_true", help="without the gateway")
    given = vars(parser.parse_args(arguments))
    chosen = list(scenarios or given.pop("scenarios") or SCENARIOS)
    for several in ("peers", "loads"):
        given[several] = tuple(name for name in given[several].split(",") if name)
    for name in given["peers"]:
        if name not in PEERS:
            parser.error(f"no peer {name}; there are {', '.join(PEERS)}")
    unknown = [name for name in chosen if name not in SCENARIOS]
    if unknown:
        parser.error(f"no scenario {unknown[0]}; there are {', '.join(SCENARIOS)}")
    return chosen, Options(**given)


def _end_politely(signum: int, frame: FrameType | None) -> None:
    # A second signal must not interrupt the ending of what was started; that is bounded in time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(*scenarios: str) -> int:
    """Run the named scenarios, or those of the command line; answer the exit status."""
    signal.signal(signal.SIGINT, _end_politely)
    signal.signal(signal.SIGTERM, _end_politely)
    chosen, options = _parse(sys.argv[1:], scenarios)
    kept, measured = True, True
    for name in chosen:
        _say(f"-- {name}")
        scenario = cast("Scenario", importlib.import_module(f"bench.scenarios.{name}"))
        try:
            report = scenario.run(options)
        except BenchError as error:
            _say(f"bench: {name} could not be measured: {error}")
            measured = False
            continue
        except KeyboardInterrupt:
            _say("bench: stopped; every process it had started was ended")
            return 130
        print(report.text())
        print(f"file {report.save(dataclasses.asdict(options))}\n", flush=True)
        kept = kept and report.kept
    if not measured:
        return 2
    return 0 if kept or not options.check else 1
