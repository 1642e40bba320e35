"""The one error list of the format (specification, section 8).

Names, numbers and offsets are fixed by the specification; the sentence is free.
``tests/test_registry.py`` holds :data:`ERRORS` against ``spec/registry.json``.
"""

from __future__ import annotations

from typing import Any

#: name -> (number, meaning). ``need_more`` is listed because codecs share its
#: number; it is never raised.
ERRORS: dict[str, tuple[int, str]] = {
    "need_more": (1, "more bytes are needed; not an error"),
    "truncated": (100, "the input ended inside a unit or with a bundle open"),
    "trailing_bytes": (101, "bytes follow the end of the one bundle that was expected"),
    "bad_magic": (200, "the frame does not begin with the magic"),
    "header_crc": (201, "the frame header's checksum differs"),
    "header_reserved": (202, "reserved bytes of the frame header are not zero"),
    "header_flags": (203, "a reserved flag of the frame header is set"),
    "head_fields": (204, "field_a or field_b of a head is not zero"),
    "body_length": (205, "the body length is illegal for the frame type"),
    "body_crc": (206, "the body's checksum differs"),
    "frame_padding": (207, "a padding byte after the body is not zero"),
    "frame_version": (208, "the frame's minor version differs from its head's"),
    "bundle_not_open": (209, "no bundle of that number is open"),
    "bundle_already_open": (210, "a bundle of that number is open already"),
    "fragment_tensor": (211, "the fragment names a tensor that the head does not declare"),
    "fragment_offset": (212, "the fragment's offset is not on the grid of fragments"),
    "fragment_length": (213, "the fragment's length is not what its place demands"),
    "fragment_order": (214, "the fragment is not the next in canonical order"),
    "fragment_conflict": (215, "a repeated fragment carries other bytes"),
    "fragment_missing": (216, "the end came before all fragments"),
    "end_fragments": (217, "the end's fragment count differs"),
    "end_payload_bytes": (218, "the end's payload byte count differs"),
    "payload_crc_present": (
        219,
        "a payload checksum is present although the head says none is",
    ),
    "bool_value": (220, "a bool is neither 0 nor 1"),
    "head_reserved": (300, "reserved bytes of the head are not zero"),
    "fragment_size": (301, "the fragment size is not a legal multiple"),
    "tensor_table": (302, "the tensor records do not fill the tensor table exactly"),
    "tensor_byte_order": (303, "the byte order is illegal for the dtype"),
    "tensor_token_axis": (304, "the token axis is illegal"),
    "tensor_name": (305, "the tensor name is empty or has a byte outside the alphabet"),
    "tensor_duplicate": (306, "the tensor name has come already"),
    "tensor_block": (307, "the shape does not hold whole blocks"),
    "tensor_reserved": (308, "reserved bytes of a tensor record are not zero"),
    "record_padding": (309, "a padding byte of a record is not zero"),
    "token_count": (310, "token counts differ"),
    "attribute_block": (
        320,
        "the attribute records do not fill the attribute block exactly",
    ),
    "attribute_key": (321, "the attribute key is reserved"),
    "attribute_order": (322, "attribute keys are not strictly ascending"),
    "attribute_type": (323, "the attribute type is unknown or not the registered one"),
    "attribute_length": (324, "the attribute's length is illegal for its type"),
    "attribute_value": (325, "the attribute's value is illegal"),
    "attribute_reserved": (
        326,
        "the reserved byte of an attribute record is not zero",
    ),
    "unsupported_major": (400, "another major version"),
    "unsupported_frame": (401, "an unknown critical frame type"),
    "unsupported_head_flag": (402, "an unknown critical head flag"),
    "unsupported_dtype": (403, "an unknown dtype"),
    "unsupported_attribute": (404, "an unknown critical attribute"),
    "checksums_required": (
        405,
        "payload checksums are absent and the consumer insists on them",
    ),
    "limit_head_bytes": (500, "the head is larger than the limit"),
    "limit_tensors": (501, "more tensors than the limit"),
    "limit_name": (502, "a tensor name is longer than the limit"),
    "limit_rank": (503, "a rank is above the limit"),
    "limit_dimension": (504, "a dimension is above the limit"),
    "limit_payload_bytes": (505, "the payload is larger than the limit"),
    "limit_attribute_bytes": (506, "the attribute block is larger than the limit"),
    "limit_fragments": (507, "more fragments than the limit"),
    "limit_open_bundles": (508, "too many open bundles"),
    "limit_extension_bytes": (509, "an extension frame is larger than the limit"),
    "contract_attribute": (
        600,
        "an attribute that the contract fixes is absent or different",
    ),
    "contract_missing": (601, "a tensor of the contract is missing"),
    "contract_extra": (602, "a tensor that the contract lacks is present"),
    "contract_order": (603, "the tensors stand in another order than the contract's"),
    "contract_dtype": (604, "a tensor has another dtype than the contract's"),
    "contract_shape": (605, "a tensor has another shape than the contract's"),
    "contract_token_axis": (606, "a tensor has another token axis than the contract's"),
}


class BundleError(ValueError):
    """Something in the bytes, the bundle or its contract is not as it must be.

    Made by :func:`failure`, which picks the subclass of the error's range.

    ``name`` and ``number`` come from the error list. ``offset`` counts from the
    first byte given to the decoder (an encoder: from the first byte it would have
    written) and is None where the specification defines none. ``frame`` counts
    frames from 0. ``tensor`` and ``field`` name what was being looked at;
    ``expected`` and ``found`` are the two values that differ. ``events`` holds what
    :meth:`Decoder.feed` had already made of the same piece before it failed.
    """

    name: str
    number: int
    offset: int | None
    frame: int | None
    tensor: str | None
    field: str | None
    expected: Any
    found: Any
    events: tuple[Any, ...]

    def __init__(
        self,
        name: str,
        offset: int | None = None,
        frame: int | None = None,
        tensor: str | None = None,
        field: str | None = None,
        expected: Any = None,
        found: Any = None,
    ) -> None:
        self.number, meaning = ERRORS[name]
        self.name = name
        self.offset = offset
        self.frame = frame
        self.tensor = tensor
        self.field = field
        self.expected = expected
        self.found = found
        self.events = ()
        where = []
        if offset is not None:
            where.append(f"at byte {offset}")
        if frame is not None:
            where.append(f"in frame {frame}")
        if tensor is not None:
            where.append(f"tensor {tensor!r}")
        if field is not None:
            where.append(f"field {field}")
        if expected is not None:
            where.append(f"expected {expected!r}")
        if found is not None:
            where.append(f"found {found!r}")
        detail = f" ({', '.join(where)})" if where else ""
        super().__init__(f"{name}: {meaning}{detail}")

    # ValueError would be rebuilt from its text alone; workers pickle errors.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self.name,
            self.offset,
            self.frame,
            self.tensor,
            self.field,
            self.expected,
            self.found,
        )


class Truncated(BundleError):
    """100-199: the input ended, or did not end."""


class MalformedFrame(BundleError):
    """200-299: a frame is malformed."""


class MalformedHead(BundleError):
    """300-399: a head is malformed."""


class Unsupported(BundleError):
    """400-499: well-formed, but unknown and critical."""


class OverLimit(BundleError):
    """500-599: over a limit of the consumer."""


class ContractMismatch(BundleError):
    """600-699: the bundle is not what the contract says."""


_RANGES: dict[int, type[BundleError]] = {
    1: Truncated,
    2: MalformedFrame,
    3: MalformedHead,
    4: Unsupported,
    5: OverLimit,
    6: ContractMismatch,
}


def failure(
    name: str,
    offset: int | None = None,
    frame: int | None = None,
    tensor: str | None = None,
    field: str | None = None,
    expected: Any = None,
    found: Any = None,
) -> BundleError:
    """Build (not raise) the error called ``name`` as the subclass of its range."""
    kind = _RANGES[ERRORS[name][0] // 100]
    return kind(name, offset, frame, tensor, field, expected, found)
