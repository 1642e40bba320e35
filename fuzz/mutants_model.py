"""What a mutant is, and what can become of it."""

from __future__ import annotations

from dataclasses import dataclass


def squeeze(text: str) -> str:
    """In one line, with one blank between words."""
    return " ".join(text.split())


def numbered(seen: set[tuple[str, str, str]], function: str, old: str, new: str) -> str:
    """``old``, with a number from the second time on that a function has the same mutation."""
    count = 1
    told = old
    while (function, told, new) in seen:
        count += 1
        told = f"{old} [{count}]"
    seen.add((function, told, new))
    return told


@dataclass(frozen=True)
class Mutant:
    """One expression of the source that is made another."""

    number: int
    language: str
    file: str
    function: str
    line: int
    #: flip, bound, and/or, condition (one of several left out) or check (none of them left).
    kind: str
    old: str
    new: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """By which a note finds it, wherever its line goes."""
        return (self.file, self.function, self.old, self.new)


@dataclass(frozen=True)
class Fate:
    #: "vectors", "tests", "lives".
    by: str
    #: The vector or the tests.
    what: str
    #: So many vectors had been run.
    after: int
