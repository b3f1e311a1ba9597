"""Messages of the coordinator's protocol: what one is, how it becomes bytes and back, and how a request is refused."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from gossamer.core.errors import RunFailed

MAX_MESSAGE_BYTES = 4 << 20

Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Hash: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{1,64}$")]
Round: TypeAlias = Annotated[int, Field(ge=0, lt=2**28)]
Text: TypeAlias = Annotated[str, StringConstraints(max_length=1024)]
Seconds: TypeAlias = Annotated[float, Field(ge=0.0, le=1e9)]


class Record(BaseModel):
    """A message or a part of one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Code: TypeAlias = Literal[
    "garbage",
    "foreign",
    "identity",
    "unknown",
    "expired",
    "superseded",
    "taken",
    "flapping",
    "full",
    "not_in_sync",
    "stale",
    "conflict",
    "quota",
    "disk",
]


def printable(text: str) -> str:
    r"""What somebody else has said, for a header or a terminal: printable ASCII in one line, anything else escaped.

    >>> printable("a\x1b[31mb"), printable("caf\u00e9")
    ('a\\x1b[31mb', 'caf\\xe9')
    """
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode() for c in text)


class Refusal(Record):
    """Why a request was refused. `retry_s`: worth asking again then; None: not worth it."""

    code: Code
    text: Text
    retry_s: Seconds | None = None


class Refused(RunFailed):
    """A request was refused by the coordinator."""

    def __init__(self, code: Code, text: str, retry_s: float | None = None) -> None:
        text = printable(text)[:1024]  # it travels in a header, and ends in a terminal
        super().__init__(text)
        self.refusal = Refusal(code=code, text=text, retry_s=retry_s)

    @property
    def code(self) -> Code:
        """Which kind of refusal."""
        return self.refusal.code

    def __reduce__(self) -> tuple[type[Refused], tuple[Code, str, float | None]]:
        return type(self), (self.refusal.code, self.refusal.text, self.refusal.retry_s)


R = TypeVar("R", bound=Record)


def pack(record: Record) -> bytes:
    """A record as bytes."""
    return record.model_dump_json().encode()


def unpack(kind: type[R], data: bytes) -> R:
    """Bytes as a record.

    Raises:
        Refused: (garbage) they are none; the message names the place, not the content.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise Refused("garbage", f"a message of {len(data)} bytes: expected a {kind.__name__} of at most {MAX_MESSAGE_BYTES}")
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ascii(".".join(str(part) for part in first["loc"]))[1:-1][:80]
        raise Refused("garbage", f"no {kind.__name__}: {place or 'the message'}: {ascii(first['msg'])[1:-1][:200]}") from None
