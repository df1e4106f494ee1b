"""Token ids → the text each one adds, by the tokenizer that lies in the run folder. No torch.

A run folder from elsewhere may hold no tokenizer: then ids are shown as ids, and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gropius.viewer.store import RunStore


def find_tokenizer(store: RunStore) -> Any | None:
    """The `tokenizers.Tokenizer` of the run: from the folder itself, else from a checkpoint, else the built-in one."""
    folder = store.reader.folder
    places = [folder / "tokenizer.json", folder / "tokenizer" / "tokenizer.json"]
    places += sorted(folder.glob("checkpoints/*/model/tokenizer.json")) + sorted(folder.glob("*/tokenizer.json"))
    for place in places:
        if (found := _read(place)) is not None:
            return found
    model = store.resolved().get("model")
    if isinstance(model, dict) and model.get("source") == "tiny":
        from gropius.models.tiny import tiny_tokenizer

        return tiny_tokenizer().backend_tokenizer
    return None


def _read(place: Path) -> Any | None:
    if not place.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(place))
    except Exception:  # the boundary: the library raises nothing narrower for a damaged file
        return None


def pieces(tokenizer: Any | None, ids: Sequence[int]) -> list[str] | None:
    """[T] the text that each token adds; "" for a token that only begins a character. None without a tokenizer."""
    if tokenizer is None:
        return None
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    out = []
    for token in ids:
        try:
            out.append(stream.step(tokenizer, int(token)) or "")
        except Exception:  # the boundary: the library raises nothing narrower for an id outside the vocabulary
            stream = DecodeStream(skip_special_tokens=False)
            out.append(f"⟨{int(token)}⟩")
    return out
