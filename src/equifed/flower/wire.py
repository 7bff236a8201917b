"""What server and clients say to each other, and how it becomes Flower records.

A request names its run, its tag (round and phase, and which try), an operation and the client's
position in the federation; arrays travel beside it as raw little-endian bytes. A reply repeats run,
tag and operation, so that nothing is trusted because of when it arrived. Everything is JSON and raw
bytes with stated sizes: there is nothing to unpickle, and a size is checked before it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

PROTOCOL = 1
"""Version of the messages; both sides must have the same."""

HEADER_LIMIT = 1 << 26
"""Longest header in characters that is read at all."""

DTYPES = ("float32", "float64", "uint64")

Arrays = Mapping[str, NDArray[Any]]
Sent = Mapping[str, NDArray[Any] | Array]
"""Arrays on their way out; one that goes to many clients is packed once."""

OPERATIONS = {
    "hello": "query.hello",
    "losses": "evaluate.losses",
    "gradient": "train.gradient",
    "local": "train.local",
    "sum": "query.sum",
    "norms": "query.norms",
    "recall": "query.recall",
    "metrics": "evaluate.metrics",
    "keys": "query.keys",
    "shares": "query.shares",
    "unmask": "query.unmask",
}
"""Operations and the Flower message types that carry them."""


class WireError(ValueError):
    """A message that does not follow the protocol."""


@dataclass(frozen=True)
class Request:
    """What the server asks of one client.

    Parameters
    ----------
    op : str
        One of :data:`OPERATIONS`.
    run : str
        Identity of the equifed run; it outlives a Flower run that had to be started again.
    tag : str
        Round, phase and try, for example ``round/3/gradient#0``.
    client : int
        Position of the client in the federation; -1 in a hello, which comes before there is one.
    args : dict
        Plain values.
    arrays : dict of arrays
        Model-sized values.
    """

    op: str
    run: str
    tag: str
    client: int
    args: dict[str, Any] = field(default_factory=dict)
    arrays: Sent = field(default_factory=dict)

    def to_records(self) -> RecordDict:
        """Return the content of a Flower message."""
        header = {
            "protocol": PROTOCOL,
            "op": self.op,
            "run": self.run,
            "tag": self.tag,
            "client": self.client,
            "args": self.args,
        }
        return _records(header, self.arrays)

    @classmethod
    def from_records(cls, content: RecordDict) -> Request:
        """Read a request, or raise :class:`WireError`."""
        header, arrays = _read(content)
        if header.get("protocol") != PROTOCOL:
            raise WireError(
                f"the server speaks version {header.get('protocol')!r} of the messages, this "
                f"client version {PROTOCOL}; install the same equifed on both"
            )
        texts = [header.get(key) for key in ("op", "run", "tag")]
        client, args = header.get("client"), header.get("args")
        if not all(isinstance(text, str) for text in texts) or texts[0] not in OPERATIONS:
            raise WireError("the request names no known operation")
        if type(client) is not int or not isinstance(args, dict):
            raise WireError("the request has no client or no arguments")
        return cls(str(texts[0]), str(texts[1]), str(texts[2]), client, args, arrays)


@dataclass(frozen=True)
class Reply:
    """What a client answers: numbers and arrays, or an error in our own words.

    ``error`` is empty, or one of "stale" (the client does not hold what the request refers to),
    "non-finite", "data", "request", "refused" and "failed"; ``text`` says more and never quotes an
    exception, whose text may contain data.
    """

    op: str
    run: str
    tag: str
    numbers: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)
    error: str = ""
    text: str = ""

    def to_records(self) -> RecordDict:
        """Return the content of a Flower message."""
        header = {
            "protocol": PROTOCOL,
            "op": self.op,
            "run": self.run,
            "tag": self.tag,
            "numbers": self.numbers,
            "error": self.error,
            "text": self.text,
        }
        return _records(header, self.arrays)

    @classmethod
    def from_records(cls, content: RecordDict) -> Reply:
        """Read a reply, or raise :class:`WireError`."""
        header, arrays = _read(content)
        if header.get("protocol") != PROTOCOL:
            raise WireError(
                f"the client speaks version {_short(header.get('protocol'))} of the messages, the "
                f"server version {PROTOCOL}; install the same equifed on both"
            )
        texts = [header.get(key) for key in ("op", "run", "tag", "error", "text")]
        numbers = header.get("numbers")
        if not all(isinstance(text, str) for text in texts) or not isinstance(numbers, dict):
            raise WireError("the reply's header is incomplete")
        op, run, tag, error, text = (str(t) for t in texts)
        return cls(op, run, tag, numbers, arrays, error, text[:300])


def count_bytes(content: RecordDict) -> int:
    """Return the bytes of payload that a message carries: headers, keys and arrays.

    Flower adds framing of its own, a few hundred bytes a message, which is not counted.

    >>> count_bytes(Request("losses", "r", "t", 0, {}, {"x": np.zeros(10)}).to_records()) > 80
    True
    """
    return sum(record.count_bytes() for record in content.values())


def expect(arrays: Sent, name: str, size: int, dtype: str) -> NDArray[Any]:
    """Return a vector of a reply or request, or raise :class:`WireError` if it is another thing."""
    array = arrays.get(name)
    if not isinstance(array, np.ndarray):
        raise WireError(f"the array {name!r} is missing")
    if array.shape != (size,) or array.dtype.name != dtype:
        raise WireError(
            f"the array {name!r} is {array.dtype.name} of shape {array.shape}, expected {dtype} of "
            f"shape ({size},)"
        )
    return array


def pack(array: NDArray[Any]) -> Array:
    """Return an array as Flower carries it: raw little-endian bytes with dtype and shape."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return Array(array.dtype.name, tuple(array.shape), "equifed.raw", little.tobytes())


def _records(header: dict[str, Any], arrays: Sent) -> RecordDict:
    packed = ArrayRecord(
        {name: a if isinstance(a, Array) else pack(a) for name, a in arrays.items()}
    )
    return RecordDict({"equifed": ConfigRecord({"header": json.dumps(header)}), "arrays": packed})


def _read(content: RecordDict) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    try:
        text = content.config_records["equifed"]["header"]
        packed = content.array_records["arrays"]
    except KeyError:
        raise WireError("the message carries no equifed header") from None
    if not isinstance(text, str) or len(text) > HEADER_LIMIT:
        raise WireError("the header is no text, or too long")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("the header is not JSON") from None
    if not isinstance(header, dict):
        raise WireError("the header is not a table")
    return header, {name: _unpack(name, array) for name, array in packed.items()}


def _unpack(name: str, array: Array) -> NDArray[Any]:
    if array.dtype not in DTYPES or len(array.shape) > 2 or min(array.shape, default=0) < 0:
        raise WireError(f"the array {_short(name)} has an unknown kind or shape")
    dtype = np.dtype(array.dtype).newbyteorder("<")
    if len(array.data) != math.prod(array.shape) * dtype.itemsize:
        raise WireError(f"the array {_short(name)} does not have the size that it states")
    return (
        np.frombuffer(array.data, dtype=dtype).astype(array.dtype, copy=False).reshape(array.shape)
    )


def _short(value: object) -> str:
    return repr(value)[:40]
