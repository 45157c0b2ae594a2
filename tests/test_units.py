"""Sizes and durations, as people write them and as the gateway counts them."""

from __future__ import annotations

import re
from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.units import (
    HOURS,
    MILLISECONDS,
    MINUTES,
    SECONDS,
    GiB,
    KiB,
    MiB,
    format_size,
    parse_duration,
    parse_size,
)

FACTORS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
UNIT_SECONDS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}


def test_constants_have_their_values() -> None:
    assert (KiB, MiB, GiB) == (1024, 1_048_576, 1_073_741_824)
    assert (MILLISECONDS, SECONDS, MINUTES, HOURS) == (0.001, 1.0, 60.0, 3600.0)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0 B", 0),
        ("1 B", 1),
        ("4 MiB", 4_194_304),
        ("4MiB", 4_194_304),
        ("1.5 KiB", 1536),
        ("0.5 GiB", 536_870_912),
        ("256 KiB", 262_144),
    ],
)
def test_a_size_has_a_number_and_a_binary_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "4", "MiB", "-1 B", "+1 B", "4  MiB", " 4 MiB", "4 MiB ", "1e3 B", "٤ MiB"]
)
def test_a_size_without_a_number_and_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r'write a number and a unit, such as "4 MiB"'):
        parse_size(text)


@pytest.mark.parametrize(
    ("unit", "meant"),
    [("MB", "MiB"), ("M", "MiB"), ("mib", "MiB"), ("kB", "KiB"), ("k", "KiB"), ("GB", "GiB"), ("g", "GiB")],
)
def test_a_unit_that_could_mean_1000_or_1024_is_answered_with_the_binary_one(unit: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf'unit "{unit}" is not known: write {meant}$'):
        parse_size(f"4 {unit}")


def test_an_unknown_unit_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r'unit "furlongs" is not known: use one of B, KiB, MiB, GiB$'):
        parse_size("4 furlongs")
    with pytest.raises(ValueError, match=r'unit "days" is not known: use one of ms, s, m, h$'):
        parse_duration("4 days")


@pytest.mark.parametrize("text", ["0.5 B", "0.3 KiB", "1.0000001 MiB"])
def test_a_part_of_a_byte_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf'"{re.escape(text)}" is not a whole number of bytes'):
        parse_size(text)


@given(st.integers(0, 2**60))
def test_a_formatted_size_reads_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(0, 10**6), st.sampled_from(sorted(FACTORS)), st.sampled_from(["", " "]))
def test_every_unit_multiplies(number: int, unit: str, blank: str) -> None:
    assert parse_size(f"{number}{blank}{unit}") == number * FACTORS[unit]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1024, "1 KiB"),
        (1536, "1536 B"),
        (5 * MiB, "5 MiB"),
        (1024 * MiB, "1 GiB"),
    ],
)
def test_a_size_is_said_in_the_largest_unit_that_divides_it(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("500 ms", 0.5),
        ("5s", 5.0),
        ("1.5 s", 1.5),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("0 s", 0.0),
    ],
)
def test_a_duration_has_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "s", "-5s", "5  s", "1m30s", "1e3s", "inf s", "nan", "5 s\n"])
def test_a_duration_without_a_number_and_one_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r'write a number and a unit, such as "1.5 s"'):
        parse_duration(text)


@given(st.decimals(0, 10**6, places=6), st.sampled_from(sorted(UNIT_SECONDS)))
def test_a_duration_is_the_nearest_float_to_what_was_written(number: object, unit: str) -> None:
    text = f"{number:f}"
    assert parse_duration(f"{text} {unit}") == float(Fraction(text) * UNIT_SECONDS[unit])


@given(st.text())
def test_whatever_is_written_is_read_or_refused(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with suppress(ValueError):
            assert parse(text) >= 0


def test_a_number_of_any_length_costs_nothing() -> None:
    with pytest.raises(ValueError, match="write a number and a unit"):
        parse_size("9" * 10_000_000 + " B")
