"""The fuzz targets run, keep their promises on their seeds and near them, and see what they look for."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Final

import pytest

from fuzz import engine
from fuzz.command import Result, read_log, table
from fuzz.endurance import measure
from fuzz.target import TARGETS, Target, cuts, load, seed, split

NEAR: Final = 150  # mutations of seeds for each target


def mutated(target: Target, dice: random.Random) -> bytes:
    """A seed with a few bytes or words changed, as a fuzzer would begin."""
    data = bytearray(dice.choice(target.seeds))
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data) + 1)
        match dice.randrange(4):
            case 0:
                del data[at : at + dice.randint(1, 8)]
            case 1:
                data[at:at] = dice.choice(target.words)
            case 2:
                data[at : at + 1] = bytes([dice.randrange(256)])
            case 3:
                other = dice.choice(target.seeds)
                data[at:] = other[dice.randrange(len(other) + 1) :]
    return bytes(data[: target.max_bytes])


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_keeps_its_promises_on_its_seeds_and_near_them(name: str) -> None:
    target = load(name)
    assert target.seeds
    assert all(len(data) <= target.max_bytes for data in target.seeds)
    for data in target.seeds:
        target.check(data)
    dice = random.Random(name)
    for _ in range(NEAR):
        target.check(mutated(target, dice))


def test_the_documentation_lists_every_target() -> None:
    text = Path(__file__).parents[1].joinpath("docs/how-to/fuzz.md").read_text("utf-8")
    assert not [name for name in TARGETS if f"`{name}`" not in text]


def test_pieces_are_the_whole_in_any_cut() -> None:
    for data in (b"", b"a", b"a\nb\r\n\r\nc" * 9):
        for pieces in cuts(data):
            assert b"".join(pieces) == data
        assert [*cuts(data)] == [*cuts(data)]


def test_options_stand_behind_the_payload() -> None:
    assert split(seed(b"payload", 7, 255), 2) == (b"payload", [7, 255])
    assert split(b"x", 2) == (b"", [ord("x"), 0])


def test_an_input_that_fails_or_takes_too_long_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine, "SLOW", 0.01)

    def spin(data: bytes) -> None:
        assert data != b"wrong"
        until = time.process_time() + len(data) / 1000
        while time.process_time() < until:
            pass

    run = engine.watched(spin, tmp_path)
    run(b"")
    with pytest.raises(engine.TooSlow):
        run(b"x" * 20)
    with pytest.raises(AssertionError):
        run(b"wrong")
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"x" * 20, b"wrong"}


def test_memory_that_grows_with_the_inputs_is_seen() -> None:
    kept: list[object] = []
    inputs = [b"%d" % number for number in range(2000)]
    assert not measure(lambda data: None, inputs, 0).leaks
    assert measure(lambda data: kept.append([data]), inputs, 0).leaks


LOG: Final = """\
#3\tINITED cov: 10 ft: 20 corp: 2/30b exec/s: 0 rss: 50Mb
#9\tNEW    cov: 11 ft: 25 corp: 3/44b lim: 5 exec/s: 0 rss: 51Mb L: 5/14 MS: 1 CopyPart-
#900\tDONE   cov: 12 ft: 31 corp: 7/4Kb lim: 50 exec/s: 450 rss: 52Mb
stat::number_of_executed_units: 900
stat::average_exec_per_sec:     450
stat::peak_rss_mb:              53
"""


def test_the_result_is_read_off_the_words_of_the_fuzzer() -> None:
    result = read_log("sse", LOG, {"inputs": 9, "blocks": -3, "rss_kib": 40}, ())
    assert result == Result("sse", 900, 450, (10, 12), (20, 31), (2, 7), 53, -3, 40, ())
    heading, row = table([result]).splitlines()
    assert heading.split()[:3] == ["target", "runs", "runs/s"]
    assert row.split()[:6] == ["sse", "900", "450", "10", ">", "12"]


def test_a_finding_is_named_even_if_the_fuzzer_said_nothing() -> None:
    result = read_log("sse", "", {}, ("build/fuzz/sse/findings/crash-1",))
    assert table([result]).splitlines()[-1] == "sse: build/fuzz/sse/findings/crash-1"
