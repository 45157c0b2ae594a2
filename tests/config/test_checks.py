"""Values that are right alone and wrong together."""

from __future__ import annotations

import pytest

from tests.config.reading import HASH, MODEL, TENANT, WORKER, complaints
from trio_gateway.config import parse_settings

OPEN = (
    "other machines can reach {}, and without [[tenants]] everybody is served: "
    "add a tenant with a key, or set server.allow_anonymous = true"
)
UNGUARDED = (
    "other machines can reach {}, and nothing guards it: use a loopback address or a unix socket "
    "(admin.tokens are not implemented in this version)"
)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "[deadlines]\ndefault = 4000",
            "2: deadlines.default: must be at most deadlines.maximum (3600): "
            "the default could never be reached",
        ),
        (
            "[deadlines]\nmaximum = 500",
            "2: deadlines.maximum: must be at least deadlines.default (600): "
            "the default could never be reached",
        ),
        (
            "[deadlines]\nmaximum = 3\ndefault = 4",
            "3: deadlines.default: must be at most deadlines.maximum (3): the default could never be reached",
        ),
        (
            "[limits]\nbody_bytes = '1 GiB'",
            "2: limits.body_bytes: must be at most limits.unplaced_bytes (256 MiB): the largest body would "
            "never find room",
        ),
        (
            "[limits]\nunplaced_bytes = '1 MiB'",
            "2: limits.unplaced_bytes: must be at least limits.body_bytes (20 MiB): the largest body would "
            "never find room",
        ),
        (
            "[limits]\nanswer_bytes = '1 GiB'",
            "2: limits.answer_bytes: must be at most delivery.total_buffer_bytes (256 MiB): the largest "
            "buffered answer would never find room",
        ),
        (
            "[delivery]\nbuffer_bytes = '257 MiB'",
            "2: delivery.buffer_bytes: must be at most delivery.total_buffer_bytes (256 MiB): one client's "
            "share would be more than the whole",
        ),
        (
            "[shutdown]\ngrace = 56",
            "2: shutdown.grace: readiness_delay + grace (61) must be at most hard_limit (60): "
            "running requests would lose their grace",
        ),
        (
            "[shutdown]\nreadiness_delay = 31",
            "2: shutdown.readiness_delay: readiness_delay + grace (61) must be at most hard_limit (60): "
            "running requests would lose their grace",
        ),
        (
            "[shutdown]\ngrace = 10\nhard_limit = 14",
            "3: shutdown.hard_limit: readiness_delay + grace (15) must be at most hard_limit (14): running "
            "requests would lose their grace",
        ),
        (
            TENANT + "default_timeout = 20\nmax_timeout = 10",
            "4: tenants.acme.default_timeout: must be at most max_timeout (10)",
        ),
        (
            TENANT + "default_timeout = 3601",
            "4: tenants.acme.default_timeout: must be at most deadlines.maximum (3600)",
        ),
        (
            TENANT + "max_timeout = '2h'",
            "4: tenants.acme.max_timeout: must be at most deadlines.maximum (3600)",
        ),
        (MODEL + MODEL, '4: models.m.id: "m" is taken: t.toml:2 has it'),
        (
            MODEL + "aliases = [\n'a',\n'm']",
            '5: models.m.aliases[1]: "m" is taken: t.toml:2 has it',
        ),
        (
            MODEL + "aliases = ['n']\n" + MODEL.replace('"m"', '"n"'),
            '3: models.m.aliases[0]: "n" is taken: t.toml:5 has it',
        ),
        (
            MODEL + "aliases = ['a']\n" + MODEL.replace('"m"', '"n"') + "aliases = ['b',\n'a']",
            '7: models.n.aliases[1]: "a" is taken: t.toml:3 has it',
        ),
        (WORKER + WORKER + MODEL, '6: workers.gpu-0.id: "gpu-0" is taken: t.toml:2 has it'),
        (
            TENANT + TENANT.replace("k1", "k2").replace("ab", "cd"),
            '5: tenants.acme.id: "acme" is taken: t.toml:2 has it',
        ),
        (
            TENANT + TENANT.replace("acme", "other").replace("ab", "cd"),
            '6: tenants.other.keys.k1.id: "k1" is taken: t.toml:3 has it',
        ),
        (
            TENANT + TENANT.replace("acme", "other").replace("k1", "k2"),
            "6: tenants.other.keys.k2.hash: is the key of t.toml:3 again",
        ),
        (
            '[[tenants]]\nid = "a"\nkeys = [\n'
            f'{{id = "k1", hash = "{HASH}"}},\n{{id = "k2", hash = "{HASH}"}}]',
            "5: tenants.a.keys.k2.hash: is the key of t.toml:4 again",
        ),
        (
            WORKER + MODEL + 'workers = [\n"gpu-1"]',
            '8: models.m.workers[0]: no worker has the id or label "gpu-1"; did you mean "gpu-0"?',
        ),
        (
            WORKER + "labels = ['fast']\n" + MODEL + 'workers = ["fats"]',
            '8: models.m.workers[0]: no worker has the id or label "fats"; did you mean "fast"?',
        ),
        (MODEL + 'workers = ["x"]', '3: models.m.workers[0]: no worker has the id or label "x"'),
        (
            WORKER + WORKER.replace("gpu-0", "b") + "labels = ['gpu-0']\n" + MODEL,
            '9: workers.b.labels[0]: "gpu-0" is a worker\'s id too, so [[models]] could mean either',
        ),
        (
            MODEL + TENANT + 'models = ["mm"]',
            '6: tenants.acme.models[0]: no [[models]] has the id "mm"; did you mean "m"?',
        ),
        (
            MODEL + "aliases = ['latest']\n" + TENANT + 'models = ["m",\n"latest"]',
            '8: tenants.acme.models[1]: "latest" is an alias: name the model, "m"',
        ),
        (
            MODEL + "aliases = ['latest']\n" + TENANT + 'models = ["lates"]',
            '7: tenants.acme.models[0]: no [[models]] has the id "lates"; did you mean "latest"?',
        ),
        (TENANT + 'models = ["m"]', '4: tenants.acme.models[0]: no [[models]] has the id "m"'),
        (
            WORKER,
            "1: workers: nothing would be served: name the workers' models under [[models]] (asking the "
            "engines for them is not implemented in this version)",
        ),
        (WORKER + "ca = 'x.pem'\n" + MODEL, "5: workers.gpu-0.ca: has no use: the url is not https"),
        ('[server]\nbind = ["0.0.0.0:80"]', "2: server.bind[0]: " + OPEN.format("0.0.0.0:80")),
        (
            '[server]\nbind = ["127.0.0.1:80",\n"[fe80::1]:81"]',
            "3: server.bind[1]: " + OPEN.format("[fe80::1]:81"),
        ),
        ('[admin]\nbind = ["0.0.0.0:80"]', "2: admin.bind[0]: " + UNGUARDED.format("0.0.0.0:80")),
        (
            '[server]\nallow_anonymous = true\n[admin]\nbind = ["host.example:80"]',
            "4: admin.bind[0]: " + UNGUARDED.format("host.example:80"),
        ),
        (
            '[admin]\nbind = ["127.0.0.1:8080"]',
            "2: admin.bind[0]: cannot listen on 127.0.0.1:8080 and 127.0.0.1:8080 at once",
        ),
        (
            '[server]\nallow_anonymous = true\nbind = ["0.0.0.0:9090"]',
            "cannot listen on 127.0.0.1:9090 and 0.0.0.0:9090 at once",
        ),
        (
            '[server]\nallow_anonymous = true\nbind = ["[::]:1", "[::1]:1"]',
            "3: server.bind[1]: cannot listen on [::1]:1 and [::]:1 at once",
        ),
        (
            '[server]\nbind = ["unix:a"]\n[admin]\nbind = ["unix:a"]',
            "4: admin.bind[0]: cannot listen on unix:a and unix:a at once",
        ),
    ],
)
def test_what_contradicts_is_told_at_the_value_that_was_written(text: str, complaint: str) -> None:
    found = complaints(text)
    assert any(complaint in line for line in found), found
    unrelated = [line for line in found if complaint not in line and "cannot be read" not in line]
    assert not unrelated


@pytest.mark.parametrize(
    "text",
    [
        '[server]\nbind = ["0.0.0.0:80"]\nallow_anonymous = true',
        '[server]\nbind = ["0.0.0.0:80"]\n' + TENANT,
        '[server]\nbind = ["unix:gw.sock", "[::1]:80", "127.0.0.2:80", "localhost:81"]',
        '[server]\nbind = ["127.0.0.1:0"]\n[admin]\nbind = ["127.0.0.1:0"]',
        '[server]\nbind = ["0.0.0.0:0", "127.0.0.1:0"]\nallow_anonymous = true',
        '[server]\nbind = ["[::1]:80"]\n[admin]\nbind = ["127.0.0.1:80"]',
        '[server]\nbind = ["0.0.0.0:80", "[::]:80"]\nallow_anonymous = true',
        "[deadlines]\ndefault = 3600",
        "[shutdown]\ngrace = 55",
        "[limits]\nanswer_bytes = '256 MiB'",
        "[delivery]\nstall_timeout = 200",
        MODEL,
        WORKER + MODEL + 'workers = ["gpu-0"]',
        WORKER + MODEL + 'aliases = ["gpu-0", "acme"]\n' + TENANT + 'models = ["m"]',
        MODEL + 'upstream = "a"\naliases = ["b"]\n' + MODEL.replace('"m"', '"a"'),
        WORKER + WORKER.replace("gpu-0", "b") + MODEL,
        TENANT + "max_timeout = 3600\ndefault_timeout = 3600",
        "[[tenants]]\nid = 'locked'\nkeys = []",
    ],
)
def test_what_fits_together_is_accepted(text: str) -> None:
    parse_settings(text)


def test_a_tenant_that_did_not_pass_does_not_make_the_gateway_anonymous() -> None:
    assert complaints('[server]\nbind = ["0.0.0.0:80"]\n' + TENANT + "weight = 0") == [
        "t.toml:6: tenants.acme.weight: must be greater than 0, not 0"
    ]


def test_a_value_that_did_not_pass_contradicts_nothing() -> None:
    assert complaints("[deadlines]\ndefault = 'x'\nmaximum = 10") == [
        't.toml:2: deadlines.default: write a number and a unit, such as "1.5 s"'
    ]
    assert complaints("[shutdown]\ngrace = 'x'\nhard_limit = 1") == [
        't.toml:2: shutdown.grace: write a number and a unit, such as "1.5 s"'
    ]
    assert len(complaints('[server]\nbind = ["x"]\n[admin]\nbind = ["127.0.0.1:8080"]')) == 1
