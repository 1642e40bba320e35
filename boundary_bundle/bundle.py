"""The logical model: tensors, attributes, bundles and limits. No bytes, no I/O.

What a bundle *is* (specification, sections 1, 3, 5, 7, 9), apart from how it is
written. Nothing here checks a bundle; the encoder and the decoder do, both with the
same function, so that what one refuses the other refuses.
"""

from __future__ import annotations

import operator
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from .dtypes import DTYPES, Array, DType, dtype_of, payload_view, to_order
from .errors import failure

AttributeValue = int | float | bytes | str
AttributeKey = int | str

#: Registered attributes: name -> (key, type, length of a value or None).
ATTRIBUTES: Final[dict[str, tuple[int, str, int | None]]] = {
    "architecture": (0x0002, "text", None),
    "recipe_fingerprint": (0x0009, "bytes", 32),
    "model_fingerprint": (0x8001, "bytes", 32),
    "layer_start": (0x8003, "u64", 8),
    "layer_end": (0x8004, "u64", 8),
    "n_layer": (0x8005, "u64", 8),
    "n_tokens": (0x8006, "u64", 8),
    "n_seqs": (0x8007, "u64", 8),
    "contract_fingerprint": (0x8008, "bytes", 32),
}
#: What a shard hands on from the bundle it got; unknown ancillary keys too.
FORWARDED: Final = frozenset(
    {
        "architecture",
        "recipe_fingerprint",
        "model_fingerprint",
        "n_layer",
        "n_tokens",
        "n_seqs",
    }
)
ATTRIBUTE_TYPES: Final[dict[str, int]] = {
    "u64": 1,
    "i64": 2,
    "f64": 3,
    "bytes": 4,
    "text": 5,
}
#: Registered tensor names (5.1).
TENSOR_NAMES: Final = (
    "residual",
    "token_ids",
    "positions",
    "seq_offsets",
    "seq_ids",
    "session_ids",
    "session_epochs",
    "session_positions",
    "outputs",
    "logits",
    "embeddings",
    "sampled",
    "input_embedding",
    "v_first",
    "per_layer_inputs",
    "deepstack",
)

_NAME_OF_KEY: Final = {row[0]: name for name, row in ATTRIBUTES.items()}
_TYPE_NAMES: Final = {code: name for name, code in ATTRIBUTE_TYPES.items()}
_NUMBERS: Final = {
    1: struct.Struct("<Q"),
    2: struct.Struct("<q"),
    3: struct.Struct("<d"),
}
#: key -> (type code, length or None), for the checks.
REGISTERED_KEYS: Final[dict[int, tuple[int, int | None]]] = {
    key: (ATTRIBUTE_TYPES[kind], length) for key, kind, length in ATTRIBUTES.values()
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a consumer, checked before anything is allocated (section 7).

    Raises ValueError for a limit outside 0 to its maximum.
    """

    head_bytes: int = 1_048_576
    tensors: int = 256
    name_bytes: int = 63
    rank: int = 8
    dimension: int = 2**31 - 1
    # A machine with a smaller address space uses what it can hold.
    payload_bytes: int = min(2**34, sys.maxsize)
    attribute_bytes: int = 65_536
    fragments: int = 1_048_576
    open_bundles: int = 16
    extension_bytes: int = 1_048_576

    def __post_init__(self) -> None:
        for name, maximum in LIMIT_MAXIMA.items():
            value = getattr(self, name)
            if not 0 <= value <= maximum:
                raise ValueError(f"limit {name} is {value}, not 0 to {maximum}")


LIMIT_MAXIMA: Final[dict[str, int]] = {
    "head_bytes": 2**32 - 8,
    "tensors": 65_536,
    "name_bytes": 63,
    "rank": 8,
    "dimension": 2**63 - 1,
    "payload_bytes": 2**63 - 1,
    "attribute_bytes": 2**32 - 8,
    "fragments": 2**32 - 1,
    "open_bundles": 65_536,
    "extension_bytes": 2**32 - 8,
}
DEFAULT_LIMITS: Final = Limits()


class Attribute:
    """One attribute as it travels: key, type code and the bytes of its value.

    The bytes are kept rather than the value, so that the NaN of an f64 and every
    attribute this codec does not know come out of re-encoding as they went in.
    """

    __slots__ = ("key", "raw", "type")

    def __init__(self, key: int, type: int, raw: bytes) -> None:
        self.key = key
        self.type = type
        self.raw = raw

    @classmethod
    def of(cls, key: AttributeKey, value: AttributeValue, type: str | None = None) -> Attribute:
        """Make an attribute from a Python value.

        ``key`` is a registered name or a number. The type is ``type``, else the
        registered one, else what the value suggests (int: u64, or i64 when
        negative). Raises KeyError for an unknown name, ``attribute_type`` and
        ``attribute_value`` for a value that the type cannot hold.
        """
        if isinstance(key, str):
            key = ATTRIBUTES[key][0]
        if hasattr(value, "__index__"):
            value = operator.index(value)  # numpy's integers too
        if type is None:
            registered = REGISTERED_KEYS.get(key)
            if registered is not None:
                code = registered[0]
            elif isinstance(value, int):
                code = 1 if value >= 0 else 2
            elif isinstance(value, float):
                code = 3
            else:
                code = 5 if isinstance(value, str) else 4
        else:
            code = ATTRIBUTE_TYPES[type]
        fits: tuple[Any, ...] = ((int,), (int,), (int, float), (bytes,), (str,))
        if not isinstance(value, fits[code - 1]):
            raise failure("attribute_type", field=_show(key), expected=_TYPE_NAMES[code], found=value)
        try:
            if isinstance(value, str):
                raw = value.encode("ascii")
            elif isinstance(value, bytes):
                raw = value
            else:
                raw = _NUMBERS[code].pack(value)
        except (struct.error, UnicodeEncodeError, OverflowError):
            raise failure("attribute_value", field=_show(key), found=value) from None
        return cls(key, code, raw)

    @property
    def name(self) -> str | None:
        """Registered name, or None."""
        return _NAME_OF_KEY.get(self.key)

    @property
    def type_name(self) -> str:
        """'u64', 'i64', 'f64', 'bytes' or 'text'."""
        return _TYPE_NAMES[self.type]

    @property
    def value(self) -> AttributeValue:
        """The Python value: int, float, bytes or str by type."""
        if self.type <= 3:
            return cast("int | float", _NUMBERS[self.type].unpack(self.raw)[0])
        return self.raw if self.type == 4 else self.raw.decode("ascii")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attribute):
            return NotImplemented
        return self.key == other.key and self.type == other.type and self.raw == other.raw

    def __hash__(self) -> int:
        return hash((self.key, self.type, self.raw))

    def __repr__(self) -> str:
        shown = self.value if self.type in _TYPE_NAMES else self.raw
        return f"Attribute({_show(self.key)}, {shown!r})"


def _show(key: int) -> str:
    return _NAME_OF_KEY.get(key) or f"{key:#06x}"


class Attributes(MutableMapping[AttributeKey, AttributeValue]):
    """Attributes of a bundle, by registered name or by number.

    Reading gives Python values; assigning takes one, or an :class:`Attribute` by
    way of :meth:`put` when the type is not to be guessed. Iteration goes by
    ascending key and gives the registered name, or the number of an unknown key.
    A key that is given twice to begin with is ``attribute_order``.
    """

    __slots__ = ("_records",)

    def __init__(
        self,
        values: Mapping[AttributeKey, AttributeValue] | Mapping[str, AttributeValue] | Iterable[Attribute] = (),
    ) -> None:
        self._records: dict[int, Attribute] = {}
        if values == ():
            return
        if isinstance(values, Attributes):
            self._records.update(values._records)
        else:
            records = (
                (Attribute.of(key, value) for key, value in values.items()) if isinstance(values, Mapping) else values
            )
            for record in records:
                if record.key in self._records:
                    raise failure("attribute_order", field=_show(record.key), expected="once", found="twice")
                self.put(record)

    @classmethod
    def _of_records(cls, records: dict[int, Attribute]) -> Attributes:
        self = cls.__new__(cls)
        self._records = records
        return self

    @staticmethod
    def _number(key: AttributeKey) -> int:
        return ATTRIBUTES[key][0] if isinstance(key, str) else key

    def put(self, record: Attribute) -> None:
        """Take a record as it is, in place of one with the same key."""
        self._records[record.key] = record

    def record(self, key: AttributeKey) -> Attribute | None:
        """The record of a key, or None when the attribute is absent."""
        return self._records.get(self._number(key))

    def records(self) -> list[Attribute]:
        """All records by ascending key: the order in which they are written."""
        return [self._records[key] for key in sorted(self._records)]

    def __getitem__(self, key: AttributeKey) -> AttributeValue:
        return self._records[self._number(key)].value

    def __setitem__(self, key: AttributeKey, value: AttributeValue) -> None:
        self.put(Attribute.of(key, value))

    def __delitem__(self, key: AttributeKey) -> None:
        del self._records[self._number(key)]

    def __iter__(self) -> Iterator[AttributeKey]:
        for key in sorted(self._records):
            yield _NAME_OF_KEY.get(key, key)

    def __len__(self) -> int:
        return len(self._records)

    # By bits, like everything else here; Mapping would compare NaNs as floats.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attributes):
            return NotImplemented
        return self._records == other._records

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Attributes({self.records()!r})"

    def forwarded(self) -> Attributes:
        """What a shard hands on (5.2): registered forwarded keys, and unknown ones."""
        kept = {key: record for key, record in self._records.items() if record.name is None or record.name in FORWARDED}
        return Attributes._of_records(kept)


class TensorInfo:
    """What a head says of one tensor, before any payload.

    ``shape`` counts elements, outermost first. ``byte_order`` is that of the wire,
    'little' or 'big'. ``payload_bytes`` and ``fragments`` follow from the rest.
    """

    __slots__ = (
        "byte_order",
        "dtype",
        "fragments",
        "name",
        "payload_bytes",
        "row",
        "shape",
        "token_axis",
    )

    def __init__(
        self,
        name: str,
        row: DType,
        shape: tuple[int, ...],
        token_axis: int | None,
        byte_order: str,
        payload_bytes: int,
        fragments: int,
    ) -> None:
        self.name = name
        self.row = row
        self.dtype = row.name
        self.shape = shape
        self.token_axis = token_axis
        self.byte_order = byte_order
        self.payload_bytes = payload_bytes
        self.fragments = fragments

    def __repr__(self) -> str:
        return (
            f"TensorInfo({self.name!r}, {self.dtype}, {list(self.shape)}, "
            f"token_axis={self.token_axis}, byte_order={self.byte_order!r})"
        )


class Tensor:
    """A named array and how it is to cross a boundary.

    ``array`` is any numpy array of a registered dtype, in any byte order and
    layout; ``byte_order`` ('little' or 'big') is that of the wire. A decoded array
    is native and read-only. For a block-quantised ``dtype``, which has to be named,
    the array holds the blocks' bytes as uint8 with whole blocks in its last axis;
    ``shape`` always counts elements: q8_0 [4, 64] is uint8 [4, 68].

    Raises ``unsupported_dtype``, ``tensor_block``, and ValueError when ``dtype`` is
    not what the array holds.
    """

    __slots__ = ("array", "byte_order", "name", "row", "shape", "token_axis")

    def __init__(
        self,
        name: str,
        array: Array,
        *,
        dtype: str | None = None,
        token_axis: int | None = None,
        byte_order: str = "little",
    ) -> None:
        array = np.asarray(array)
        row = dtype_of(array)
        if dtype is not None and dtype != row.name:
            wanted = DTYPES.get(dtype)
            if wanted is None:
                raise failure("unsupported_dtype", tensor=name, found=dtype)
            if wanted.block_elements == 1 or row.name != "u8":
                raise ValueError(f"tensor {name!r} is said to be {dtype} but holds {row.name}")
            row = wanted
        self.name = name
        self.array = array
        self.row = row
        self.shape = row.logical_shape(array.shape)
        self.token_axis = token_axis
        self.byte_order = byte_order

    @classmethod
    def _of_info(cls, info: TensorInfo, array: Array) -> Tensor:
        self = cls.__new__(cls)
        self.name = info.name
        self.array = array
        self.row = info.row
        self.shape = info.shape
        self.token_axis = info.token_axis
        self.byte_order = info.byte_order
        return self

    @property
    def dtype(self) -> str:
        """Name of the dtype in the format's registry."""
        return self.row.name

    def payload(self) -> memoryview:
        """The payload in wire order; a view of the array when it lies so already."""
        return payload_view(to_order(self.array, self.row, self.byte_order))

    def __repr__(self) -> str:
        return (
            f"Tensor({self.name!r}, {self.dtype}, {list(self.shape)}, "
            f"token_axis={self.token_axis}, byte_order={self.byte_order!r})"
        )


class Bundle:
    """One batch at one boundary.

    ``tensors`` in order; ``attributes`` by name or number, unknown ones included;
    ``number`` names the bundle while it is open; ``minor`` is the format's minor
    version (kept on re-encoding); ``fragment_size`` in bytes, 0 for one fragment a
    tensor; ``checksums`` says whether payloads carry CRC32Cs.
    """

    __slots__ = (
        "attributes",
        "checksums",
        "fragment_size",
        "minor",
        "number",
        "tensors",
    )

    def __init__(
        self,
        tensors: Iterable[Tensor] = (),
        attributes: Mapping[AttributeKey, AttributeValue] | Mapping[str, AttributeValue] | Iterable[Attribute] = (),
        *,
        number: int = 0,
        minor: int = 0,
        fragment_size: int = 0,
        checksums: bool = True,
    ) -> None:
        self.tensors = list(tensors)
        # The exact class first: asking an abstract one costs more than the rest of this.
        self.attributes = (
            attributes
            if type(attributes) is Attributes or (attributes != () and isinstance(attributes, Attributes))
            else Attributes(attributes)
        )
        self.number = number
        self.minor = minor
        self.fragment_size = fragment_size
        self.checksums = checksums

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in order."""
        return [tensor.name for tensor in self.tensors]

    def tensor(self, name: str) -> Tensor:
        """The tensor called ``name``. Raises KeyError."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    def __getitem__(self, name: str) -> Array:
        """The array of the tensor called ``name``. Raises KeyError."""
        return self.tensor(name).array

    def __contains__(self, name: object) -> bool:
        return any(tensor.name == name for tensor in self.tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return (
            f"Bundle({self.tensors!r}, {self.attributes!r}, number={self.number}, "
            f"minor={self.minor}, fragment_size={self.fragment_size}, "
            f"checksums={self.checksums})"
        )


def tensor_bits_equal(a: Tensor, b: Tensor) -> bool:
    """Same name, dtype, shape, token axis, wire order and bits.

    NaNs compare by their bits, and -0.0 differs from 0.0. How the two arrays lie in
    memory does not matter.
    """
    return (
        a.name == b.name
        and a.row is b.row
        and a.shape == b.shape
        and a.token_axis == b.token_axis
        and a.byte_order == b.byte_order
        and a.payload() == b.payload()
    )


def bits_equal(a: Bundle, b: Bundle) -> bool:
    """Whether two bundles are the same logical bundle, by bits (section 9)."""
    return (
        a.number == b.number
        and a.minor == b.minor
        and a.fragment_size == b.fragment_size
        and a.checksums == b.checksums
        and a.attributes == b.attributes
        and len(a.tensors) == len(b.tensors)
        and all(map(tensor_bits_equal, a.tensors, b.tensors))
    )


__all__ = [
    "ATTRIBUTES",
    "ATTRIBUTE_TYPES",
    "DEFAULT_LIMITS",
    "FORWARDED",
    "LIMIT_MAXIMA",
    "REGISTERED_KEYS",
    "TENSOR_NAMES",
    "Attribute",
    "AttributeKey",
    "AttributeValue",
    "Attributes",
    "Bundle",
    "Limits",
    "Tensor",
    "TensorInfo",
    "bits_equal",
    "tensor_bits_equal",
]
