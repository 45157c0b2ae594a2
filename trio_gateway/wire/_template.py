"""What all tokens of a stream have in common, learnt from one of them. Sans-IO.

The events of one answer differ in the text of the token, and in the usage where there is
one. The bytes around them were checked once; an event with the same bytes, and with text
that needs no escape, is as well formed as the one that they were learnt from, and what
has to be edited in it stands where it stood there. So a read's worth of events costs one
search, one join, and a look at each text.
"""

from __future__ import annotations

import re
from itertools import repeat
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
# What stands in a string; of what is written as an escape, all that hides no marker and is a whole character.
_AS_IT_IS: Final = rb'[^"\\\x00-\x1f]*+'
_ESCAPE: Final = (
    rb'\\(?:["\\/bfnrt]|u(?!00|[dD][89a-fA-F])[0-9a-fA-F]{4}'
    rb"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_CHARACTERS: Final = _AS_IT_IS + rb"(?:" + _ESCAPE + _AS_IT_IS + rb")*+"
_TEXT = re.compile(rb'(?!")' + _CHARACTERS)
_TEXTS = re.compile(rb"(?:(?!\n)" + _CHARACTERS + rb"\n)*+")
_NUMBER: Final = rb"(?:null|0|[1-9][0-9]{0,17}+)"
_NAME: Final = rb'"\w++":' + _SPACE
_NUMBERS: Final = _NAME + _NUMBER + rb"(?:," + _SPACE + _NAME + _NUMBER + rb")*+"
_COUNT: Final = _NAME + rb"(?:" + _NUMBER + rb"|\{(?:" + _NUMBERS + rb")?+\})"
_USAGE = re.compile(
    rb"," + _SPACE + rb'"usage":' + _SPACE + rb"\{" + _COUNT + rb"(?:," + _SPACE + _COUNT + rb")*+\}"
)
_USAGE_NAME: Final = b'"usage"'
_MODEL_NAME: Final = b'"model"'
_CHOICES: Final = b'"choices"'
_DIGITS = re.compile(rb"(?<=:) *+[0-9]++")
_ANY_NUMBER: Final = rb" *+(?:0|[1-9][0-9]{0,17}+)"
_DATA: Final = b"data: "
_BLANK: Final = b"\n\n"
_END: Final = b"}\n\n"


Rendered = tuple[bytes, int, bytes | None]
"""Events that had the form: for the client, how many there are, all of which carry output, and the last usage
in them as the only member of a JSON object, if there was one."""


def _tail_of(usage: bytes) -> bytes:
    """Write the pattern of what stands behind the form: that usage with other numbers, or none."""
    if not usage:
        return _END
    return rb"(?:" + _ANY_NUMBER.join(map(re.escape, _DIGITS.split(usage))) + rb")?+" + _END


class Template(NamedTuple):
    """The form of a stream's tokens.

    Attributes:
        before, after: bytes around the text, up to the usage or the end of the event.
        instead: of ``before``, for the client; the same object if nothing is edited in it.
        tail, tails: what may follow ``after``, up to the blank line; and that any number of times.
    """

    before: bytes
    after: bytes
    instead: bytes
    tail: re.Pattern[bytes]
    tails: re.Pattern[bytes]

    @classmethod
    def of(cls, event: bytes, upstream: bytes, public: bytes) -> Self | None:
        """Learn the form of an event; None: it has none.

        Args:
            event: well-formed JSON, in one line, that ends no choice and is no error.
            upstream, public: the model's name as JSON, at the engine and for the client.
        """
        head = _HEAD.match(event)
        if head is None or not event.endswith(b"}"):
            return None
        before, rest = head[0], event[head.end() :]
        text = _TEXT.match(rest)
        if text is None or not rest.startswith(b'"', text.end()):
            return None
        after, tail = rest[text.end() : -1], b""
        if _USAGE_NAME in after:
            usage = _USAGE.search(after)
            if usage is None or usage.end() != len(after):
                return None
            after, tail = after[: usage.start()], usage[0]
        before = instead = _DATA + before
        if upstream != public:
            model = _MODEL.search(before, 0, before.find(_CHOICES))
            if model is None or event.count(_MODEL_NAME) != 1:
                return None  # its name comes later, more than once, or not at all
            if model[1] == upstream:
                instead = before[: model.start(1)] + public + before[model.end(1) :]
        pattern = _tail_of(tail)  # few in all, which `re` keeps: it is of the engine's kind
        tails = re.compile(rb"(?:" + pattern + rb")*+")
        return cls(before, after, instead, re.compile(pattern), tails)

    def render_alone(self, data: bytes, *, keep_usage: bool) -> Rendered | None:
        """Edit one whole event; None: it has another form, or there is more than one."""
        before, after, instead, tail, _ = self
        skip = len(before)
        text = _TEXT.match(data, skip) if data.startswith(before) else None
        if text is None or not data.startswith(after, at := text.end()):
            return None
        end = at + len(after)
        usage = None
        if not data.startswith(_END, end) or end + len(_END) != len(data):
            if not tail.fullmatch(data, end):
                return None
            usage = b"{" + data[end + 1 : -2]
            if not keep_usage:
                return instead + data[skip:end] + _END, 1, usage
        return data if before is instead else instead + data[skip:], 1, usage

    def fits(self, event: bytes) -> bool:
        """Whether an event, without its blank line, has the form."""
        return self.render_alone(event + _BLANK, keep_usage=True) is not None

    def render(self, events: list[bytes], *, keep_usage: bool, data: bytes | None = None) -> Rendered | None:
        """Edit whole events, at least one; None: not all of them have the form.

        A few calls for all of them: for each there is nothing but its bytes to compare, cut and join.

        Args:
            events: without their blank lines.
            data: the events with those, where they are known.
        """
        before, after, instead, _, pattern = self
        count = len(events)
        rests = list(map(bytes.removeprefix, events, repeat(before)))
        texts, _, ends = zip(*map(bytes.partition, rests, repeat(after)), strict=True)
        text, tails = b"\n".join(texts) + b"\n", _BLANK.join(ends) + _BLANK
        # Only where nothing stood around a text, or something else, is there less to take away.
        fixed = count * (len(before) + len(after) - len(_BLANK) - 1)
        if sum(map(len, events)) != fixed + len(text) + len(tails):
            return None
        if not _TEXTS.fullmatch(text) or not pattern.fullmatch(tails):
            return None
        usage = None
        if len(tails) != count * len(_END):
            usage = b"{" + next(end for end in reversed(ends) if len(end) > 1)[1:]
            if not keep_usage:
                end = after + _END
                return instead + (end + instead).join(texts) + end, count, usage
        if before is not instead:
            data = instead + (_BLANK + instead).join(rests) + _BLANK
        elif data is None:
            data = _BLANK.join(events) + _BLANK
        return data, count, usage


def lines_of(data: bytes) -> list[bytes] | None:
    """Answer the lines of whole events, if each of them is one line with a blank one behind it; else None."""
    lines = data.split(b"\n")
    events = lines[:-1:2]
    alternate = len(lines) % 2 == 1 and not lines[-1] and lines[1::2].count(b"") == len(events)
    return events if alternate else None
