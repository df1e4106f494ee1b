"""What an update did not have to run, in ids, against rows padded to the longest: where the saving comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gropius.train.pack import Pack
from gropius.train.sequences import TrainSequence


@dataclass(frozen=True)
class Saving:
    """Ids of prompts and responses. padded = run + shared + dead + tail + padding.

    run: through the model, forward and backward. shared: of prefixes that stand in several live rows and were run once
    for all. dead: of rows that cannot move the policy. tail: of live rows after the last token that is predicted.
    padded: what rows padded to the longest prompt and the longest response of the update would have run.
    """

    run: int = 0
    shared: int = 0
    dead: int = 0
    tail: int = 0
    padded: int = 0

    @property
    def padding(self) -> int:
        """Ids that would have been padding and were not run; below 0 where rows were padded all the same, and more."""
        return self.padded - self.run - self.shared - self.dead - self.tail

    @property
    def share(self) -> float:
        """1 − run / padded; 0 without a row."""
        return 1.0 - self.run / self.padded if self.padded else 0.0

    def __add__(self, other: Saving) -> Saving:
        return Saving(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def metrics(self) -> dict[str, float | int]:
        """The `compute/…` metrics of the run record."""
        parts = {name: getattr(self, name) for name in ("run", "shared", "dead", "padding", "padded")}
        return {f"compute/{name}": value for name, value in parts.items()} | {"compute/saved": self.share}


def saving(sequences: Sequence[TrainSequence], packs: Sequence[Pack], *, packed: bool) -> Saving:
    """Count what an update over `sequences`, laid in `packs`, runs and leaves out.

    packed: False where the model runs the packs' rows padded to the longest of each pack, each prompt once a row.
    """
    live = {i for one in packs for i in one.index}
    needed = sum(len(sequences[i].run_ids) for i in live)
    unique = sum(one.run_tokens for one in packs)
    padded_rows = sum(len(one.sequences) * max(len(row.run_ids) for row in one.sequences) for one in packs)
    longest = (
        max((len(row.prompt_ids) for row in sequences), default=0)
        + max((len(row.response_ids) for row in sequences), default=0)
    )  # fmt: skip
    return Saving(
        run=unique if packed else padded_rows,
        shared=needed - unique if packed else 0,
        dead=sum(row.length_tokens for i, row in enumerate(sequences) if i not in live),
        tail=sum(sequences[i].length_tokens for i in live) - needed,
        padded=len(sequences) * longest,
    )
