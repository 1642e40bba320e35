"""Boundary bundles: the tensors one layer shard hands to the next.

The format is fixed by ``spec/boundary-bundle.md``. This package is its Python codec:
:func:`encode` and :func:`decode` for whole bundles, :class:`Decoder` for bytes that
come in pieces, :class:`Contract` for what must cross a boundary. No I/O anywhere.
"""

from .bundle import (
    Attribute,
    Attributes,
    Bundle,
    Limits,
    Tensor,
    TensorInfo,
    bits_equal,
)
from .contract import ANY, AnyValue, Contract, TensorRule
from .decoder import BundleReady, Decoder, Extension, Fragment, Head, decode
from .dtypes import DTYPES, DType
from .encoder import encode, encode_parts
from .errors import (
    ERRORS,
    BundleError,
    ContractMismatch,
    MalformedFrame,
    MalformedHead,
    OverLimit,
    Truncated,
    Unsupported,
)
from .prepared import PreparedDecoder, PreparedEncoder

__version__ = "0.1.0"

__all__ = [
    "ANY",
    "DTYPES",
    "ERRORS",
    "AnyValue",
    "Attribute",
    "Attributes",
    "Bundle",
    "BundleError",
    "BundleReady",
    "Contract",
    "ContractMismatch",
    "DType",
    "Decoder",
    "Extension",
    "Fragment",
    "Head",
    "Limits",
    "MalformedFrame",
    "MalformedHead",
    "OverLimit",
    "PreparedDecoder",
    "PreparedEncoder",
    "Tensor",
    "TensorInfo",
    "TensorRule",
    "Truncated",
    "Unsupported",
    "bits_equal",
    "decode",
    "encode",
    "encode_parts",
]
