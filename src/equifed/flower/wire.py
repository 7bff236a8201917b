"""What server and clients say to each other, and how it becomes Flower records.

A request names its run, its tag (round and phase, and which try), an operation and the client's
position in the federation; arrays travel beside it as raw little-endian bytes. A reply repeats run,
tag and operation, so that nothing is trusted because of when it arrived. Everything is JSON and raw
bytes with stated sizes: there is nothing to unpickle, and a size is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from equifed.contract.arrays import BlockMatrix

if TYPE_CHECKING:  # a node that only passes messages on does without torch
    import torch
    from torch import Tensor

PROTOCOL = 9
"""Version of the messages; both sides must have the same."""

REQUEST_LIMIT = 1 << 26
"""Longest header of a request, in characters, that is read at all."""

REPLY_LIMIT = 1 << 20
"""Longest header of a reply, in characters, that is read at all."""

PACK_LIMIT = 1 << 16
"""Bytes of arrays up to which they travel in the header's record: fewer objects, fewer calls."""

REFUSED = "refused by the site"
"""What a node answers to a request that is not one of ours."""

DTYPES = ("float32", "float64", "int64", "uint64")
KINDS = {"client": int, "args": dict, "numbers": dict}
"""What the entries of a header are, where they are not text."""

Sent = Mapping[str, NDArray[Any] | Array]
"""Arrays on their way out; one that goes to many clients is packed once."""

ALWAYS = ("loss", "accuracy", "mse")
"""Metrics that a client measures whether or not they are asked for, where its data have them."""

PARTS = ("displacement", "snapshot", "average", "mean_gradient", "multiplier")
"""Vectors that local work may give."""


@dataclass(frozen=True)
class Verb:
    """A request: the Flower message that carries it, and what its answer may hold."""

    message: str
    arrays: tuple[str, ...] = ()  # that an answer may hold, and no others
    own_part: Literal["", "before", "after"] = ""  # of the round, that the work starts from
    masks: bool = False  # whether it is a step of a hidden sum, which needs no model


VERBS = {
    "hello": Verb("query.hello"),
    "losses": Verb("evaluate.losses", own_part="before"),
    "gradient": Verb("train.gradient", ("gradient", "masked"), own_part="before"),
    "local": Verb("train.local", (*PARTS, "masked"), own_part="before"),
    "sum": Verb("query.sum", ("masked",)),
    "curvature": Verb("train.curvature", ("curvature", "masked")),
    "bounds": Verb("query.bounds"),
    "norms": Verb("query.norms"),
    "recall": Verb("query.recall", ("vector",)),
    "metrics": Verb("evaluate.metrics", own_part="after"),
    "keys": Verb("query.keys", masks=True),
    "shares": Verb("query.shares", masks=True),
    "boxes": Verb("query.boxes", masks=True),
    "unmask": Verb("query.unmask", masks=True),
    "prepare": Verb("query.prepare", ("vector", "masked")),
    "statistics": Verb("query.statistics"),
    "deliver": Verb("query.deliver", own_part="after"),
}
"""Everything that a server can ask a client for: a policy, a plan and a node know nothing else."""


class WireError(ValueError):
    """A message that does not follow the protocol."""


@dataclass(frozen=True)
class Request:
    """What the server asks of one client: plain values ``args`` and model-sized ``arrays``.

    ``run`` outlives a Flower run that had to be started again; ``tag`` is round, phase and try, as
    ``round/3/gradient#0``; ``client`` its position, -1 in a hello, which comes before there is one.
    """

    op: str
    run: str
    tag: str
    client: int
    args: dict[str, Any] = field(default_factory=dict)
    arrays: Sent = field(default_factory=dict)

    def to_records(self) -> RecordDict:
        """Return the content of a Flower message."""
        return _write(self)

    def reply(
        self,
        numbers: dict[str, Any],
        arrays: Mapping[str, NDArray[Any]] | None = None,
        **error: str,
    ) -> Reply:
        """Return a reply to this request; ``error`` and ``text`` say why it is none."""
        return Reply(self.op, self.run, self.tag, numbers, arrays or {}, **error)

    @classmethod
    def from_records(cls, content: RecordDict) -> Request:
        """Read a request, or raise :class:`WireError`."""
        request = cls(**_read(content, cls, "server", REQUEST_LIMIT))
        if request.op not in VERBS:
            raise WireError("the request names no known operation")
        return request


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
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    error: str = ""
    text: str = ""

    def to_records(self) -> RecordDict:
        """Return the content of a Flower message."""
        return _write(self)

    @classmethod
    def from_records(cls, content: RecordDict, limit: int = REPLY_LIMIT) -> Reply:
        """Read a reply, or raise :class:`WireError`; ``limit`` bounds its header."""
        values = _read(content, cls, "client", limit)
        allowed = VERBS[values["op"]].arrays if values["op"] in VERBS else ()
        odd = [name for name in values["arrays"] if name not in allowed]
        if odd:
            raise WireError(f"sent the array {_shorten(odd[0])}, which was not requested")
        return cls(**{**values, "text": values["text"][:300]})


def count_bytes(content: RecordDict) -> int:
    """Return the bytes of payload that a message carries: headers, keys and arrays.

    Flower adds framing of its own, a few hundred bytes a message, which is not counted.

    >>> count_bytes(Request("losses", "r", "t", 0, {}, {"x": np.zeros(10)}).to_records()) > 80
    True
    """
    return sum(record.count_bytes() for record in content.values())


def expect_vector(arrays: Sent, name: str, size: int, dtype: str) -> NDArray[Any]:
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


def expect_number(
    name: str, value: object, dtype: str = "float64", least: float = -math.inf
) -> float:
    """Return a number of a reply, or raise :class:`WireError` if a client cannot have got it.

    It is within the range of the ``dtype`` that it was computed in, and not below ``least``.

    >>> expect_number("loss", 2)
    2.0
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WireError(f"{name} is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise WireError(f"{name} is {number}")
    if abs(number) > float(np.finfo(dtype).max):
        raise WireError(f"{name} is {number}, which no {dtype} can hold")
    if number < least:
        raise WireError(f"{name} is {number}, and cannot be below {least:g}")
    return number


def find_round(address: Sequence[Any]) -> int:
    """Return the round that a stream's address names, or 0.

    >>> find_round(["round", 3, "local"]), find_round(["evaluate"])
    (3, 0)
    """
    after = [b for a, b in pairwise(address) if a == "round"]
    return int(after[0]) if after and isinstance(after[0], int) else 0


def digest_model(data: bytes) -> str:
    """Return a short digest of a model's bytes, the same on both sides."""
    return hashlib.sha256(data).hexdigest()[:16]


def pack(array: NDArray[Any]) -> Array:
    """Return an array as Flower carries it: raw little-endian bytes with dtype and shape."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return Array(array.dtype.name, tuple(array.shape), "equifed.raw", little.tobytes())


def _write(message: Request | Reply) -> RecordDict:
    values = {f.name: getattr(message, f.name) for f in fields(message) if f.name != "arrays"}
    header = json.dumps({"protocol": PROTOCOL, **values})
    arrays = {k: a if isinstance(a, Array) else pack(a) for k, a in message.arrays.items()}
    if not arrays:
        return RecordDict({"equifed": ConfigRecord({"header": header})})
    if sum(len(array.data) for array in arrays.values()) > PACK_LIMIT:
        record = ConfigRecord({"header": header})
        return RecordDict({"equifed": record, "arrays": ArrayRecord(arrays)})
    index = json.dumps([[name, a.dtype, list(a.shape)] for name, a in arrays.items()])
    data = b"".join(array.data for array in arrays.values())
    return RecordDict({"equifed": ConfigRecord({"header": header, "index": index, "data": data})})


def _read(
    content: RecordDict, kind: type[Request | Reply], sender: str, limit: int
) -> dict[str, Any]:
    record = content.config_records.get("equifed")
    if record is None:
        raise WireError("the message carries no equifed header")
    header = _read_json(record, "header", dict, limit)
    if header.get("protocol") != PROTOCOL:
        raise WireError(
            f"the {sender} speaks version {_shorten(header.get('protocol'))} of the messages, not "
            f"{PROTOCOL}; install the same equifed on both sides"
        )
    names = [f.name for f in fields(kind) if f.name != "arrays"]
    for name in names:
        if type(header.get(name)) is not KINDS.get(name, str):
            raise WireError(f"the header has no {name!r}, or one of another kind")
    packed = _split(record) if "data" in record else content.array_records.get("arrays", {})
    arrays = {name: _unpack(name, array) for name, array in packed.items()}
    return {**{name: header[name] for name in names}, "arrays": arrays}


def _read_json(record: ConfigRecord, name: str, kind: type, limit: int) -> Any:
    """Return a table or list that a record holds as text of at most ``limit`` characters."""
    text = record.get(name)
    if not isinstance(text, str) or len(text) > limit:
        raise WireError(f"the {name} is not text, or too long")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise WireError(f"the {name} is not JSON") from None
    if not isinstance(value, kind):
        raise WireError(f"the {name} is not a {'table' if kind is dict else 'list'}")
    return value


def _split(record: ConfigRecord) -> dict[str, Array]:
    """Return the small arrays that travel in the header's record."""
    data, arrays, at = record["data"], {}, 0
    if not isinstance(data, bytes) or len(data) > PACK_LIMIT:
        raise WireError("the data are not bytes, or too long")
    for entry in _read_json(record, "index", list, PACK_LIMIT):
        try:
            name, dtype, shape = entry
            name, dtype, shape = str(name), str(dtype), tuple(int(n) for n in shape)
        except (TypeError, ValueError, OverflowError):
            raise WireError("the index is not one of arrays") from None
        end = at + _measure(name, dtype, shape)
        if name in arrays or end > len(data):
            raise WireError(f"the array {_shorten(name)} does not have the size that it states")
        arrays[name] = Array(dtype, shape, "equifed.raw", data[at:end])
        at = end
    if at != len(data):
        raise WireError("the data are longer than their index says")
    return arrays


def _unpack(name: str, array: Array) -> NDArray[Any]:
    if len(array.data) != _measure(name, array.dtype, array.shape):
        raise WireError(f"the array {_shorten(name)} does not have the size that it states")
    found = np.frombuffer(array.data, dtype=np.dtype(array.dtype).newbyteorder("<"))
    return found.astype(array.dtype, copy=False).reshape(array.shape)


def _measure(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of an array that may be sent."""
    if dtype not in DTYPES or len(shape) > 2 or min(shape, default=0) < 0:
        raise WireError(f"the array {_shorten(name)} has an unknown kind or shape")
    return math.prod(shape) * np.dtype(dtype).itemsize


def _shorten(value: object) -> str:
    return repr(value)[:40]


# -- tensors, and matrices as vectors --------------------------------------------------------------


def pack_tensor(vector: Tensor) -> Any:
    """Return a vector ready to be sent to many clients."""
    return pack(vector.detach().to("cpu").contiguous().numpy())


def digest_tensor(vector: Tensor) -> str:
    """Return a digest of a model, as clients compute it of what they are sent."""
    return digest_model(pack_tensor(vector).data)


def pack_blocks(blocks: Tensor, thin: bool) -> Tensor:
    """Return blocks as one vector: of symmetric ones the upper triangle alone.

    >>> import torch
    >>> pack_blocks(torch.tensor([[[1.0, 2.0], [2.0, 3.0]]]), thin=False)
    tensor([1., 2., 3.])
    """
    if thin or blocks.dim() == 2:
        return blocks.reshape(-1)
    rows, columns = np.triu_indices(blocks.shape[-1])
    return blocks[:, rows, columns].reshape(-1)


def unpack_blocks(vector: Tensor, shape: torch.Size, thin: bool) -> Tensor:
    """Return the blocks that :func:`pack_blocks` made a vector of."""
    if thin or len(shape) == 2:
        return vector.reshape(shape)
    rows, columns = np.triu_indices(shape[-1])
    blocks, upper = vector.new_zeros(shape), vector.reshape(shape[0], -1)
    blocks[:, rows, columns], blocks[:, columns, rows] = upper, upper
    return blocks


def pack_metric(metric: BlockMatrix | None) -> dict[str, Any]:
    """Return a symmetric matrix as arrays of a request; none where there is no matrix."""
    if metric is None:
        return {}
    packed = pack_blocks(metric.blocks.double(), thin=False)
    return {"metric": pack_tensor(packed), "places": pack_tensor(metric.places)}


def read_metric(arrays: Sent, size: int) -> BlockMatrix | None:
    """Return the matrix of a request, for models of ``size`` numbers, or None."""
    if "metric" not in arrays:
        return None
    import torch

    packed, places = (np.asarray(arrays.get(name)) for name in ("metric", "places"))
    if packed.dtype != np.float64 or packed.ndim != 1 or not np.isfinite(packed).all():
        raise WireError("the metric is not a vector of finite numbers in double precision")
    if places.dtype != np.int64 or places.ndim != 2 or places.size == 0:
        raise WireError("the metric does not state the positions of its blocks")
    if places.min() < 0 or places.max() >= size or len(np.unique(places)) < places.size:
        raise WireError(f"the metric's blocks do not lie in a model of {size} numbers, or overlap")
    k, q = places.shape
    blocks = next((b for b in (1, k) if b * q * (q + 1) == 2 * packed.size), None)
    if blocks is None:
        raise WireError(f"the metric has {packed.size} numbers for {k} blocks of {q} x {q}")
    shape = torch.Size((blocks, q, q))
    return BlockMatrix(
        unpack_blocks(torch.as_tensor(packed.copy()), shape, thin=False),
        torch.as_tensor(places.copy()),
    )
