"""What must cross one boundary of one model (specification, sections 1 and 6).

A contract is symbolic in the counts of a batch. It is compared with a head, before
payloads are touched, or with a whole bundle. Byte order and fragment size are never
part of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from .bundle import Attribute, AttributeKey, Attributes, AttributeValue
from .dtypes import DTYPES
from .errors import failure

Dimension = int | str

_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
        numbers = [term for term in terms if term.isascii() and term.isdecimal()]
        self.constant = sum(map(int, numbers))
        self.symbols = sorted(term for term in terms if term not in numbers)
        if len(set(self.symbols)) != len(self.symbols) or not all(_SYMBOL.fullmatch(symbol) for symbol in self.symbols):
            raise ValueError(f"dimension {dimension!r} is not a sum of names and numbers >= 0")

    def __str__(self) -> str:
        parts = list(self.symbols)
        if self.constant or not parts:
            parts.append(str(self.constant))
        return "+".join(parts)

    def match(self, size: int, bound: dict[str, int]) -> bool:
        """Whether ``size`` fits; a symbol that is still free is bound to do so."""
        rest = size - self.constant
        free = None
        for symbol in self.symbols:
            if symbol in bound:
                rest -= bound[symbol]
            else:
                free = symbol
        if free is None:
            return rest == 0
        if rest < 0:
            return False
        bound[free] = rest
        return True


class TensorRule:
    """One tensor of a contract.

    ``shape`` has numbers, names, or sums of both: ``('tokens', 576)``,
    ``('tokens+1',)``. ``token_axis`` is an index or None. Raises ValueError.
    """

    __slots__ = ("dtype", "name", "shape", "sums", "token_axis")

    def __init__(
        self,
        name: str,
        dtype: str,
        shape: Iterable[Dimension],
        token_axis: int | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
        self.name = name
        self.dtype = dtype
        self.sums = [_Sum(dimension) for dimension in shape]
        self.shape = tuple(str(dimension) for dimension in self.sums)
        if token_axis is not None and not 0 <= token_axis < len(self.sums):
            raise ValueError(f"tensor {name!r} has no axis {token_axis}")
        self.token_axis = token_axis

    def text(self) -> str:
        """The rule's line of the canonical text."""
        axis = "-" if self.token_axis is None else str(self.token_axis)
        return f"tensor {self.name} {self.dtype} [{','.join(self.shape)}] {axis}"


class Contract:
    """Ordered tensors and fixed attributes.

    Raises ValueError when two tensors share a name, or when a dimension has two
    names that no dimension before it has fixed.
    """

    def __init__(
        self,
        tensors: Iterable[TensorRule] = (),
        attributes: Mapping[AttributeKey, AttributeValue] | Mapping[str, AttributeValue] | Iterable[Attribute] = (),
    ) -> None:
        self.tensors = tuple(tensors)
        self.attributes = Attributes(attributes)
        self._names = [rule.name for rule in self.tensors]
        if len(set(self._names)) != len(self._names):
            raise ValueError("two tensors of the contract have the same name")
        known: set[str] = set()
        for rule in self.tensors:
            for dimension in rule.sums:
                free = [name for name in dimension.symbols if name not in known]
                if len(free) > 1:
                    raise ValueError(f"tensor {rule.name!r}: {dimension} leaves {free} open")
                known.update(free)

    def compare(self, head: BundleLike) -> dict[str, int]:
        """Compare with a head or a bundle; return what each symbol stands for.

        Raises ContractMismatch, by the order of section 6: ``contract_attribute``
        (by ascending key), ``contract_missing``, ``contract_extra``,
        ``contract_order``, then for each tensor ``contract_dtype``,
        ``contract_shape``, ``contract_token_axis``. No offset is defined for these.
        """
        for wanted in self.attributes.records():
            found = head.attributes.record(wanted.key)
            if found != wanted:
                raise failure(
                    "contract_attribute",
                    field=wanted.name or f"{wanted.key:#06x}",
                    expected=wanted.value,
                    found="absent" if found is None else found.value,
                )
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
        bound: dict[str, int] = {}
        for rule, tensor in zip(self.tensors, tensors, strict=True):
            if tensor.dtype != rule.dtype:
                raise failure(
                    "contract_dtype",
                    tensor=rule.name,
                    field="dtype",
                    expected=rule.dtype,
                    found=tensor.dtype,
                )
            if len(tensor.shape) != len(rule.sums) or not all(
                dimension.match(size, bound) for dimension, size in zip(rule.sums, tensor.shape, strict=True)
            ):
                expected = f"[{','.join(rule.shape)}]"
                if bound:
                    expected += " with " + ", ".join(f"{name}={size}" for name, size in bound.items())
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
        return bound

    def text(self) -> str:
        """The canonical text: ASCII, one line an item, each ended by a line feed.

        First ``boundary-bundle contract 1``; then the fixed attributes by ascending
        key, ``attribute 0x8005 u64 1e00000000000000`` (the value's bytes as they
        travel, in hexadecimal); then the tensors in order,
        ``tensor seq_offsets u32 [tokens+1] -`` (names of a sum sorted, its number
        last; the token axis, or ``-``).
        """
        lines = ["boundary-bundle contract 1"]
        for record in self.attributes.records():
            lines.append(f"attribute {record.key:#06x} {record.type_name} {record.raw.hex()}".rstrip())
        lines.extend(rule.text() for rule in self.tensors)
        return "".join(f"{line}\n" for line in lines)

    def fingerprint(self) -> bytes:
        """SHA-256 of :meth:`text`, the value of ``contract_fingerprint``."""
        return hashlib.sha256(self.text().encode("ascii")).digest()
