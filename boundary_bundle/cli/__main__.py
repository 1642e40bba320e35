"""``python -m boundary_bundle.cli``."""

from __future__ import annotations

import sys

from . import main

sys.exit(main())
