"""Files that are written whole or not at all, whatever the name leads to."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

Bytes = bytes | bytearray | memoryview

#: What the name of a file begins with that is being written; the process and a dash follow.
PARTIAL = ".partial-"


def default_mode(most: int = 0o666) -> int:
    """The mode that a new file gets from this process (``most`` 0o777: a new folder)."""
    mask = os.umask(0)
    os.umask(mask)
    return most & ~mask


def is_regular(found: os.stat_result) -> bool:
    """Whether it may be replaced by another file: devices, pipes, sockets and folders may not."""
    return stat.S_ISREG(found.st_mode)


def obstacle(path: Path | str) -> str | None:
    """Why :func:`write_whole` cannot write ``path``, if that can be told beforehand. Makes and opens nothing."""
    try:
        found: os.stat_result | None = os.stat(path)
    except FileNotFoundError:
        found = None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return getattr(error, "strerror", None) or str(error)
    if found is not None:
        if stat.S_ISDIR(found.st_mode):
            return "it is a folder"
        if stat.S_ISSOCK(found.st_mode):
            return "it is a socket"
        if stat.S_ISBLK(found.st_mode):
            return "it is a block device"
        if not os.access(path, os.W_OK):
            return "it is not writable"
        if _is_direct(path, found):
            return None
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        return f"there is no folder {folder}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {folder} is not writable"
    return None


def write_whole(path: Path | str, parts: Iterable[Bytes]) -> None:
    """Write ``parts`` as the whole content of ``path``, or change nothing. Raises OSError.

    A symbolic link stays one: the file that it leads to is written. A file that is there keeps its mode. A temporary
    file beside it takes its name at the end. A character device or a pipe is written directly, and so is a file that
    a standard stream of this process goes to: they stay what they are. Folders, sockets and block devices are refused.
    """
    reason = obstacle(path)
    if reason is not None:
        raise OSError(errno.EINVAL, reason, str(path))
    try:
        found: os.stat_result | None = os.stat(path)
    except FileNotFoundError:
        found = None
    if found is not None and _is_direct(path, found):
        _write_directly(path, parts)
        return
    target = os.path.realpath(path)
    handle, partial = tempfile.mkstemp(prefix=f"{PARTIAL}{os.getpid()}-", dir=os.path.dirname(target))
    try:
        with open(handle, "wb") as stream:
            stream.writelines(parts)
        # mkstemp makes it private; a result is as readable as any other file.
        os.chmod(partial, default_mode() if found is None else stat.S_IMODE(found.st_mode) & 0o777)
        if found is not None:
            with contextlib.suppress(OSError):  # only a privileged user may give a file away
                os.chown(partial, found.st_uid, found.st_gid)
        os.replace(partial, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def _is_direct(path: Path | str, found: os.stat_result) -> bool:
    if not is_regular(found):
        return True
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(found, os.fstat(stream)):
                return True
    # Such as /proc/self/fd/3 of a file that has been removed: it has no name to replace.
    try:
        return not os.path.samestat(found, os.stat(os.path.realpath(path)))
    except OSError:
        return True


def _write_directly(path: Path | str, parts: Iterable[Bytes]) -> None:
    # Without a reader the opening of a pipe would wait for one, for ever.
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "it is a pipe that nobody reads", str(path)) from None
        raise
    with open(handle, "wb") as stream:
        os.set_blocking(handle, True)
        stream.writelines(parts)
