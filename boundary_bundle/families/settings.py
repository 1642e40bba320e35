"""The settings that a certification runs: a covering array over eight factors, and the batches of each.

Every legal pair of values of two factors is met by at least one setting (:class:`Covering`). What is illegal is found
by asking the unpatched library: a value or a pair that it refuses in every setting tried is listed with its reason, and
the pairs that the refused settings would have met are looked for in others. Only what follows from the kind of model
alone is ruled out beforehand (:func:`rules`).

All is drawn from fixed seeds, so that the same model gets the same settings and batches again.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

#: A value of a factor, or two of different factors: sorted (factor, value) pairs.
Combination = tuple[tuple[str, str], ...]

FACTORS: dict[str, tuple[str, ...]] = {
    # Tokens of a batch; u is the micro-batch size.
    "batch": ("1", "2", "u-1", "u", "u+1", "3u+1"),
    "sequences": ("1", "2", "3", "4"),
    "kv": ("unified", "split"),
    "flash": ("on", "off"),
    # Types of keys and values.
    "types": ("f16-f16", "q8_0-f16", "q8_0-q8_0"),
    # Tokens that give a row of output: all, the last of each sequence in a batch, one in three.
    "outputs": ("all", "last", "scattered"),
    # About 50 positions with micro-batches of 8, or 524 with micro-batches of 64.
    "context": ("short", "long"),
    # Of a cache for layers with a sliding window: every position, or the last ones.
    "window": ("whole", "moving"),
}

#: Steps of one token a sequence after the batches.
DECODE_STEPS = 8
#: A combination is taken for illegal when so many settings that were made to try it were refused.
TRIES = 2

_SHORT, _LONG = 50, 524
_UBATCH = {"short": 8, "long": 64}
#: Where a batch is one micro-batch.
_UBATCH_WHOLE = {"short": 64, "long": 576}
#: Where batches of one or two tokens begin in a long context; what comes before is fed in large ones.
_PREFILL = 500


@dataclass(frozen=True, order=True)
class Setting:
    """One value of each factor."""

    batch: str
    sequences: str
    kv: str
    flash: str
    types: str
    outputs: str
    context: str
    window: str

    @property
    def name(self) -> str:
        """One word, such as ``b3u+1.s2.split.flash.q8_0-f16.last.long``; ``.moving`` behind it for such a window."""
        flash = "flash" if self.flash == "on" else "plain"
        name = f"b{self.batch}.s{self.sequences}.{self.kv}.{flash}.{self.types}.{self.outputs}.{self.context}"
        return name if self.window == "whole" else f"{name}.{self.window}"

    def values(self) -> tuple[tuple[str, str], ...]:
        return tuple((entry.name, getattr(self, entry.name)) for entry in fields(self))

    def meets(self, combination: Combination) -> bool:
        return all(getattr(self, factor) == value for factor, value in combination)


@dataclass(frozen=True)
class Illegal:
    """A combination that no setting can have. ``refused``: the library itself says so when it is asked."""

    combination: Combination
    reason: str
    refused: bool = False

    @property
    def text(self) -> str:
        return ", ".join(f"{factor} {value}" for factor, value in self.combination)


@dataclass(frozen=True)
class Traits:
    """What decides about settings.

    ``whole``: attention goes both ways, so that a batch is one micro-batch. ``window``: layers with a sliding window
    have a cache of their own. ``encode``: batches go through llama_encode (``all``), or one does before the others
    (``first``), or none (``none``). ``latent``: values are a part of the keys.
    """

    memory: bool
    n_vocab: int
    n_ctx_train: int
    embeddings: bool = False
    whole: bool = False
    encode: str = "none"
    latent: bool = False
    window: bool = False


@dataclass(frozen=True)
class Token:
    token: int
    position: int
    sequence: int
    output: bool


@dataclass
class Run:
    """A setting with its batches, as the certifying program takes it. ``kinds``: decode or encode, one a batch."""

    setting: Setting
    n_ctx: int
    n_batch: int
    n_ubatch: int
    embeddings: bool
    batches: list[list[Token]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    @property
    def sizes(self) -> set[int]:
        return {len(batch) for batch in self.batches}


ALL_SETTINGS: tuple[Setting, ...] = tuple(Setting(*values) for values in itertools.product(*FACTORS.values()))


# -- what is illegal


def combination(**values: str) -> Combination:
    return tuple(sorted(values.items()))


def rules(traits: Traits) -> list[Illegal]:
    """What is illegal for a model of this kind before anything is run."""
    found = []
    n_ubatch = _UBATCH_WHOLE if traits.whole else _UBATCH
    if traits.whole:
        reason = "attention goes both ways, so a batch is one micro-batch"
        found += [Illegal(combination(batch=size), reason) for size in ("u+1", "3u+1")]
    if traits.embeddings or not traits.memory:
        reason = "embeddings come" if traits.embeddings else "a graph without memory gives rows"
        reason += " for every token"
        found += [Illegal(combination(outputs=which), reason) for which in ("last", "scattered")]
    if not traits.window:
        found.append(Illegal(combination(window="moving"), "no layer has a cache for a sliding window"))
    if traits.memory:
        if traits.latent:
            reason = "without flash attention upstream transposes values that are part of quantised keys, byte by byte"
            found.append(Illegal(combination(types="q8_0-f16", flash="off"), reason))
        reason = "quantised values need flash attention"
        found.append(Illegal(combination(types="q8_0-q8_0", flash="off"), reason, refused=True))
        needed = _LONG + DECODE_STEPS
    else:
        reason = "there are no keys and values to hold"
        found += [Illegal(combination(types=types), reason) for types in ("q8_0-f16", "q8_0-q8_0")]
        reason = "without memory every batch begins at position 0"
        found += [Illegal(combination(batch=size, context="long"), reason) for size in ("1", "2")]
        needed = n_ubatch["long"]
    if traits.n_ctx_train < needed:
        reason = f"the model was made for {traits.n_ctx_train} positions"
        found.append(Illegal(combination(context="long"), reason))
    return found


# -- the covering array


def pairs(setting: Setting) -> frozenset[Combination]:
    """The pairs of values that a setting meets."""
    return _PAIRS[setting]


_PAIRS: dict[Setting, frozenset[Combination]] = {
    setting: frozenset(tuple(sorted(pair)) for pair in itertools.combinations(setting.values(), 2))
    for setting in ALL_SETTINGS
}
ALL_PAIRS: frozenset[Combination] = frozenset().union(*_PAIRS.values())


def _cost(setting: Setting) -> float:
    """Rough work: settings that meet equally much are taken by it."""
    work = 4.0 if setting.context == "long" else 1.0
    work += {"1": 3.0, "2": 1.5}.get(setting.batch, 0.0)
    return work + 0.2 * int(setting.sequences)


@functools.lru_cache(maxsize=64)
def greedy(allowed: tuple[Setting, ...], wanted: frozenset[Combination]) -> tuple[Setting, ...]:
    """Settings of ``allowed`` that meet the ``wanted`` pairs, as far as they can be met."""
    left, chosen = set(wanted), []
    while left:
        best = min(allowed, key=lambda one: (-len(_PAIRS[one] & left), _cost(one), one), default=None)
        if best is None or not _PAIRS[best] & left:
            break
        chosen.append(best)
        left -= _PAIRS[best]
    return tuple(chosen)


class Covering:
    """Which settings to run, given what came of those that were.

    ::

        covering = Covering(rules(traits))
        while settings := covering.next_round():
            for setting in settings:
                covering.ran(setting) or covering.refused(setting, reason)

    A refused setting does not say which of its values is to blame, and its pairs are still to be met. So every value,
    and then every pair, that has not been met is tried in further settings that hold as little else as possible that
    was refused too. What is refused in TRIES of those is illegal.
    """

    def __init__(self, illegal: Iterable[Illegal] = (), only: Sequence[Setting] | None = None) -> None:
        self._ruled = list(illegal)
        legal = [one for one in ALL_SETTINGS if not any(one.meets(entry.combination) for entry in self._ruled)]
        self._legal: tuple[Setting, ...] = tuple(legal)
        self._only = None if only is None else [one for one in only if one in set(legal)]
        self._found: list[Illegal] = []
        self._tried: dict[Combination, list[Setting]] = {}
        self._met: set[Combination] = set()
        self.good: list[Setting] = []
        self.bad: dict[Setting, str] = {}

    def ran(self, setting: Setting) -> None:
        self.good.append(setting)
        self._met |= _PAIRS[setting]
        self._met |= {(value,) for value in setting.values()}

    def refused(self, setting: Setting, reason: str) -> None:
        self.bad[setting] = reason

    def next_round(self) -> list[Setting]:
        """Settings to try now; none when every legal pair is met or known to be impossible."""
        if self._only is not None:
            chosen, self._only = self._only, []
            return chosen
        values = [((factor, value),) for factor, row in FACTORS.items() for value in row]
        while True:
            blamed = [entry.combination for entry in self._found]
            unexplained = [one for one in self.bad if not any(one.meets(entry) for entry in blamed)]
            if not unexplained:
                allowed = tuple(self._allowed())
                return list(greedy(allowed, self._open(allowed)))
            for candidates in (values, sorted(ALL_PAIRS)):
                suspects = [
                    one for one in candidates if one not in self._met and any(bad.meets(one) for bad in unexplained)
                ]
                if self._blame(suspects):
                    break  # it may explain others
                if chosen := self._retry(suspects, unexplained):
                    return chosen
            else:
                # Each of its pairs is met elsewhere: it is the setting as a whole that is refused.
                first = unexplained[0]
                self._found.append(Illegal(tuple(first.values()), self.bad[first]))

    def enough(self) -> list[Setting]:
        """Of the settings that ran as many as meet all pairs that were met, in their order; all that were asked for."""
        if self._only is not None:
            return list(self.good)
        keep = set(greedy(tuple(self.good), frozenset(self._met & ALL_PAIRS)))
        return [one for one in self.good if one in keep]

    def met(self) -> int:
        """How many pairs the settings that ran meet."""
        return len(self._met & ALL_PAIRS)

    def illegal(self) -> list[Illegal]:
        """All that is illegal: ruled out beforehand, and found by trying."""
        return [*self._ruled, *self._found]

    def unmet(self) -> list[Combination]:
        """Pairs that a setting could have met, and none that ran did. At the end of a full run there are none."""
        return sorted(self._open(self._allowed()))

    def _allowed(self) -> list[Setting]:
        """Settings without anything illegal."""
        return [one for one in self._legal if not any(one.meets(entry.combination) for entry in self._found)]

    def _open(self, allowed: Iterable[Setting]) -> frozenset[Combination]:
        possible: set[Combination] = set().union(*(_PAIRS[one] for one in allowed))
        return frozenset(possible - self._met)

    def _blame(self, suspects: Sequence[Combination]) -> bool:
        """Take the first suspect for illegal that was tried enough, or that cannot be tried; whether there was one."""
        for suspect in suspects:
            allowed = [one for one in self._allowed() if one.meets(suspect)]
            tried = self._tried.get(suspect, [])
            if allowed and (len(tried) >= TRIES or all(one in self.bad for one in allowed)):
                reasons = [self.bad[one] for one in (*tried[::-1], *allowed) if one in self.bad]
                self._found.append(Illegal(suspect, reasons[0]))
                return True
        return False

    def _retry(self, suspects: Sequence[Combination], unexplained: Sequence[Setting]) -> list[Setting]:
        """A setting for each suspect that holds it and as little as possible of what was refused besides."""
        suspicion = Counter(pair for one in unexplained for pair in _PAIRS[one] if pair not in self._met)
        chosen: list[Setting] = []
        for suspect in suspects:
            left = [one for one in self._allowed() if one.meets(suspect) and one not in self.bad]
            if not left or any(one.meets(suspect) for one in chosen):
                continue
            best = min(left, key=lambda one: (sum(suspicion[pair] for pair in _PAIRS[one]), _cost(one), one))
            self._tried.setdefault(suspect, []).append(best)
            chosen.append(best)
        return chosen


def array(traits: Traits) -> list[Setting]:
    """The covering array of a model that refuses nothing beyond the rules."""
    return Covering(rules(traits)).next_round()


#: Of the reduced grid, as many settings of the array: they are the ones that meet most pairs.
REDUCED = 3


# -- batches


def make_run(setting: Setting, traits: Traits) -> Run:
    """The batches of a setting, for a model of this kind."""
    random = np.random.default_rng(zlib.crc32(setting.name.encode()))
    if not traits.memory:
        return _without_memory(setting, traits, random)
    n_ubatch = (_UBATCH_WHOLE if traits.whole else _UBATCH)[setting.context]
    size = _batch_size(setting.batch, n_ubatch)
    n_sequences = int(setting.sequences)
    lengths = _lengths(setting.context, n_sequences)
    stream = _interleave(lengths, random)
    large = n_ubatch if traits.whole else 3 * n_ubatch + 1
    head = 0
    if setting.context == "long" and size <= 2:
        # One position at a time all the way to 512 would only repeat the same step.
        head = next(place for place, (_, position) in enumerate(stream) if position == _PREFILL)
    cuts = [*range(0, head, large), *range(head, len(stream), size)]
    parts = [stream[start:end] for start, end in zip(cuts, [*cuts[1:], len(stream)], strict=True)]
    parts += [[(sequence, lengths[sequence] + step) for sequence in range(n_sequences)] for step in range(DECODE_STEPS)]
    room = [length + DECODE_STEPS for length in lengths]
    n_ctx = sum(room) if setting.kv == "unified" else n_sequences * max(room)
    run = Run(setting, _padded(n_ctx, n_sequences, setting.kv), large, n_ubatch, traits.embeddings)
    if traits.encode == "first":
        # Of the encoder, which takes it in one micro-batch.
        length = min(5, n_ubatch // n_sequences)
        prompt = [(sequence, place) for sequence in range(n_sequences) for place in range(length)]
        run.batches.append(_tokens(prompt, "all", traits, random))
        run.kinds.append("encode")
    for part in parts:
        run.batches.append(_tokens(part, setting.outputs, traits, random))
        run.kinds.append("decode")
    return run


def _without_memory(setting: Setting, traits: Traits, random: np.random.Generator) -> Run:
    """Independent batches, each from position 0 and within one micro-batch."""
    n_ubatch = _UBATCH_WHOLE[setting.context]
    size = _batch_size(setting.batch, n_ubatch)
    n_sequences = int(setting.sequences)
    run = Run(setting, _padded(n_ubatch * n_sequences, n_sequences, setting.kv), n_ubatch, n_ubatch, traits.embeddings)
    for number in range(3):
        # With less tokens than sequences, they take turns.
        chosen = [(number + place) % n_sequences for place in range(min(n_sequences, size))]
        shares = _shares(size, len(chosen))
        stream = _interleave(shares, random)
        run.batches.append(
            _tokens([(chosen[which], position) for which, position in stream], setting.outputs, traits, random)
        )
    for _ in range(DECODE_STEPS):
        step = [(sequence, 0) for sequence in range(n_sequences)]
        run.batches.append(_tokens(step, setting.outputs, traits, random))
    run.kinds = ["encode" if traits.encode == "all" else "decode"] * len(run.batches)
    return run


def _batch_size(text: str, n_ubatch: int) -> int:
    return {
        "1": 1,
        "2": 2,
        "u-1": n_ubatch - 1,
        "u": n_ubatch,
        "u+1": n_ubatch + 1,
        "3u+1": 3 * n_ubatch + 1,
    }[text]


def _shares(total: int, count: int) -> list[int]:
    """``total`` in ``count`` uneven parts, each at least 1."""
    weights = [1.0, 0.35, 0.65, 0.5][:count]
    parts = [max(1, int(total * weight / sum(weights))) for weight in weights]
    parts[0] += total - sum(parts)
    return parts


def _lengths(context: str, count: int) -> list[int]:
    """Positions of each sequence; in a long context the first passes 512."""
    if context == "short":
        return _shares(_SHORT, count)
    return [_LONG, 37, 90, 61][:count]


def _interleave(lengths: Sequence[int], random: np.random.Generator) -> list[tuple[int, int]]:
    """(sequence, position) of every token: runs of one or two, so that sequences meet and part within a batch."""
    left = np.array(lengths)
    stream: list[tuple[int, int]] = []
    while left.sum():
        # The square root lets short sequences last almost as long as their share allows, not ending them at once.
        weights = np.sqrt(left) * (left > 0)
        sequence = int(random.choice(len(left), p=weights / weights.sum()))  # nosec B311: drawn settings, not keys
        for _ in range(min(int(left[sequence]), int(random.integers(1, 3)))):
            stream.append((sequence, int(lengths[sequence] - left[sequence])))
            left[sequence] -= 1
    return stream


def _tokens(part: Sequence[tuple[int, int]], outputs: str, traits: Traits, random: np.random.Generator) -> list[Token]:
    last = {sequence: place for place, (sequence, _) in enumerate(part)}
    chosen = {
        "all": [True] * len(part),
        "last": [last[sequence] == place for place, (sequence, _) in enumerate(part)],
        "scattered": [bool(drawn) for drawn in random.random(len(part)) < 1 / 3],  # nosec B311: as above
    }[outputs]
    return [
        Token(int(random.integers(0, traits.n_vocab)), position, sequence, wanted)
        for (sequence, position), wanted in zip(part, chosen, strict=True)
    ]


def _padded(n_ctx: int, n_sequences: int, kv: str) -> int:
    """The library gives each sequence a multiple of 256 positions; it is said rather than left to it."""
    share = n_ctx if kv == "unified" else -(-n_ctx // n_sequences)
    share = -(-share // 256) * 256
    return share if kv == "unified" else share * n_sequences


# -- the plan file


def plan_text(runs: Iterable[Run], *, refuse: Mapping[str, bool] | None = None, dump: str | None = None) -> str:
    """The text that ``native_shim/certify.cpp`` reads. ``refuse``: names of settings that must be refused."""
    lines = ["boundary-bundle-plan 1"]
    for run in runs:
        setting = run.setting
        type_k, type_v = setting.types.split("-")
        lines.append(
            f"setting {setting.name} ctx {run.n_ctx} batch {run.n_batch} ubatch {run.n_ubatch} "
            f"seqs {setting.sequences} unified {int(setting.kv == 'unified')} flash {int(setting.flash == 'on')} "
            f"type_k {type_k} type_v {type_v} swa_full {int(setting.window == 'whole')} "
            f"embeddings {int(run.embeddings)} "
            f"refuse {int((refuse or {}).get(setting.name, False))} dump {int(setting.name == dump)} "
            f"batches {len(run.batches)}"
        )
        for kind, batch in zip(run.kinds, run.batches, strict=True):
            rows = " ".join(f"{one.token} {one.position} {int(one.output)} 1 {one.sequence}" for one in batch)
            lines.append(f"{kind} {len(batch)} {rows}")
    return "\n".join(lines) + "\n"
