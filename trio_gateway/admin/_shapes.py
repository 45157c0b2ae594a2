"""What the operators' door answers and takes, as data: the shapes of the OpenAPI document.

Times are seconds, ages are relative to the moment of the answer, and null stands for what is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ._schema import (
    Schema,
    anything,
    count,
    many,
    named,
    number,
    optional,
    or_null,
    shape,
    switch,
    table,
    text,
    word,
)

_PROCESS: Final = count("number of the process that has it, where there are several")
_TOKENS: Final = shape(
    prompt=or_null(count("tokens of the prompt")),
    generated=or_null(count("tokens that the engine made")),
    delivered=or_null(count("tokens in events that the client's machine has")),
    acknowledged=or_null(count("tokens that the client acknowledged; null where nothing acknowledges")),
)

_RATE: Final = or_null(
    shape(
        limit=count("the most a minute"),
        remaining=number("what is left now; below 0 where a use was larger than thought"),
    )
)

_REQUEST: Final = shape(
    id=text("exchange id"),
    client_request_id=or_null(text("what the client called it")),
    tenant=text(),
    key_id=or_null(text()),
    operation=text(),
    model=text("public name"),
    tier=text(),
    stream=switch("whether the answer is a stream"),
    state=word("waiting", "running", "ended"),
    phase=text("what the client has: queued, before_headers, before_content or after_content"),
    outcome=or_null(text("how it ended; null while it has not")),
    code=or_null(text("code of the error that the client got")),
    holder=or_null(
        shape(
            task=text("name of the task that owns it"),
            doing=or_null(text("where it is: file, line and function")),
        )
    ),
    position=or_null(
        count(
            "place by arrival among those that wait for its model, from 1; tiers and shares decide who is "
            "next; null while it does not wait",
            least=1,
        )
    ),
    eta=or_null(number("predicted seconds until it is placed; null: nobody can tell, see why")),
    why=or_null(
        word(
            "tenant_at_concurrency",
            "tenant_frozen",
            "tier_share",
            "no_slot",
            "ahead_in_line",
            "outage",
            "model_without_worker",
            meaning="why it waits",
        )
    ),
    age=number("seconds since it arrived"),
    deadline_in=or_null(number("seconds until its deadline")),
    worker=or_null(text()),
    attempt=count("attempts so far"),
    lag=or_null(number("seconds that the oldest waiting byte waits for the client")),
    stalled_for=or_null(number("seconds since the client took the last byte, while bytes wait")),
    buffered_bytes=count("bytes that wait for the client"),
    tokens=_TOKENS,
    door=word("http", "websocket", "responses"),
    resumable=switch("its client may come back to its stream; not told of one that has ended"),
)

_ENDING: Final = shape(
    id=text("exchange id"),
    outcome=text(),
    phase=text(),
    code=or_null(text("code of the error that the client got")),
    tenant=text(),
    model=text(),
    worker=or_null(text()),
    ended_ago=number("seconds since the end"),
    duration=number("seconds from arrival to end"),
    tokens=_TOKENS,
)

_BREAKERS: Final = table(text(), "state of the breaker of each model that was tried")

_WORKER: Final = shape(
    id=text(),
    url=text(),
    kind=text(),
    slots=count(),
    held=count("slots of attempts that run"),
    draining=count("slots of attempts that are over, until the engine let go"),
    free=count("slots that can be given away now; 0 while the worker is not ready"),
    attempts=count("since start"),
    faults=count("since start"),
    ready=switch("whether it gets requests, if it has room"),
    state=or_null(text("what it says of itself")),
    alive=switch("whether its probes succeed"),
    suspect=switch(),
    registered=switch("whether it registered itself"),
    incarnation=or_null(count()),
    snapshot_age=or_null(number("seconds since it last told how it is")),
    running=or_null(count("requests that it says run there, of all gateways")),
    queued=or_null(count("requests that it says wait there")),
    paused=count("requests whose engine waits for their reader"),
    models=or_null(many(text(), "what it reports; null: not known")),
    breakers=_BREAKERS,
    breaker_history=many(
        shape(
            ago=number("seconds since"),
            model=text(),
            **{"from": text()},
            to=text(),
            why=or_null(text()),
        ),
        "changes of its breakers, newest first",
    ),
    operator=word("none", "drained", "ejected", meaning="what an operator did to it"),
    withheld=or_null(text("why its pod gets nothing new: not ready, or terminating")),
)

_TENANT: Final = shape(
    id=text(),
    frozen=switch("whether nothing of it is placed"),
    weight=number(),
    running=count("requests at workers"),
    queued=count("requests that wait"),
    max_concurrency=or_null(count()),
    max_queued=count(),
    counter=number("service that it got, in tokens over its weight: the least is served first"),
    requests_per_minute=_RATE,
    tokens_per_minute=_RATE,
    tokens=table(or_null(count()), "tokens since start, by kind"),
)

_POOL: Final = shape(
    pool=text("name of the pool: the workers behind a model"),
    models=many(text()),
    slots=count(),
    held=count(),
    draining=count(),
    pace=or_null(number("slots that come free a second, as things are; null: none is in use")),
    tiers=table(count(), "requests that wait, by tier"),
    oldest_wait=or_null(number("seconds that the oldest one waits")),
)

_TASK: Final = shape(
    name=text(),
    doing=or_null(text("innermost place of ours: file, line and function")),
    children=many(named("Task")),
)

_SHORT_WORKER: Final = shape(
    id=text(),
    slots=count(),
    held=count(),
    draining=count(),
    free=count(),
    ready=switch(),
    breakers=_BREAKERS,
    operator=word("none", "drained", "ejected"),
)

SHAPES: Final[Mapping[str, Schema]] = MappingProxyType(
    {
        "Error": shape(
            error=shape(
                message=text("for people; may change"),
                type=text(),
                code=text("see the table of codes"),
                param=or_null(text("the field at fault")),
            )
        ),
        "Request": optional(_REQUEST, process=_PROCESS),
        "Requests": shape(
            requests=many(named("Request"), "those that wait or run, then those that ended"),
            total=count("all that match"),
            offset=count("place of the first row"),
        ),
        "Timeline": shape(
            request=named("Request"),
            timeline=many(
                shape(
                    at=number("seconds since it arrived"),
                    what=word(
                        "arrived",
                        "accepted",
                        "queued",
                        "placed",
                        "opened",
                        "headers",
                        "first_content",
                        "attempt_failed",
                        "sent_back",
                        "last_content",
                        "full",
                        "room",
                        "ended",
                        "settled",
                        "released",
                    ),
                    detail=table(anything(), "what else is known of the step"),
                ),
                "oldest first",
            ),
        ),
        "Tenant": _TENANT,
        "Tenants": shape(tenants=many(named("Tenant"))),
        "Pool": _POOL,
        "Queues": shape(
            depth=count("requests that wait"),
            bytes=count("bytes of their bodies"),
            max_queued=count(),
            max_queued_bytes=count(),
            pools=many(named("Pool")),
        ),
        "Worker": _WORKER,
        "Workers": shape(workers=many(named("Worker"))),
        "Limits": shape(
            limits=table(
                shape(
                    value=anything(),
                    source=word("file", "environment", "argument", "live", "default"),
                    applies=word("now", "new_requests", "restart", meaning="when a change counts"),
                ),
                "by name of the setting, with dots",
            )
        ),
        "Task": _TASK,
        "Tasks": shape(
            tasks=many(
                optional(
                    shape(exchange=or_null(text("null: tasks of no exchange")), tasks=many(named("Task"))),
                    process=_PROCESS,
                )
            )
        ),
        "SelfAudit": shape(
            ok=switch(),
            equations=many(text(), "equations of conservation that do not hold, with figures"),
            leaks=many(
                shape(
                    kind=word("lease", "position", "buffer", "descriptor", "task"),
                    holder=text("exchange id or name of a task"),
                    worker=or_null(text()),
                    age=number(),
                    detail=text(),
                ),
                "what is held for something that has ended",
            ),
        ),
        "Ending": optional(_ENDING, process=_PROCESS),
        "Endings": shape(endings=many(named("Ending"), "newest first")),
        "Version": shape(
            version=text(),
            boot_id=text("this process; also in records"),
            python=text(),
            trio=text(),
            uptime=number("seconds since start"),
        ),
        "Configuration": table(anything(), "nested as in the file; secrets are ***"),
        "AuditEntry": shape(
            at=text("when, as ISO 8601 with its zone"),
            actor=text("id of the token, or local"),
            role=word("viewer", "operator"),
            action=text(),
            target=or_null(text()),
            before=anything("what was changed, as it was"),
            after=anything("the same afterwards"),
            outcome=word("done", "nothing_to_do", "refused"),
            request_id=text("X-Request-Id of the answer"),
        ),
        "Audit": shape(audit=many(named("AuditEntry"), "newest first")),
        "Statistics": table(anything(), "see the page on statistics"),
        "Flight": table(anything(), "a recorded exchange: times, sizes and causes, no content"),
        "ShortWorker": _SHORT_WORKER,
        "Snapshot": shape(
            at=number("seconds since the gateway started"),
            throughput=shape(requests_per_second=number(), tokens_per_second=number()),
            waiting=count(),
            running=count(),
            wait_p50=or_null(number()),
            wait_p99=or_null(number()),
            ttfc_p50=or_null(number("to the first content")),
            ttfc_p99=or_null(number()),
            gap_p50=or_null(number("between events")),
            gap_p99=or_null(number()),
            buffered_bytes=count(),
            refusals=table(count(), "since start, by code"),
            service=table(number(), "tokens a second, by tenant"),
            workers=many(named("ShortWorker")),
            ready=switch(),
            stopping=switch(),
        ),
        "Who": shape(id=or_null(text("id of the token, or local")), role=or_null(word("viewer", "operator"))),
        "Act": shape(
            done=switch("false: there was nothing to do"),
            before=anything("what was changed, as it was"),
            after=anything("the same afterwards"),
        ),
        # What actions take.
        "Nothing": shape(),
        "ResetBreaker": optional(shape(), model=text("only the breaker of this model", minLength=1)),
        "ForceBreaker": shape(
            model=text("public name or the engine's", minLength=1), state=word("open", "closed")
        ),
        "SetLimits": shape(set=table(anything(), "new values by name of the setting, with dots")),
        "RotateKey": optional(
            shape(
                tenant=text("tenant of the key", minLength=1),
                id=text("id of the key that a new one replaces", minLength=1),
            ),
            overlap=number("seconds for which the old key is still good; 0"),
        ),
        "LogLevel": shape(level=word("debug", "info", "warning", "error")),
    }
)
