"""One mistake, one complaint: with its line, its key, and what to write instead."""

from __future__ import annotations

import pytest

from tests.config.reading import HASH, MODEL, TENANT, WORKER, complaints, problems
from trio_gateway.config import Problem, parse_settings

SIZE = 'must be a whole number of bytes or a string such as "4 MiB"'
SHARE = 'must be a fraction such as "1/4", in quotes, of more than 0 and at most "1/1"'
DURATION = 'must be a number of seconds or a string such as "1.5 s"'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[limits]\nconections = 1", '2: limits.conections: unknown key; did you mean "connections"?'),
        ("[limits]\n\n'conections' = 1", '3: limits.conections: unknown key; did you mean "connections"?'),
        ("limits.conections = 1", '1: limits.conections: unknown key; did you mean "connections"?'),
        ("limits = {conections = 1}", '1: limits.conections: unknown key; did you mean "connections"?'),
        ("[limit]\nconnections = 1", '1: limit: unknown key; did you mean "limits"?'),
        ("[[worker]]\nid = 'a'", '1: worker: unknown key; did you mean "workers"?'),
        ("[server]\nbody_bytes = 1", "2: server.body_bytes: unknown key here; it belongs to [limits]"),
        ("bind = []", "1: bind: unknown key here; it belongs to [server] or [admin] or [internal]"),
        ("[server]\ncors_origin = []", '2: server.cors_origin: unknown key; did you mean "cors_origins"?'),
        ("[breaker]\ncooldwn = 1", '2: breaker.cooldwn: unknown key; did you mean "cooldown"?'),
        ("[log]\nx = 1", "2: log.x: unknown key; known here: level, format"),
        (
            "zzzzzz = 1",
            "1: zzzzzz: unknown key; known here: server, admin, internal, workers, models, tenants, limits, "
            "admission, deadlines, retry, breaker, probes, fleet, kubernetes, cluster, delivery, stream, "
            "websocket, shutdown, database, log",
        ),
        ("[log]\nLEVEL = 'info'", '2: log.LEVEL: unknown key; did you mean "level"?'),
        (
            "[admission.tiers.bulk]\nmax_share = 1",
            "1: admission.tiers.bulk: unknown key; known here: interactive, standard, batch",
        ),
        (
            "[admission.tiers.batches]\nmax_share = 1",
            '1: admission.tiers.batches: unknown key; did you mean "batch"?',
        ),
        ('[log]\n"a.b\\n" = 1', '2: log."a.b\\u000a": unknown key; known here: level, format'),
        (WORKER + "slot = 1\n" + MODEL, '5: workers.gpu-0.slot: unknown key; did you mean "slots"?'),
        (WORKER + "ca_pem = 'x'\n" + MODEL, "5: workers.gpu-0.ca_pem: unknown key; known here: id, url,"),
        (
            TENANT.replace("hash", "hsh"),
            '3: tenants.acme.keys.k1.hsh: unknown key; did you mean "hash"?',
        ),
    ],
)
def test_an_unknown_key_is_told_with_its_line_and_the_nearest_known_key(text: str, complaint: str) -> None:
    found = complaints(text)
    assert any(line.startswith(f"t.toml:{complaint}") for line in found), found


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        ('{id = "a"}', "2: admin.tokens: must be a list"),
        (f'[{{id = "a", hash = "{HASH}"}}]', "2: admin.tokens.a.role: must be given"),
        (f'[{{id = "a", hash = "{HASH}", role = "admin"}}]', '2: admin.tokens.a.role: must be "viewer" or'),
        ('[{id = "a", hash = "x", role = "viewer"}]', '2: admin.tokens.a.hash: must be "sha256:" and 64'),
        (f'[{{id = "", hash = "{HASH}", role = "viewer"}}]', "2: admin.tokens[0].id: must have 1 to 64"),
    ],
)
def test_a_wrong_token_of_operators_is_told(tokens: str, complaint: str) -> None:
    found = complaints(f"[admin]\ntokens = {tokens}")
    assert any(line.startswith(f"t.toml:{complaint}") for line in found), found


WHEN = "must be a date and time with its zone and without quotes, as in 2027-01-31T00:00:00Z"


@pytest.mark.parametrize(
    ("member", "complaint"),
    [
        ("expires = 2027-01-31", f"expires: {WHEN}"),
        ("expires = 2027-01-31T00:00:00", f"expires: {WHEN}"),
        ("expires = '2027-01-31T00:00:00Z'", f"expires: {WHEN}"),
        ("expires = 0001-01-01T00:00:00+01:00", f"expires: {WHEN}"),
        ("expires = 90", f"expires: {WHEN}"),
        ("models = []", "models: must not be empty"),
        ("models = ['a', '*']", 'models: names more models beside "*", which already means all'),
        ("tiers = []", "tiers: must not be empty"),
        ("tiers = ['fast']", 'tiers[0]: must be "interactive", "standard" or "batch", not "fast"'),
        ("requests_per_minute = 0", "requests_per_minute: must be greater than or equal to 1, not 0"),
        ("tokens_per_minute = 1.5", "tokens_per_minute: must be a whole number"),
    ],
)
def test_what_a_key_may_do_is_said_clearly(member: str, complaint: str) -> None:
    text = TENANT.replace("}", f", {member}}}")
    assert complaints(text) == [f"t.toml:3: tenants.acme.keys.k1.{complaint}"]


def test_the_end_of_a_key_is_the_same_moment_in_every_zone() -> None:
    ends = [
        parse_settings(TENANT.replace("}", f", expires = {written}}}")).tenants[0].keys[0].expires
        for written in ("2027-01-31T00:00:00Z", "2027-01-31 02:00:00+02:00")
    ]
    assert ends[0] == ends[1]


def test_a_section_of_a_later_version_without_keys_says_nothing_and_is_allowed() -> None:
    assert parse_settings("[breaker]\n[websocket]\n") == parse_settings("")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("limits = 1", "1: limits: must be one table: write [limits], with single brackets"),
        ("[[limits]]", "1: limits: must be one table: write [limits], with single brackets"),
        ("[[breaker]]", "1: breaker: must be one table: write [breaker], with single brackets"),
        ("[workers]", "1: workers: must be a list of tables: write [[workers]], with double brackets"),
        ("tenants = [1]", "1: tenants[0]: must be a table"),
        ("[limits]\nconnections = 0", "2: limits.connections: must be greater than or equal to 1, not 0"),
        ("[limits]\nconnections = 1.5", "2: limits.connections: must be a whole number"),
        ("[limits]\nconnections = true", "2: limits.connections: must be a whole number"),
        ("[limits]\nconnections = '1'", "2: limits.connections: must be a whole number"),
        ("[limits]\nbody_bytes = 1.0", f"2: limits.body_bytes: {SIZE}"),
        ("[limits]\nbody_bytes = false", f"2: limits.body_bytes: {SIZE}"),
        ("[limits]\nbody_bytes = -1", "2: limits.body_bytes: must be greater than or equal to 1, not -1"),
        ("[limits]\nbody_bytes = '1 MB'", '2: limits.body_bytes: unit "MB" is not known: write MiB'),
        ("[limits]\nkeep_alive = [1]", f"2: limits.keep_alive: {DURATION}"),
        ("[limits]\nkeep_alive = true", f"2: limits.keep_alive: {DURATION}"),
        ("[limits]\nkeep_alive = 0", "2: limits.keep_alive: must be greater than 0, not 0"),
        ("[limits]\nkeep_alive = '0 s'", '2: limits.keep_alive: must be greater than 0, not "0 s"'),
        ("[limits]\nkeep_alive = inf", "2: limits.keep_alive: must be a finite number, not inf"),
        ("[limits]\nkeep_alive = nan", "2: limits.keep_alive: must be a finite number, not nan"),
        (
            "[limits]\nkeep_alive = 75000000",
            "2: limits.keep_alive: must be less than or equal to 86400, not 75000000",
        ),
        ("[limits]\nkeep_alive = '5'", '2: limits.keep_alive: write a number and a unit, such as "1.5 s"'),
        ("[retry]\nbudget_ratio = 2", "2: retry.budget_ratio: must be less than or equal to 1, not 2"),
        ("[retry]\nbudget_ratio = '1'", "2: retry.budget_ratio: must be a number"),
        ("[server]\nexpose_worker = 1", "2: server.expose_worker: must be true or false"),
        ("[server]\nbind = 1", "2: server.bind: must be a list"),
        ("[server]\nbind = []", "2: server.bind: must not be empty"),
        ("[server]\nbind = [\n1]", "3: server.bind[0]: must be a string, in quotes"),
        ("[server]\nbind = [\n'[::1]:1',\n'x']", '4: server.bind[1]: must be "host:port", "[IPv6]:port" or '),
        ("[server]\nbind = ['[::1]:1', '[::1]:1']", "2: server.bind: names [::1]:1 twice"),
        (
            "[log]\nlevel = 'verbose'",
            '2: log.level: must be "debug", "info", "warning" or "error", not "verbose"',
        ),
        (
            "[log]\nlevel = 'waning'",
            '2: log.level: must be "debug", "info", "warning" or "error", not "waning"; '
            'did you mean "warning"?',
        ),
        ("[log]\nlevel = '" + "x" * 300 + "'", '2: log.level: must be "debug", "info", "warning" or "error"'),
        ("[log]\nlevel = 1", '2: log.level: must be "debug", "info", "warning" or "error", not 1'),
        ("[server]\ncors_origins = 1", "2: server.cors_origins: must be a list"),
        ("[server]\ncors_origins = [\n1]", "3: server.cors_origins[0]: must be a string, in quotes"),
        (
            "[server]\ncors_origins = [\n'https://a.b',\n'https://c.d/']",
            "4: server.cors_origins[1]: must end after the host or port, without a path or a final",
        ),
        (
            "[server]\ncors_origins = ['https://a.b', 'https://A.b:443']",
            "2: server.cors_origins: names https://a.b twice",
        ),
        (
            "[server]\ncors_origins = ['https://a.b', '*']",
            '2: server.cors_origins: names more origins beside "*", which already means all',
        ),
        ("[stream]\nreceipt = 1", "2: stream.receipt: must be true or false"),
        ("[internal]\nbind = 1", "2: internal.bind: must be a list"),
        ("[internal]\nallowed_networks = []", "2: internal.allowed_networks: must not be empty"),
        (
            "[internal]\nallowed_networks = [\n'10.0.0.0/8',\n'10.0.0.0/33']",
            '4: internal.allowed_networks[1]: must be a network such as "10.0.0.0/8" or "fd00::/8"',
        ),
        (
            "[internal]\nallowed_networks = ['10.0.0.1/8']",
            "2: internal.allowed_networks[0]: is an address inside of a network: write "
            '"10.0.0.0/8" if all of it is meant',
        ),
        (
            "[internal]\nallowed_networks = [1]",
            "2: internal.allowed_networks[0]: must be a string, in quotes",
        ),
        (
            "[internal]\nallowed_networks = ['fd00::/8', 'FD00:0::/8']",
            "2: internal.allowed_networks: names fd00::/8 twice",
        ),
        ("[internal]\njoin_token = 'x'", "2: internal.join_token: must not stand here: name a file that"),
        ("[breaker]\nfault_ratio = 0", "2: breaker.fault_ratio: must be greater than 0, not 0"),
        ("[breaker]\nfault_ratio = 1.5", "2: breaker.fault_ratio: must be less than or equal to 1, not 1.5"),
        ("[breaker]\nconsecutive_faults = 0", "2: breaker.consecutive_faults: must be greater than or equal"),
        ("[breaker]\ncooldown = 0", "2: breaker.cooldown: must be greater than 0, not 0"),
        ("[probes]\nfailures = 0", "2: probes.failures: must be greater than or equal to 1, not 0"),
        ("[probes]\nsuccesses = 1.0", "2: probes.successes: must be a whole number"),
        ("[probes]\ninterval = -1", "2: probes.interval: must be greater than or equal to 0, not -1"),
        ("[fleet]\nshare = 0.25", f"2: fleet.share: {SHARE}"),
        ("[fleet]\nshare = 1", f"2: fleet.share: {SHARE}"),
        ("[fleet]\nshare = '1'", f"2: fleet.share: {SHARE}"),
        ("[fleet]\nshare = '0/1'", f"2: fleet.share: {SHARE}"),
        ("[fleet]\nshare = '1/0'", f"2: fleet.share: {SHARE}"),
        ("[fleet]\nshare = '5/4'", f"2: fleet.share: {SHARE}"),
        ("[fleet]\nshare = '-1/4'", f"2: fleet.share: {SHARE}"),
        (
            "[fleet]\naffinity = 'sesion'",
            '2: fleet.affinity: must be "prefix", "session" or "none", not "sesion"; did you mean "session"?',
        ),
        (
            "[fleet]\nheartbeat_interval = '2h'\nttl = '5h'",
            '2: fleet.heartbeat_interval: must be less than or equal to 3600, not "2h"',
        ),
        (WORKER + "pods = ''", "5: workers.gpu-0.pods: chooses every pod of the namespace: name a label"),
        *(
            (WORKER + f"pods = '{selector}'", "5: workers.gpu-0.pods: must be a label selector such as")
            for selector in ("app=v,", "=v", "app in v", "app in (v", "a b", "app=-v", "app=v&limit=1")
        ),
        *(
            (f"[kubernetes]\napi = '{url}'", f"2: kubernetes.api: {why}")
            for url, why in (
                ("http://10.0.0.1", "must be https: the token would go over the network in clear text"),
                ("kubernetes.default.svc", 'must be a URL such as "https://kubernetes.default.svc"'),
                ("https://h:99999", 'must be a URL such as "https://kubernetes.default.svc"'),
                ("https://u@h", "must end after the host or port, without user info"),
                ("https://h/api", "must end after the host or port, without user info"),
            )
        ),
        ("[kubernetes]\nnamespace = 'A'", "2: kubernetes.namespace: must be the name of a namespace"),
        ("[kubernetes]\nslots_key = 'a/b/c'", "2: kubernetes.slots_key: must be the name of an annotation"),
        (WORKER + "dns = 1", "5: workers.gpu-0.dns: must be true or false"),
        (MODEL + "fallbacks = 'n'", "3: models.m.fallbacks: must be a list"),
        (MODEL + "fallbacks = ['*']", '3: models.m.fallbacks[0]: must not be "*", by which tenants mean'),
        (MODEL + "fallbacks = ['n', 'n']", "3: models.m.fallbacks: names n twice"),
        (MODEL + "workers = []", "3: models.m.workers: must not be empty"),
        (MODEL + "workers = 'gpu'", "3: models.m.workers: must be a list"),
        (
            "[[models]]\nid = 'a b'",
            '2: models."a b".id: must have 1 to 200 printable characters and no blanks',
        ),
        ("[[models]]\nid = ''", "2: models[0].id: must have 1 to 200 printable characters and no blanks"),
        ("[[models]]", "1: models[0].id: must be given"),
        (MODEL + "upstream = 1", "3: models.m.upstream: must be a string, in quotes"),
        (
            "[[models]]\nid = '*'",
            '2: models."*".id: must not be "*", by which tenants mean all models',
        ),
        (MODEL + "aliases = ['a', '*']", '3: models.m.aliases[1]: must not be "*", by which tenants mean'),
        (MODEL + "aliases = ['a', 'a']", "3: models.m.aliases: names a twice"),
        (
            MODEL + "aliases = ['a', 'b c']",
            "3: models.m.aliases[1]: must have 1 to 200 printable characters and no blanks",
        ),
        (MODEL + "aliases = [['a']]", "3: models.m.aliases[0]: must be a string, in quotes"),
        (MODEL + "aliases = 'a'", "3: models.m.aliases: must be a list"),
        (MODEL + "defaults = []", "3: models.m.defaults: must be a table"),
        (
            MODEL + "max_output_tokens = 0",
            "3: models.m.max_output_tokens: must be greater than or equal to 1, not 0",
        ),
        (
            MODEL + "max_output_tokens = 2147483648",
            "3: models.m.max_output_tokens: must be less than or equal to 2147483647, not 2147483648",
        ),
        (MODEL + "max_output_tokens = 1e3", "3: models.m.max_output_tokens: must be a whole number"),
        (WORKER + "labels = ['a', 'a']\n" + MODEL, "5: workers.gpu-0.labels: names a twice"),
        (
            WORKER + "labels = ['a/b']\n" + MODEL,
            "5: workers.gpu-0.labels[0]: must have 1 to 64 letters, digits, dots, underscores or hyphens",
        ),
        (
            WORKER + "cancel_grace = -1\n" + MODEL,
            "5: workers.gpu-0.cancel_grace: must be greater than or equal",
        ),
        (
            WORKER.replace("vllm", "vlm") + MODEL,
            '4: workers.gpu-0.kind: must be "vllm", "sglang", "llamacpp", "tgi", "ollama", "openai" or '
            '"agent", not "vlm"; did you mean "vllm"?',
        ),
        (
            WORKER.replace("8000", "x") + MODEL,
            "3: workers.gpu-0.url: needs a port from 1 to 65535 after the last colon",
        ),
        (TENANT + "tiers = []", "4: tenants.acme.tiers: must not be empty"),
        (
            TENANT + "tiers = ['standrd']",
            '4: tenants.acme.tiers[0]: must be "interactive", "standard" or "batch", not "standrd"; '
            'did you mean "standard"?',
        ),
        (
            TENANT + "models = ['*', 'm']",
            '4: tenants.acme.models: names more models beside "*", which already means all',
        ),
        (
            TENANT + "max_concurrency = 0",
            "4: tenants.acme.max_concurrency: must be greater than or equal to 1",
        ),
        (TENANT + "default_timeout = 0", "4: tenants.acme.default_timeout: must be greater than 0, not 0"),
        ("[[tenants]]\nid = 'a'", "1: tenants.a.keys: must be given"),
        (
            TENANT.replace(HASH, "tg_k1_secret"),
            '3: tenants.acme.keys.k1.hash: must be "sha256:" and 64 hexadecimal digits, the SHA-256 of the '
            "whole key",
        ),
        (
            TENANT.replace(HASH, HASH[:-1]),
            '3: tenants.acme.keys.k1.hash: must be "sha256:" and 64 hexadecimal digits',
        ),
        (
            TENANT.replace(HASH, HASH + "a"),
            '3: tenants.acme.keys.k1.hash: must be "sha256:" and 64 hexadecimal digits',
        ),
        (
            TENANT.replace("acme", "a" * 65),
            f"2: tenants.{'a' * 65}.id: must have 1 to 64 letters, digits, dots, underscores or hyphens",
        ),
        (
            TENANT.replace("ab" * 32, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            "3: tenants.acme.keys.k1.hash: is the hash of an empty key, with which everybody would be let in",
        ),
    ],
)
def test_a_value_that_cannot_be_used_is_told_with_what_can(text: str, complaint: str) -> None:
    found = complaints(text)
    assert len(found) == 1, found
    assert found[0].startswith(f"t.toml:{complaint}")
    assert len(found[0]) < 250


def test_a_key_beside_its_worker_is_refused_and_not_repeated() -> None:
    (complaint,) = complaints(WORKER + "api_key = 'sk-secret'\n" + MODEL)
    assert complaint == (
        "t.toml:5: workers.gpu-0.api_key: must not stand here: name a file that holds it with api_key_file"
    )


def test_a_key_in_place_of_its_hash_is_not_repeated() -> None:
    assert "tg_k1_secret" not in "\n".join(complaints(TENANT.replace(HASH, "tg_k1_secret")))


def test_sizes_and_durations_are_read_with_and_without_units() -> None:
    settings = parse_settings(
        """
        [limits]
        body_bytes = "1 MiB"
        event_bytes = 5000
        head_timeout = "500 ms"
        body_timeout = 7
        keep_alive = 1.25
        [deadlines]
        maximum = "2h"
        default = "30m"
        """
    )
    assert (settings.limits.body_bytes, settings.limits.event_bytes) == (1_048_576, 5000)
    assert settings.limits.head_timeout == 0.5
    assert (settings.limits.body_timeout, type(settings.limits.body_timeout)) == (7.0, float)
    assert settings.limits.keep_alive == 1.25
    assert (settings.deadlines.maximum, settings.deadlines.default) == (7200.0, 1800.0)


def test_zero_switches_heartbeats_probes_queue_grace_and_delay_off() -> None:
    settings = parse_settings(
        "[stream]\nheartbeat_after = 0\n[admission]\nmax_queued = 0\nmax_queued_bytes = 0\n"
        "[shutdown]\nreadiness_delay = 0\ngrace = 0\n[retry]\nbudget_ratio = 0\n"
        "[probes]\ninterval = 0\n"
    )
    assert settings.stream.heartbeat_after == 0
    assert (settings.admission.max_queued, settings.admission.max_queued_bytes) == (0, 0)
    assert (settings.shutdown.readiness_delay, settings.shutdown.grace) == (0, 0)
    assert settings.retry.budget_ratio == 0
    assert settings.probes.interval == 0


def test_every_problem_is_told_at_once_in_the_order_of_the_file() -> None:
    text = (
        "limit = 1\n"  # 1
        "[server]\n"
        "bind = ['x']\n"  # 3
        "tls = {}\n"  # 4
        "[[workers]]\n"  # 5: no url, no kind
        "id = 'w'\n"
        "slots = 0\n"  # 7
        "[[models]]\n"
        "id = 'm'\n"
        "workers = ['v']\n"  # 10: the broken worker is known all the same
        "[deadlines]\n"
        "default = 7000\n"  # 12
        "between_events = 0\n"  # 13
        "[database]\n"
        "url = 'x'\n"  # 15
    )
    found = problems(text, {"TRIO_GATEWAY__LOG__LEVEL": "x"}, ["log.format=x"])
    assert [(problem.line, problem.key) for problem in found] == [
        (1, "limit"),
        (3, "server.bind[0]"),
        (4, "server.tls.certificate"),
        (4, "server.tls.key"),
        (5, "workers.w.url"),
        (5, "workers.w.kind"),
        (7, "workers.w.slots"),
        (10, "models.m.workers[0]"),
        (12, "deadlines.default"),
        (13, "deadlines.between_events"),
        (15, "database.url"),
        (None, "log.level"),
        (None, "log.format"),
    ]


def test_a_problem_is_printed_as_compilers_do() -> None:
    assert str(Problem("a.toml", 3, "log.level", "no")) == "a.toml:3: log.level: no"
    assert str(Problem("a.toml", None, "", "no")) == "a.toml: no"
