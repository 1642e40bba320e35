"""What must cross one boundary of one model (specification, sections 5.3 and 6).

A contract is symbolic in the counts of a batch. It is compared with a head, before
payloads are touched, or with a whole bundle. Byte order, fragment size and checksums
are never part of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from .bundle import (
    ATTRIBUTE_TYPES,
    ATTRIBUTES,
    LIMIT_MAXIMA,
    REGISTERED_KEYS,
    Attribute,
    AttributeKey,
    Attributes,
    AttributeValue,
)
from .dtypes import DTYPES
from .errors import failure

Dimension = int | str

_NAME: Final = re.compile(r"[A-Za-z0-9._/-]{1,63}")
_SYMBOL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER: Final = re.compile(r"0|[1-9][0-9]*")
_BELOW: Final = 1 << 63
_MOST_DIMENSIONS: Final = LIMIT_MAXIMA["rank"]
#: The symbol whose value a bundle can state itself, as the attribute n_tokens.
_TOKENS: Final = "tokens"
_N_TOKENS: Final = ATTRIBUTES["n_tokens"][0]
#: It is made from a contract's text, so it cannot stand in one.
_FINGERPRINT: Final = ATTRIBUTES["contract_fingerprint"][0]
#: They differ from shard to shard, so that two ends could not agree on a fingerprint.
_NOT_IN_TEXT: Final = frozenset(ATTRIBUTES[name][0] for name in ("layer_start", "layer_end"))
_TYPE_NAMES: Final = {code: name for name, code in ATTRIBUTE_TYPES.items()}


class AnyValue:
    """In a contract: the attribute must be there, with whatever value.

    ``type`` is needed for a key that is not registered. :data:`ANY` is the one for
    registered keys.
    """

    __slots__ = ("type",)

    def __init__(self, type: str | None = None) -> None:
        if type is not None and type not in ATTRIBUTE_TYPES:
            raise ValueError(f"{type!r} is no attribute type")
        self.type = type

    def __repr__(self) -> str:
        return "ANY" if self.type is None else f"AnyValue({self.type!r})"


ANY: Final = AnyValue()


class TensorLike(Protocol):
    """What a contract looks at; TensorInfo and Tensor both have it."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def token_axis(self) -> int | None: ...


class BundleLike(Protocol):
    """Head and Bundle both have it."""

    @property
    def tensors(self) -> Sequence[TensorLike]: ...
    @property
    def attributes(self) -> Attributes: ...


class _Sum:
    """A dimension: symbols (each once, sorted) plus a constant."""

    __slots__ = ("constant", "symbols")

    def __init__(self, dimension: Dimension) -> None:
        terms = str(dimension).replace(" ", "").split("+")
        # Longer than a number below 2^63 can be; int() would take its time.
        numbers = [term for term in terms if _NUMBER.fullmatch(term) and len(term) < 20]
        self.constant = sum(map(int, numbers))
        self.symbols = sorted(term for term in terms if term not in numbers)
        if (
            len(set(self.symbols)) != len(self.symbols)
            or not all(_SYMBOL.fullmatch(symbol) for symbol in self.symbols)
            or self.constant >= _BELOW
        ):
            raise ValueError(f"dimension {dimension!r} is not a sum of names, each once, and numbers of 0 to 2^63 - 1")

    def __str__(self) -> str:
        parts = list(self.symbols)
        if self.constant or not parts:
            parts.append(str(self.constant))
        return "+".join(parts)

    def size(self, values: Mapping[str, int]) -> int | None:
        """What the dimension comes to; None when a symbol has no value."""
        total = self.constant
        for symbol in self.symbols:
            value = values.get(symbol)
            if value is None:
                return None
            total += value
        return total


class TensorRule:
    """One tensor of a contract.

    ``shape`` has numbers, names, or sums of both: ``('tokens', 576)``,
    ``('tokens+1',)``; numbers are decimal, without leading zeros, together below
    2^63. ``token_axis`` is an index or None. Raises ValueError.
    """

    __slots__ = ("dtype", "name", "shape", "sums", "token_axis")

    def __init__(
        self,
        name: str,
        dtype: str,
        shape: Iterable[Dimension],
        token_axis: int | None = None,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a tensor")
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
        self.name = name
        self.dtype = dtype
        self.sums = [_Sum(dimension) for dimension in shape]
        if len(self.sums) > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {len(self.sums)} dimensions, over {_MOST_DIMENSIONS}")
        self.shape = tuple(str(dimension) for dimension in self.sums)
        if token_axis is not None and not 0 <= token_axis < len(self.sums):
            raise ValueError(f"tensor {name!r} has no axis {token_axis}")
        self.token_axis = token_axis

    def text(self) -> str:
        """The rule's line of the canonical text."""
        axis = "-" if self.token_axis is None else str(self.token_axis)
        return f"tensor {self.name} {self.dtype} [{','.join(self.shape)}] {axis}"


class Contract:
    """Attributes, each with its value or with any, and tensors in order.

    ``attributes`` is a mapping of names or numbers to values, :data:`ANY` or
    ``AnyValue(type)``, or an iterable of :class:`Attribute`. Byte order, fragment
    size and checksums are no part of a contract.

    Raises ValueError when two tensors share a name, when an attribute is given by its
    name and by its number, when a symbol can get no value
    (it stands alone in no dimension, and is not ``tokens`` of a contract that
    demands n_tokens), for any value of an unregistered key without its type, and for
    contract_fingerprint, which is made from the contract; KeyError for an attribute
    name that is not registered.
    """

    def __init__(
        self,
        tensors: Iterable[TensorRule] = (),
        attributes: Mapping[AttributeKey, AttributeValue | AnyValue]
        | Mapping[str, AttributeValue | AnyValue]
        | Mapping[AttributeKey, AttributeValue]
        | Mapping[str, AttributeValue]
        | Iterable[Attribute] = (),
    ) -> None:
        self.tensors = tuple(tensors)
        #: Attributes with the value that each must have.
        self.attributes = Attributes()
        #: Attributes that may have any value: key -> type code.
        self.any_value: dict[int, int] = {}
        if isinstance(attributes, Mapping) and not isinstance(attributes, Attributes):
            for key, value in attributes.items():
                if isinstance(value, AnyValue):
                    self._demand(key, value)
                else:
                    self.attributes[key] = value
        else:
            self.attributes = Attributes(attributes)
        self._demanded = sorted({*self.any_value, *(record.key for record in self.attributes.records())})
        if isinstance(attributes, Mapping) and len(self._demanded) != len(attributes):
            raise ValueError("an attribute is demanded twice, by its name and by its number")
        if _FINGERPRINT in self._demanded:
            raise ValueError("contract_fingerprint is no part of a contract: it is made from one")
        self._names = [rule.name for rule in self.tensors]
        if len(set(self._names)) != len(self._names):
            raise ValueError("two tensors of the contract have the same name")
        #: (symbol, tensor, dimension), in order, for each dimension that is one symbol.
        self._alone: list[tuple[str, int, int]] = []
        used: dict[str, str] = {}
        for index, rule in enumerate(self.tensors):
            for place, dimension in enumerate(rule.sums):
                for symbol in dimension.symbols:
                    used.setdefault(symbol, f"tensor {rule.name!r}: {dimension}")
                if len(dimension.symbols) == 1 and not dimension.constant:
                    self._alone.append((dimension.symbols[0], index, place))
        alone = {symbol for symbol, _, _ in self._alone}
        for symbol, where in used.items():
            if symbol not in alone and (symbol != _TOKENS or _N_TOKENS not in self._demanded):
                raise ValueError(f"{where} leaves {symbol!r} open: it stands alone in no dimension")
        self._has_tokens = _TOKENS in used

    def _demand(self, key: AttributeKey, any_value: AnyValue) -> None:
        number = ATTRIBUTES[key][0] if isinstance(key, str) else key
        registered = REGISTERED_KEYS.get(number)
        if any_value.type is not None:
            kind = ATTRIBUTE_TYPES[any_value.type]
            if registered is not None and kind != registered[0]:
                raise ValueError(f"attribute {key!r} is registered as {_TYPE_NAMES[registered[0]]}")
        elif registered is not None:
            kind = registered[0]
        else:
            raise ValueError(f"attribute {key!r} is not registered: its type must be said")
        self.any_value[number] = kind

    def _check_attributes(self, found: Attributes) -> None:
        for key in self._demanded:
            record = found.record(key)
            wanted = self.attributes.record(key)
            if wanted is not None:
                if record == wanted:
                    continue
                expected: AttributeValue = wanted.value
            else:
                kind = self.any_value[key]
                if record is not None and record.type == kind:
                    continue
                expected = f"any {_TYPE_NAMES[kind]}"
            name = next((name for name, row in ATTRIBUTES.items() if row[0] == key), f"{key:#06x}")
            raise failure(
                "contract_attribute",
                field=name,
                expected=expected,
                found="absent" if record is None else record.value,
            )

    def _values(self, head: BundleLike) -> dict[str, int]:
        """What each symbol stands for; one none of whose dimensions is there has no value."""
        values: dict[str, int] = {}
        if self._has_tokens:
            record = head.attributes.record(_N_TOKENS)
            if record is not None and isinstance(record.value, int):
                values[_TOKENS] = record.value
        for symbol, index, place in self._alone:
            shape = head.tensors[index].shape
            if symbol not in values and place < len(shape):
                values[symbol] = shape[place]
        return values

    def compare(self, head: BundleLike) -> dict[str, int]:
        """Compare with a head or a bundle; return what each symbol stands for.

        Raises ContractMismatch, by the order of section 6: ``contract_attribute``
        (by ascending key), ``contract_missing``, ``contract_extra``,
        ``contract_order``, then for each tensor ``contract_dtype``,
        ``contract_shape``, ``contract_token_axis``. No offset is defined for these.
        """
        self._check_attributes(head.attributes)
        tensors = head.tensors
        names = [tensor.name for tensor in tensors]
        if names != self._names:
            present = set(names)
            for name in self._names:
                if name not in present:
                    raise failure("contract_missing", tensor=name)
            mine = set(self._names)
            for name in names:
                if name not in mine:
                    raise failure("contract_extra", tensor=name)
            for name, other in zip(self._names, names, strict=False):
                if name != other:
                    raise failure("contract_order", tensor=other, expected=name, found=other)
            # Only a bundle that repeats a name comes here; no decoder lets it pass.
            raise failure("contract_extra", tensor=names[len(self._names)])
        values = self._values(head)
        for rule, tensor in zip(self.tensors, tensors, strict=True):
            if tensor.dtype != rule.dtype:
                raise failure(
                    "contract_dtype",
                    tensor=rule.name,
                    field="dtype",
                    expected=rule.dtype,
                    found=tensor.dtype,
                )
            # A sum without a value is None, and no dimension is that.
            if len(tensor.shape) != len(rule.sums) or any(
                dimension.size(values) != size for dimension, size in zip(rule.sums, tensor.shape, strict=True)
            ):
                expected = f"[{','.join(rule.shape)}]"
                if values:
                    expected += " with " + ", ".join(f"{name}={size}" for name, size in values.items())
                raise failure(
                    "contract_shape",
                    tensor=rule.name,
                    field="dims",
                    expected=expected,
                    found=list(tensor.shape),
                )
            if tensor.token_axis != rule.token_axis:
                raise failure(
                    "contract_token_axis",
                    tensor=rule.name,
                    field="token_axis",
                    expected="none" if rule.token_axis is None else rule.token_axis,
                    found="none" if tensor.token_axis is None else tensor.token_axis,
                )
        return values

    def text(self) -> str:
        """The canonical text (5.3): ASCII, one line an item, each ended by a line feed.

        First ``boundary-bundle contract 1``; then the attributes by ascending key,
        ``attribute 0x8005 u64 1e00000000000000`` (the value's bytes as they travel,
        in hexadecimal) or ``attribute 0x8006 u64 *`` for any value, without
        layer_start and layer_end; then the tensors in order,
        ``tensor seq_offsets u32 [tokens+1] -`` (names of a sum sorted, its number
        last; the token axis, or ``-``).
        """
        lines = ["boundary-bundle contract 1"]
        for key in self._demanded:
            if key in _NOT_IN_TEXT:
                continue
            record = self.attributes.record(key)
            if record is not None:
                lines.append(f"attribute {key:#06x} {record.type_name} {record.raw.hex()}".rstrip())
            else:
                lines.append(f"attribute {key:#06x} {_TYPE_NAMES[self.any_value[key]]} *")
        lines.extend(rule.text() for rule in self.tensors)
        return "".join(f"{line}\n" for line in lines)

    def fingerprint(self) -> bytes:
        """SHA-256 of :meth:`text`, the value of ``contract_fingerprint``."""
        return hashlib.sha256(self.text().encode("ascii")).digest()
