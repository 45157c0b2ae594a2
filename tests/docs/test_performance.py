"""The page about performance says what was measured: everything between its markers is made from results."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import page

SVG = "{http://www.w3.org/2000/svg}"


def result(scenario: str, **parts: object) -> dict[str, object]:
    """A result as a scenario leaves it behind."""
    machine = {
        "cpu": "Some CPU",
        "cores": 2,
        "kernel": "6",
        "python": "3.11",
        "nginx": "1.2",
        "commit": "abc",
    }
    made = {
        "scenario": scenario,
        "at": "2026-01-02T03:04:05+00:00",
        "options": {"runs": 3},
        "machine": machine,
    }
    return made | {"columns": ["", "us"], "rows": [["a token", "1.0"]], "checks": [], "raw": {}} | parts


OVERHEAD = result(
    "overhead",
    columns=["", "paced token, us"],
    raw={
        "figures": {
            "full": {"paced token": [30.0, 31.0, 32.0]},
            "nginx": {"paced token": [10.0, 11.0, 12.0]},
            "litellm": {"paced token": [900.0]},
        },
        "missing": {"smg": "no such version"},
    },
)
SCALE = result(
    "scale", raw={"token by streams": {"64": [10.0], "4000": [12.0]}, "request by streams": {"64": [5.0]}}
)


def test_everything_between_the_markers_is_what_the_kept_results_say() -> None:
    text = page.PAGE.read_text()

    assert page.rendered(text, page.kept()) == text


def test_the_pictures_are_those_of_the_kept_results() -> None:
    drawn = {path.name: path.read_text() for path in page.KEPT.glob("*.svg")}

    assert drawn == page.pictures_of(page.kept())


def test_every_block_of_figures_has_its_place_on_the_page() -> None:
    assert sorted(page.MARKED.findall(page.PAGE.read_text())) == sorted(page.blocks({}))


def test_figures_stand_down_and_proxies_across_with_ours_last() -> None:
    told = page.overhead_table(OVERHEAD)

    assert told.splitlines()[0] == "|  | nginx | litellm | full |"
    assert "| paced token, us | 11.0 (10.5-11.5) | 900 (900-900) | 31.0 (30.5-31.5) |" in told


def test_a_peer_that_could_not_be_measured_is_named_with_the_reason() -> None:
    assert "smg could not be measured: no such version" in page.overhead_table(OVERHEAD)


def test_a_promise_that_was_not_kept_stands_out() -> None:
    check = {
        "what": "paced token",
        "value": 1.3,
        "limit": 1.1,
        "unit": "x",
        "kept": False,
        "sense": "at most",
    }

    told = page.checks_table({"overhead": result("overhead", checks=[check])})

    assert "| overhead | paced token | 1.3 | at most 1.1 | x | **no** |" in told


def test_a_marker_that_no_figures_belong_to_is_an_error() -> None:
    with pytest.raises(KeyError, match="weather"):
        page.rendered("<!-- figures: weather -->\n<!-- end of figures -->", {})


def test_rendering_twice_changes_nothing() -> None:
    once = page.rendered(page.PAGE.read_text(), {"overhead": OVERHEAD, "scale": SCALE})

    assert page.rendered(once, {"overhead": OVERHEAD, "scale": SCALE}) == once


def test_pictures_show_one_bar_for_each_proxy_that_fits_the_scale() -> None:
    drawn = page.pictures_of({"overhead": OVERHEAD, "scale": SCALE})

    assert set(drawn) == {"paced-token.svg", "scale-streams.svg"}
    bars = ElementTree.fromstring(drawn["paced-token.svg"]).findall(f"{SVG}rect")
    assert len(bars) == 1 + 2  # the ground, nginx and full


def test_the_newest_result_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "KEPT", tmp_path / "performance")
    for day, runs in (("20260102", 1), ("20260103", 2)):
        written = result("memory", options={"runs": runs})
        (tmp_path / f"{day}T000000Z-memory-abc.json").write_text(json.dumps(written))

    page.keep(("memory", "websocket"))

    assert {name: told["options"] for name, told in page.kept().items()} == {"memory": {"runs": 2}}
