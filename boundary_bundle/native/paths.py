"""Where things lie: the cache folder, and the checkout that holds the series and the shim."""

from __future__ import annotations

import os
from pathlib import Path

from .process import NativeError

_CACHEDIR_TAG = """Signature: 8a477f597d28d172789f06886806bc55
# This folder holds what boundary-bundle downloads and builds. It can be deleted at any time.
"""


def cache_dir() -> Path:
    """``$BOUNDARY_BUNDLE_CACHE``, else ``$XDG_CACHE_HOME/boundary-bundle``, else ``~/.cache/boundary-bundle``."""
    explicit = os.environ.get("BOUNDARY_BUNDLE_CACHE")
    if explicit:
        root = Path(explicit)
    else:
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG rules say that a relative path is to be ignored.
        base = Path(xdg) if os.path.isabs(xdg) else Path("~/.cache")
        root = base / "boundary-bundle"
    try:
        return root.expanduser().absolute()
    except (OSError, RuntimeError) as error:
        raise unusable(root, error) from None


def unusable(root: Path, error: Exception) -> NativeError:
    """What a user is told of a cache folder that cannot be used."""
    reason = getattr(error, "strerror", None) or str(error)
    return NativeError(
        f"the cache folder {root} cannot be used: {reason}; set BOUNDARY_BUNDLE_CACHE to a folder that can be written"
    )


def prepare_cache(root: Path) -> Path:
    """Create the cache folder with its tag; refuse one inside the checkout. Returns the real path."""
    checkout = _checkout()
    try:
        resolved = root.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise unusable(root, error) from None
    if checkout is not None and (resolved == checkout or checkout in resolved.parents):
        raise NativeError(
            f"the cache folder {root} lies inside the checkout {checkout}; "
            "set BOUNDARY_BUNDLE_CACHE to a folder outside it"
        )
    try:
        resolved.mkdir(parents=True, exist_ok=True)
        tag = resolved / "CACHEDIR.TAG"
        if not tag.exists():
            tag.write_text(_CACHEDIR_TAG, encoding="utf-8")
    except OSError as error:
        raise unusable(root, error) from None
    return resolved


def _checkout() -> Path | None:
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() else None


def checkout_dir() -> Path:
    """The checkout with patches/ and native_shim/, from which the native side is built."""
    root = _checkout()
    if root is None:
        raise NativeError(
            "the native side is built from a checkout of boundary-bundle, which holds patches/ and "
            f"native_shim/; {Path(__file__).resolve().parents[2]} is none (pip install -e from a clone)"
        )
    return root
