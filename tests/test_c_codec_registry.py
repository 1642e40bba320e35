"""The C codec's names and numbers are those of spec/registry.json.

Catches a number, name, default or registered key that was changed, added or
forgotten on one side only. The enums exist for the compiler alone, so they are
held by a C file of static assertions; what the library tells at run time is
asked through ctypes.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "native_shim"
HEADER = (SHIM / "boundary_bundle.h").read_text(encoding="ascii")
REGISTRY: dict[str, Any] = json.loads((ROOT / "spec" / "registry.json").read_text(encoding="utf-8"))
LIMITS = [limit["name"] for limit in REGISTRY["limits"]]
CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler: neither cc, gcc nor clang is on the PATH")


class Limits(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in LIMITS]


def compile_c(*arguments: str) -> None:
    assert CC is not None
    result = subprocess.run([CC, "-std=c11", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("c_codec") / "libboundary_bundle.so"
    compile_c("-O1", "-fPIC", "-shared", str(SHIM / "boundary_bundle.c"), "-o", str(path))
    lib = ctypes.CDLL(str(path))
    for name in ("bb_error_name", "bb_error_meaning", "bb_dtype_name", "bb_attr_key_name"):
        getattr(lib, name).restype = ctypes.c_char_p
    lib.bb_dtype_block_elements.restype = ctypes.c_uint32
    lib.bb_dtype_block_bytes.restype = ctypes.c_uint32
    lib.bb_dtype_both_orders.restype = ctypes.c_bool
    lib.bb_dtype_from_name.argtypes = [ctypes.c_char_p]
    lib.bb_attr_key_length.restype = ctypes.c_uint32
    lib.bb_attr_key_forwarded.restype = ctypes.c_bool
    lib.bb_crc32c_portable.argtypes = [ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t]
    lib.bb_crc32c_portable.restype = ctypes.c_uint32
    lib.bb_sizeof.restype = ctypes.c_size_t
    return lib


def enumerators(name: str) -> set[str]:
    """The enumerators that the header declares in `enum name`."""
    match = re.search(rf"enum {name} \{{(.*?)\}};", HEADER, re.DOTALL)
    assert match is not None, name
    body = re.sub(r"/\*.*?\*/", "", match.group(1), flags=re.DOTALL)
    return {part.split("=")[0].strip() for part in body.split(",") if part.strip()}


def expected_enums() -> dict[str, dict[str, int]]:
    """What the registry says that each enum of the header holds."""
    status = {"BB_" + error["name"].upper(): error["number"] for error in REGISTRY["errors"]}
    return {
        "bb_status": status | {"BB_OK": 0},
        "bb_dtype": {"BB_" + d["name"].upper(): d["code"] for d in REGISTRY["dtypes"]},
        "bb_order": {"BB_" + name.upper(): code for name, code in REGISTRY["byte_orders"].items()},
        "bb_attr_type": {"BB_ATTR_" + n.upper(): code for n, code in REGISTRY["attribute_types"].items()},
        "bb_attr_key": {"BB_KEY_" + a["name"].upper(): a["key"] for a in REGISTRY["attributes"]},
        "bb_frame_type": {"BB_FRAME_" + n.upper(): code for n, code in REGISTRY["frame_types"].items()},
    }


def test_enum_values(tmp_path: Path) -> None:
    constants = {
        "BB_MAJOR": REGISTRY["version"]["major"],
        "BB_MINOR": REGISTRY["version"]["minor"],
        "BB_ALIGNMENT": REGISTRY["alignment"],
        "BB_HEADER_BYTES": REGISTRY["header_bytes"],
        "BB_NO_TOKEN_AXIS": REGISTRY["no_token_axis"],
        "BB_HEAD_NO_CHECKSUMS": 1 << REGISTRY["head_flags"]["payload_checksums_absent"],
    }
    for values in expected_enums().values():
        constants |= values
    lines = ['#include "boundary_bundle.h"']
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in constants.items()]
    source = tmp_path / "enums.c"
    source.write_text("\n".join(lines) + "\n", encoding="ascii")
    compile_c("-fsyntax-only", f"-I{SHIM}", str(source))


@pytest.mark.parametrize("name", sorted(expected_enums()))
def test_enum_has_nothing_else(name: str) -> None:
    faults_of_a_call = {e for e in enumerators(name) if e.startswith("BB_E_")}
    assert enumerators(name) - faults_of_a_call == set(expected_enums()[name])


def test_error_names_and_meanings(library: ctypes.CDLL) -> None:
    by_number = {error["number"]: error for error in REGISTRY["errors"]}
    for number in range(1, 1000):
        error = by_number.get(number)
        name = library.bb_error_name(number).decode("ascii")
        assert name == (error["name"] if error else "unknown"), number
        if error:
            assert library.bb_error_meaning(number).decode("ascii") == error["meaning"]


def test_dtypes(library: ctypes.CDLL) -> None:
    by_code = {dtype["code"]: dtype for dtype in REGISTRY["dtypes"]}
    for code in range(300):
        dtype = by_code.get(code)
        name = library.bb_dtype_name(code)
        if dtype is None:
            assert name is None, code
            assert library.bb_dtype_block_bytes(code) == 0
            continue
        assert name.decode("ascii") == dtype["name"]
        assert library.bb_dtype_from_name(name) == code
        assert library.bb_dtype_block_elements(code) == dtype["block_elements"]
        assert library.bb_dtype_block_bytes(code) == dtype["block_bytes"]
        assert library.bb_dtype_both_orders(code) == dtype["both_orders"]


def test_attribute_keys(library: ctypes.CDLL) -> None:
    by_key = {attribute["key"]: attribute for attribute in REGISTRY["attributes"]}
    for key in range(0x10000):
        attribute = by_key.get(key)
        name = library.bb_attr_key_name(key)
        if attribute is None:
            assert name is None, hex(key)
            continue
        assert name.decode("ascii") == attribute["name"]
        assert library.bb_attr_key_type(key) == REGISTRY["attribute_types"][attribute["type"]]
        assert library.bb_attr_key_length(key) == (attribute["length"] or 0)
        assert library.bb_attr_key_forwarded(key) == attribute["forwarded"]


def test_limits(library: ctypes.CDLL) -> None:
    """Defaults and maxima; on a 32-bit machine sizes are what a pointer can span."""
    assert library.bb_sizeof(0) == ctypes.sizeof(Limits)
    default, maximum = Limits(), Limits()
    library.bb_limits_default(ctypes.byref(default))
    library.bb_limits_maximum(ctypes.byref(maximum))
    if ctypes.sizeof(ctypes.c_void_p) < 8:
        pytest.skip("the registry's size limits do not fit this machine's pointers")
    for limit in REGISTRY["limits"]:
        assert getattr(default, limit["name"]) == limit["default"], limit["name"]
        assert getattr(maximum, limit["name"]) == limit["maximum"], limit["name"]


def test_header_lists_every_public_function() -> None:
    """A function left out of the prefix block would escape -DBB_PREFIX."""
    declared = set(re.findall(r"^BB_API [^;(]*?\b(bb_\w+)\(", HEADER, re.MULTILINE))
    renamed = set(re.findall(r"^#define (bb_\w+) BB_PASTE\(BB_PREFIX, (?:bb_\w+)\)", HEADER, re.MULTILINE))
    assert declared == renamed


def test_prefix_renames_every_symbol(tmp_path: Path) -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not on the PATH")
    path = tmp_path / "prefixed.o"
    # Position-independent code would put constant tables of pointers among the data.
    compile_c("-fno-pic", "-fno-pie", "-DBB_PREFIX=other_", "-c", str(SHIM / "boundary_bundle.c"), "-o", str(path))
    listing = subprocess.run([nm, "-P", str(path)], capture_output=True, text=True, check=True).stdout
    symbols = [line.split() for line in listing.splitlines()]
    exported = {name.lstrip("_") for name, kind, *_ in symbols if kind in "TDBRC"}
    assert exported
    assert all(name.startswith("other_bb_") for name in exported)
    assert {name for name, kind, *_ in symbols if kind in "DdBbC"} == set()  # no mutable globals


def test_crc32c_check_value(library: ctypes.CDLL) -> None:
    assert library.bb_crc32c_portable(0, b"123456789", 9) == 0xE3069283
