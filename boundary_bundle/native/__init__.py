"""The native side: get llama.cpp at the pin, apply the series, build, and say where it stands.

    from boundary_bundle.native import build, ensure_model

    patched = build("patched")        # NativeBuild: worker, lib_dir, include_dirs, ...
    model = ensure_model()            # path of the demo model's GGUF file

Everything made here lies in the cache folder (see :mod:`.paths`), never in the checkout.
"""

from __future__ import annotations

from .build import Kind, NativeBuild, build
from .model import ensure_model
from .paths import cache_dir
from .process import NativeError
from .source import Source, ensure_source

__all__ = [
    "Kind",
    "NativeBuild",
    "NativeError",
    "Source",
    "build",
    "cache_dir",
    "ensure_model",
    "ensure_source",
]
