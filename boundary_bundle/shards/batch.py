"""One batch of tokens, of one or several sequences, as the bundle that the first shard takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..bundle import AttributeKey, AttributeValue, Bundle, Tensor
from ..contract import ANY, Contract, TensorRule
from ..dtypes import Array
from ..prepared import PreparedEncoder
from .worker import Description


@dataclass(frozen=True)
class Layout:
    """How the same bundle is laid out on the wire: none of it changes what the bundle says.

    ``fragment_size`` is 0 or a multiple of 64, in bytes.
    """

    byte_order: str = "little"
    fragment_size: int = 0
    checksums: bool = True

    def wish(self) -> dict[str, Any]:
        """What a worker is told of it (spec/worker-protocol.md, decode)."""
        return {"byte_order": self.byte_order, "fragment_size": self.fragment_size, "checksums": self.checksums}


PLAIN = Layout()


@dataclass(frozen=True)
class SessionRow:
    """One row of a batch's session table: the id (16 bytes), the epoch, and the position of its first token here."""

    id: bytes
    epoch: int
    position: int


@dataclass(frozen=True)
class Batch:
    """Tokens in batch order; all four lists have one entry a token.

    ``sequences[t]`` are the sequences that token t belongs to, ``positions[t]`` its position in them, and
    ``outputs[t]`` says whether the last shard is to give logits for it. With ``sessions`` the batch goes under
    sessions, and its sequences are rows of that table. Raises ValueError for lists of different lengths.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    sequences: Sequence[Sequence[int]]
    outputs: Sequence[bool]
    sessions: Sequence[SessionRow] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.positions), len(self.sequences), len(self.outputs)}
        if len(lengths) != 1:
            raise ValueError(f"tokens, positions, sequences and outputs have {sorted(lengths)} entries")

    @classmethod
    def of_sequence(cls, tokens: Sequence[int], start: int, *, outputs: str = "last", sequence: int = 0) -> Batch:
        """Consecutive tokens of one sequence from position ``start`` on; ``outputs`` is none, last or all."""
        count = len(tokens)
        wanted = [outputs == "all"] * count
        if outputs == "last" and count:
            wanted[-1] = True
        return cls(tokens, range(start, start + count), [(sequence,)] * count, wanted)

    def __len__(self) -> int:
        return len(self.tokens)

    def first_positions(self) -> dict[int, int]:
        """For each sequence that the batch touches, the smallest of its positions."""
        found: dict[int, int] = {}
        for position, members in zip(self.positions, self.sequences, strict=True):
            for sequence in members:
                found[sequence] = min(position, found.get(sequence, position))
        return found

    @property
    def n_seqs(self) -> int:
        """How many sequences it touches."""
        return len({sequence for members in self.sequences for sequence in members})

    def arrays(self) -> list[Array]:
        """token_ids, positions, seq_offsets, seq_ids, outputs, as in :meth:`bundle`."""
        offsets = np.zeros(len(self) + 1, np.uint32)
        np.cumsum([len(row) for row in self.sequences], out=offsets[1:])
        return [
            np.asarray(self.tokens, np.int32),
            np.asarray(self.positions, np.int32),
            offsets,
            np.asarray([sequence for row in self.sequences for sequence in row], np.uint32),
            np.asarray(self.outputs, np.bool_),
        ]

    def bundle(self, model: Description, layout: Layout = PLAIN, number: int = 0) -> Bundle:
        """The token request: token_ids i32 [tokens], positions i32 [tokens], seq_offsets u32 [tokens + 1],
        seq_ids u32 [members], outputs bool [tokens] (specification, 5.1), said to come from no layer; under sessions
        also session_ids u8 [sequences, 16], session_epochs u64 [sequences], session_positions i64 [sequences].
        """
        tokens, positions, offsets, members, outputs = self.arrays()
        order = layout.byte_order
        attributes: dict[AttributeKey, AttributeValue] = {
            "architecture": model.architecture,
            "layer_start": 0,
            "layer_end": 0,
            "n_layer": model.n_layer,
            "n_tokens": len(self),
            "n_seqs": self.n_seqs,
        }
        if model.fingerprint is not None:
            attributes["model_fingerprint"] = model.fingerprint
        if self.sessions and model.recipe is not None:
            attributes["recipe_fingerprint"] = model.recipe.fingerprint
        table: list[Tensor] = []
        if self.sessions:
            ids = np.frombuffer(b"".join(row.id for row in self.sessions), np.uint8).reshape(-1, 16)
            epochs = np.asarray([row.epoch for row in self.sessions], np.uint64)
            starts = np.asarray([row.position for row in self.sessions], np.int64)
            table = [
                Tensor("session_ids", ids),
                Tensor("session_epochs", epochs, byte_order=order),
                Tensor("session_positions", starts, byte_order=order),
            ]
        return Bundle(
            [
                Tensor("token_ids", tokens, token_axis=0, byte_order=order),
                Tensor("positions", positions, token_axis=0, byte_order=order),
                Tensor("seq_offsets", offsets, byte_order=order),
                Tensor("seq_ids", members, byte_order=order),
                *table,
                Tensor("outputs", outputs, token_axis=0),
            ],
            attributes,
            number=number,
            fragment_size=layout.fragment_size,
            checksums=layout.checksums,
        )


#: The shapes of a token request for any batch.
_SHAPES: Final = {
    "token_ids": ("tokens",),
    "positions": ("tokens",),
    "seq_offsets": ("tokens+1",),
    "seq_ids": ("members",),
    "outputs": ("tokens",),
}


class BatchEncoder:
    """Token requests for one model in one layout, of batches that are not under sessions.

    The bytes are those of ``encode(batch.bundle(model, layout, number))``, in less time from the second batch of a
    shape on. For one thread.
    """

    def __init__(self, model: Description, layout: Layout = PLAIN) -> None:
        form = Batch.of_sequence([0], 0).bundle(model, layout)
        rules = [TensorRule(one.name, one.dtype, _SHAPES[one.name], one.token_axis) for one in form.tensors]
        self._encoder = PreparedEncoder(
            Contract(rules, {**form.attributes, "n_tokens": ANY, "n_seqs": ANY}),
            byte_orders=layout.byte_order,
            fragment_size=layout.fragment_size,
            checksums=layout.checksums,
        )

    def encode(self, batch: Batch, number: int = 0) -> bytes:
        """Raises what encoding its bundle does."""
        return self._encoder.encode(batch.arrays(), {"n_tokens": len(batch), "n_seqs": batch.n_seqs}, number=number)
