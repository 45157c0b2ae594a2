"""What all tokens of a stream have in common, learnt from one of them. Sans-IO.

The events of one answer differ in the text of the token, and in the usage where there is
one. The bytes around them were checked once; an event with the same bytes, and with text
that needs no escape, is as well formed as the one that they were learnt from, and what
has to be edited in it stands where it stood there. So a read's worth of events costs one
search, one join, and a look at each text.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, Self

_SPACE: Final = rb"[ ]*+"
_MEMBER: Final = rb'"\w++":' + _SPACE + rb'(?:"[^"\\]*+"|[0-9]++|null),' + _SPACE
_HEAD = re.compile(
    rb'\{(?:(?!"(?:choices|usage|error)")' + _MEMBER + rb")*+"
    rb'"choices":' + _SPACE + rb"\[\{(?:" + _MEMBER + rb")*+"
    rb'(?:"delta":'
    + _SPACE
    + rb'\{(?:"role":'
    + _SPACE
    + rb'(?:"assistant"|null),'
    + _SPACE
    + rb')?+"(?:content|reasoning|reasoning_content)"|"text"):'
    + _SPACE
    + rb'"'
)
_MODEL = re.compile(rb'(?<=[{ ,]"model":)' + _SPACE + rb'("[^"\\]*+")')
_TEXT = re.compile(rb'[^"\\\x00-\x1f]++')  # what stands in a string as it is
_NUMBER: Final = rb"(?:null|0|[1-9][0-9]{0,17}+)"
_NAME: Final = rb'"\w++":' + _SPACE
_NUMBERS: Final = _NAME + _NUMBER + rb"(?:," + _SPACE + _NAME + _NUMBER + rb")*+"
_COUNT: Final = _NAME + rb"(?:" + _NUMBER + rb"|\{(?:" + _NUMBERS + rb")?+\})"
_USAGE = re.compile(
    rb"," + _SPACE + rb'("usage":' + _SPACE + rb"\{" + _COUNT + rb"(?:," + _SPACE + _COUNT + rb")*+\})\}"
)
_USAGE_NAME: Final = b'"usage"'
_DATA: Final = b"data: "
_BLANK: Final = b"\n\n"
_END: Final = b"}\n\n"


Rendered = tuple[bytes, int, bytes | None]
"""Events that had the form: for the client, how many there are, all of which carry output, and the last usage
in them as the only member of a JSON object, if there was one."""


class Template(NamedTuple):
    """The form of a stream's tokens.

    Attributes:
        before, after: bytes around the text, up to the usage or the end of the event.
        instead: of ``before``, for the client.
    """

    before: bytes
    after: bytes
    instead: bytes

    @classmethod
    def of(cls, event: bytes, upstream: bytes, public: bytes) -> Self | None:
        """Learn the form of an event; None: it has none.

        Args:
            event: well-formed JSON, in one line, that ends no choice and is no error.
            upstream, public: the model's name as JSON, at the engine and for the client.
        """
        head = _HEAD.match(event)
        if head is None:
            return None
        before, rest = head[0], event[head.end() :]
        text = _TEXT.match(rest)
        if text is None or not rest.startswith(b'"', text.end()):
            return None
        after = rest[text.end() : -1]
        if _USAGE_NAME in after:
            usage = _USAGE.search(after + b"}")
            if usage is None or usage.end() != len(after) + 1:
                return None
            after = after[: usage.start()]
        instead = before
        if upstream != public:
            model = _MODEL.search(before)
            if model is None:
                return None  # its name comes later, or not at all
            if model[1] == upstream:
                instead = before[: model.start(1)] + public + before[model.end(1) :]
        return cls(_DATA + before, after, _DATA + instead)

    def render(self, data: bytes, *, keep_usage: bool) -> Rendered | None:
        """Edit whole events; None: not all of them have the form."""
        before, after, instead = self
        end = after + _END
        if (
            data.startswith(before)
            and data.endswith(end)
            and _TEXT.fullmatch(data, len(before), -len(end) + len(data))
        ):
            # As most are that come alone: there is nothing to go through.
            if before == instead:
                return data, 1, None
            return instead + data[len(before) :], 1, None
        skip, fixed, width, size = len(before), len(after), len(end), len(data)
        edited, usage = before != instead, None
        out: list[bytes] = []
        at = events = 0
        while at < size:
            text = _TEXT.match(data, at + skip) if data.startswith(before, at) else None
            if text is None:
                return None
            at = text.end()
            out += (instead, text[0], end)
            events += 1
            if data.startswith(end, at):
                at += width
                continue
            counts = _USAGE.match(data, at + fixed) if data.startswith(after, at) else None
            if counts is None or not data.startswith(_BLANK, counts.end()):
                return None
            usage = counts
            if keep_usage:
                out[-1] = data[at : counts.end() + 2]
            else:
                edited = True
            at = counts.end() + 2
        if not events:
            return None
        data = b"".join(out) if edited else data
        return data, events, None if usage is None else b"{" + usage[1] + b"}"
