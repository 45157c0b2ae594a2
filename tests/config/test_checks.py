"""Values that are right alone and wrong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.reading import HASH, MODEL, TENANT, WORKER, complaints
from trio_gateway.config import parse_settings

OPEN = (
    "other machines can reach {}, and without [[tenants]] everybody is served: "
    "add a tenant with a key, name a database that has tenants, or set server.allow_anonymous = true"
)
AGENT = WORKER.replace("vllm", "agent")
UNGUARDED = (
    "other machines can reach {}, and nothing guards it: "
    "add admin.tokens, or use a loopback address or a unix socket"
)
TOKENS = f'tokens = [{{id = "ops", hash = "{HASH}", role = "operator"}}]\n'


def key(members: str) -> str:
    """A tenant whose key has further members."""
    return TENANT.replace(f'"{HASH}"', f'"{HASH}", {members}')


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
        (
            key("models = ['a']") + 'models = ["aa", "b"]',
            '3: tenants.acme.keys.k1.models[0]: its tenant may not use "a"; did you mean "aa"?',
        ),
        (
            MODEL + key("models = ['mm']"),
            '5: tenants.acme.keys.k1.models[0]: no [[models]] has the id "mm"; did you mean "m"?',
        ),
        (
            key("tiers = ['standard', 'batch']"),
            '3: tenants.acme.keys.k1.tiers[1]: its tenant may not ask for "batch"',
        ),
        (
            MODEL + "fallbacks = ['m']",
            "3: models.m.fallbacks[0]: leads back to where it came from: m -> m",
        ),
        (
            MODEL + "fallbacks = ['b']\n[[models]]\nid = 'b'\nfallbacks = ['x',\n'm']\n[[models]]\nid = 'x'",
            "7: models.b.fallbacks[1]: leads back to where it came from: b -> m -> b",
        ),
        (
            "[[models]]\nid = 'a'\nfallbacks = ['d', 'b']\n[[models]]\nid = 'b'\nfallbacks = ['c']\n"
            "[[models]]\nid = 'c'\nfallbacks = ['a']\n[[models]]\nid = 'd'\nfallbacks = ['c']",
            "9: models.c.fallbacks[0]: leads back to where it came from: c -> a -> b -> c",
        ),
        (
            MODEL + "[[models]]\nid = 'n'\nfallbacks = ['m',\n'mm']",
            '6: models.n.fallbacks[1]: no [[models]] has the id "mm"; did you mean "m"?',
        ),
        (
            MODEL + "aliases = ['latest']\n[[models]]\nid = 'n'\nfallbacks = ['latest']",
            '6: models.n.fallbacks[0]: "latest" is an alias: name the model, "m"',
        ),
        (WORKER + "ca = 'x.pem'\n" + MODEL, "5: workers.gpu-0.ca: has no use: the url is not https"),
        (WORKER + "dns = true", "5: workers.gpu-0.dns: has no use: the url has no name that could be"),
        (
            WORKER.replace("127.0.0.1", "[::1]") + "dns = true",
            "5: workers.gpu-0.dns: has no use: the url has no name that could be resolved",
        ),
        (
            WORKER.replace("http://127.0.0.1:8000", "http+unix:///run/a.sock") + "dns = true",
            "5: workers.gpu-0.dns: has no use: the url has no name that could be resolved",
        ),
        (
            WORKER.replace("127.0.0.1", "vllm.example") + "dns = true\npods = 'app=vllm'",
            "6: workers.gpu-0.pods: can not stand beside dns: workers are found by the one or the other",
        ),
        (
            WORKER.replace("http://127.0.0.1:8000", "http+unix:///run/a.sock") + "pods = 'app=vllm'",
            "5: workers.gpu-0.pods: has no use: the url is a socket of this machine, and pods are elsewhere",
        ),
        (
            AGENT,
            "1: workers.gpu-0.api_key_file: must be given for an agent: the file with the secret by which it "
            "knows its gateways",
        ),
        (
            AGENT.replace("8000", "8000/v1") + "api_key_file = 'x'",
            "3: workers.gpu-0.url: must end after the host or port: an agent has no path",
        ),
        (
            AGENT.replace("8000", "8000//") + "api_key_file = 'x'",
            "3: workers.gpu-0.url: must end after the host or port: an agent has no path",
        ),
        (
            '[internal]\nbind = ["127.0.0.1:0"]',
            "2: internal.bind: needs join_token_file beside it: without a join token anybody could get "
            "requests of clients",
        ),
        (
            '[internal]\njoin_token_file = "x"',
            "2: internal.join_token_file: has no use: without internal.bind no worker can register",
        ),
        (
            '[internal]\nbind = []\njoin_token_file = "x"',
            "3: internal.join_token_file: has no use: without internal.bind no worker can register",
        ),
        (
            '[internal]\nbind = ["127.0.0.1:9090"]\njoin_token_file = "x"',
            "2: internal.bind[0]: cannot listen on 127.0.0.1:9090 and 127.0.0.1:9090 at once",
        ),
        (
            '[server]\nbind = ["[::1]:9091"]\n[internal]\nbind = ["[::]:9091"]\njoin_token_file = "x"',
            "4: internal.bind[0]: cannot listen on [::]:9091 and [::1]:9091 at once",
        ),
        (
            "[fleet]\nttl = 2",
            "2: fleet.ttl: ttl (2) must be more than two heartbeat_interval (1): one lost heartbeat would "
            "lose the worker",
        ),
        (
            "[fleet]\nheartbeat_interval = 2.5",
            "2: fleet.heartbeat_interval: ttl (5) must be more than two heartbeat_interval (2.5): one lost",
        ),
        (
            "[fleet]\nheartbeat_interval = 3\nttl = 5",
            "3: fleet.ttl: ttl (5) must be more than two heartbeat_interval (3): one lost heartbeat would",
        ),
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
            "[admin]\n" + TOKENS.replace("}]", "}, " + TOKENS.partition("[")[2].replace("abab", "cdab")),
            '2: admin.tokens.ops.id: "ops" is taken: t.toml:2 has it',
        ),
        (
            "[admin]\n" + TOKENS.replace("}]", "}, " + TOKENS.partition("[")[2].replace("ops", "other")),
            "2: admin.tokens.other.hash: is the token of t.toml:2 again",
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
        '[admin]\nbind = ["0.0.0.0:80", "host.example:81"]\nhosts = "admin.example"\n' + TOKENS,
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
        WORKER,
        WORKER + TENANT + 'models = ["m"]',
        TENANT + 'models = ["m"]',
        key("models = ['m']"),
        key("models = ['*']") + 'models = ["m"]',
        key("models = ['m']") + 'models = ["m", "n"]',
        MODEL + key("models = ['m']"),
        TENANT + "tiers = ['batch']",
        WORKER + "dns = false",
        WORKER.replace("127.0.0.1", "gpu.internal") + "dns = true",
        WORKER.replace("127.0.0.1", "LOCALHOST").replace("http:", "https:") + "dns = true",
        "[fleet]\nttl = 2.001",
        "[fleet]\nheartbeat_interval = 0.1\nttl = 0.25",
        "[internal]\nallowed_networks = ['0.0.0.0/0']",
        "[probes]\ninterval = 1\ntimeout = 5",
        "[[models]]\nid = 'a'\nfallbacks = ['b', 'c']\n[[models]]\nid = 'b'\nfallbacks = ['d']\n"
        "[[models]]\nid = 'c'\nfallbacks = ['d']\n[[models]]\nid = 'd'\n"
        "[[models]]\nid = 'e'\nfallbacks = ['a']",
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


def test_a_gateway_whose_workers_register_needs_no_worker_and_no_model(tmp_path: Path) -> None:
    (tmp_path / "join").write_text("0123456789abcdef")
    internal = "[internal]\nbind = ['127.0.0.1:0']\njoin_token_file = 'join'\n"
    parse_settings(internal, folder=tmp_path)
    named = internal + MODEL + "workers = ['not-here-yet']\n"
    (model,) = parse_settings(named, folder=tmp_path).models
    assert model.workers == ("not-here-yet",)
    broken = complaints(internal.replace("127.0.0.1:0", "x") + MODEL + "workers = ['not-here-yet']\n")
    assert [line.partition(" ")[0] for line in broken] == ["t.toml:2:", "t.toml:3:"]


def test_many_fallbacks_are_judged_at_once() -> None:
    count = 3000
    models = [f"[[models]]\nid = 'm{at}'\nfallbacks = ['m{at + 1}']\n" for at in range(count)]
    first, last = "".join(models), f"[[models]]\nid = 'm{count}'\n"
    parse_settings(first + last)
    (complaint,) = complaints(first + last + "fallbacks = ['m0']\n")
    assert complaint.startswith(f"t.toml:{3 * count + 3}: models.m{count}.fallbacks[0]: leads back to where")


def test_fallbacks_that_part_and_meet_again_are_walked_once() -> None:
    """Sixty forks one after the other have more ways through them than anybody could walk."""
    forks = [
        f"[[models]]\nid = 'm{at}'\nfallbacks = ['l{at}', 'r{at}']\n"
        f"[[models]]\nid = 'l{at}'\nfallbacks = ['m{at + 1}']\n"
        f"[[models]]\nid = 'r{at}'\nfallbacks = ['m{at + 1}']\n"
        for at in range(60)
    ]
    parse_settings("".join(forks) + "[[models]]\nid = 'm60'\n[[models]]\nid = 'x'\nfallbacks = ['m0']\n")


def test_a_value_that_did_not_pass_contradicts_nothing() -> None:
    assert complaints("[deadlines]\ndefault = 'x'\nmaximum = 10") == [
        't.toml:2: deadlines.default: write a number and a unit, such as "1.5 s"'
    ]
    assert complaints("[shutdown]\ngrace = 'x'\nhard_limit = 1") == [
        't.toml:2: shutdown.grace: write a number and a unit, such as "1.5 s"'
    ]
    assert len(complaints('[server]\nbind = ["x"]\n[admin]\nbind = ["127.0.0.1:8080"]')) == 1
    assert len(complaints('[internal]\nbind = ["x"]')) == 1
    assert len(complaints('[internal]\nbind = ["127.0.0.1:0"]\njoin_token_file = 1')) == 1
    assert len(complaints("[fleet]\nttl = 0\nheartbeat_interval = 4")) == 1
    assert len(complaints("[fleet]\nttl = 1\nheartbeat_interval = 0")) == 1
    assert len(complaints(MODEL + "fallbacks = ['a b']\n[[models]]\nid = 'n'\nfallbacks = ['m']")) == 1
    assert len(complaints("models = 3\n" + TENANT + "models = ['m']")) == 2
