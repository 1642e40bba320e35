"""Mutants that nothing can notice, each with its reason.

A note stands for a mutation by file, function, what stood there and what stands there now, as ``fuzz/mutants.py
--json`` writes them. A note on what the source does not have any more, and on what is noticed, fails ``make mutants``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Note:
    file: str
    function: str
    old: str
    new: str
    reason: str

    @property
    def language(self) -> str:
        return "python" if self.file.endswith(".py") else "c"

    def told(self) -> str:
        return f"{self.file} {self.function}: `{self.old}` as `{self.new}`"


#: (file, function, reason, mutations)
_TABLE: Final[tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...]] = ()

NOTES: Final = {
    (file, function, old, new): Note(file, function, old, new, reason)
    for file, function, reason, mutations in _TABLE
    for old, new in mutations
}
