"""Plays the cases of an external conformance runner against this gateway.

The runner is not part of the project. It is looked for in the folder that
``TRIO_GATEWAY_CONFORMANCE`` names, else in ``shared/conformance`` beside the
checkout. Without it these tests skip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

HERE: Final = Path(__file__).resolve().parent
VARIABLE: Final = "TRIO_GATEWAY_CONFORMANCE"
KINDS: Final = (
    "sse-framing",
    "sse-chunks",
    "tool-calls",
    "reasoning",
    "midstream-errors",
    "error-bodies",
    "status-mapping",
    "retry-after",
    "retries",
    "client-disconnect",
    "upstream-connection",
    "encoding",
    "headers",
    "request-body",
    "json",
    "params",
    "naming-paths",
    "browser",
    "heartbeat-idle",
    "deadlines",
    "breaker-health",
    "registry",
    "ndjson",
    "backpressure",
    "shutdown",
    "network",
    "admission",
    "metrics-usage",
    "secrets",
    "websocket",
)
# What the runner cannot ask this gateway yet, and why; any other case that it cannot ask is a failure.
NOT_ASKED: Final = {
    "GW-189": "steers the resolver of the machine; tests of dialling use Trio's own hook",
    "GW-190": "steers the resolver of the machine; tests of dialling use Trio's own hook",
}
SLACK_MS: Final = 300  # added to the cases' upper time limits: test machines are busy


def runner_folder() -> Path:
    named = os.environ.get(VARIABLE)
    return Path(named) if named else HERE.parents[2] / "shared" / "conformance"


RUNNER: Final = runner_folder() / "run.py"
pytestmark = [
    pytest.mark.external,
    pytest.mark.slow,
    pytest.mark.skipif(not RUNNER.is_file(), reason=f"no conformance runner; {VARIABLE} may name its folder"),
]


def play(kind: str, reading: str, results: Path) -> tuple[list[dict[str, Any]], str]:
    """Play all cases of a kind and answer their results and what the runner printed."""
    environment = os.environ | ({"READ_ALONE": "1"} if reading == "alone" else {})
    command = [sys.executable, str(RUNNER), "--adapter", str(HERE / "adapter.py"), "--only", kind]
    command += [
        "-j",
        "2",
        "--strict",
        "--slack",
        str(SLACK_MS),
        "--json",
        str(results),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as runner:
        try:
            output, _ = runner.communicate()
        finally:
            runner.terminate()  # on a time limit; it then ends the gateways that it started
    lines = results.read_text("utf-8").splitlines() if results.exists() else []
    return [json.loads(line) for line in lines], output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("reading", ["together", "alone"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gateway_passes_every_case_of(kind: str, reading: str, tmp_path: Path) -> None:
    """Streams are read by one task for all, or each by its exchange's own."""
    results, output = play(kind, reading, tmp_path / "results.jsonl")
    assert results, output
    unpassed = {
        result["id"]: result["reasons"]
        for result in results
        if result["status"] != "passed"
        and not (result["status"] == "unsupported" and result["id"] in NOT_ASKED)
    }
    assert not unpassed, f"{json.dumps(unpassed, indent=1)}\n{output}"
