"""The specification's test vectors: made, loaded, and run against a codec.

``make_vectors`` writes ``spec/vectors/*.json`` with a builder of its own (``builder``),
``vectors`` loads them, ``check`` runs one against this package's codec, and
``deleted_checks`` removes each check of the decoder in turn and names the vectors
that notice.
"""

from __future__ import annotations
