"""When a row is done: end-of-sequence and stop ids, stop strings, length."""

from __future__ import annotations

import numpy as np
from transformers import GenerationConfig, PreTrainedTokenizerBase

from hybridflow.config import ConfigError
from hybridflow.rollout.native.sequences import Finish, Sequences
from hybridflow.types import SamplingParams

_UNKNOWN, _CANNOT, _MAY = -1, 0, 1
# A character takes up to four byte tokens, and the newest may still be incomplete.
_SPARE_TOKENS = 4


def collect_eos_ids(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> set[int]:
    """All ids that end a sequence: the tokenizer's own and those of the generation config, one or a list there."""
    named = [tokenizer.eos_token_id, None if generation is None else generation.eos_token_id]
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in named]
    return {int(value) for values in lists for value in values if value is not None}


class StopRules:
    """Stops of one `generate` call.

    A stop id is part of the row's tokens and not of its text. A stop string is looked for in the text of the response
    alone, so it may span tokens; its tokens stay, the text is cut before it. A stop string that is a special token
    (which text never shows) stops by its id. `ignore_eos` ignores the model's own ids, never the ones asked for.

    ids, strings: what stops a row, after all of this, for engines that look for it themselves.
    """

    def __init__(
        self, sampling: SamplingParams, eos_ids: set[int], tokenizer: PreTrainedTokenizerBase, vocab_size: int
    ) -> None:
        _check_stops(sampling, vocab_size)
        special = {added.content: index for index, added in tokenizer.added_tokens_decoder.items() if added.special}
        ids = set(sampling.stop_token_ids) | {special[s] for s in sampling.stop_strings if s in special}
        if not sampling.ignore_eos:
            ids |= eos_ids
        self.strings = tuple(s for s in sampling.stop_strings if s not in special)
        self._tokenizer = tokenizer
        self.ids = sorted(index for index in ids if 0 <= index < vocab_size)
        self._is_stop = np.zeros(vocab_size, np.bool_)
        self._is_stop[self.ids] = True
        self._last_characters = {string[-1] for string in self.strings}
        self._completes = np.full(vocab_size, _MAY if " " in self._last_characters else _UNKNOWN, np.int8)
        self._window = max((len(string.encode()) for string in self.strings), default=0) + _SPARE_TOKENS

    def mark_finished(self, sequences: Sequences, rows: np.ndarray) -> None:
        """Sets `finish` of those rows that their newest token ends."""
        tokens = sequences.last_tokens(rows)
        stopped = self._is_stop[tokens]
        if self.strings:
            stopped |= self._ends_with_string(sequences, rows, tokens)
        lengths = sequences.length[rows]
        finish = np.where(
            stopped, Finish.STOP, np.where(lengths >= sequences.max_length[rows], Finish.LENGTH, Finish.NONE)
        )
        finite = np.isfinite(sequences.logprobs[rows, lengths - 1])
        sequences.finish[rows] = np.where(finite, finish, Finish.FAILED)

    def decode(self, responses: list[np.ndarray]) -> list[str]:
        """Texts of responses, without special tokens, a last stop id, and what a stop string begins."""
        ids = [response[:-1] if len(response) and self._is_stop[response[-1]] else response for response in responses]
        # Some releases of Transformers make one text of no rows.
        texts = self._tokenizer.batch_decode([part.tolist() for part in ids], skip_special_tokens=True) if ids else []
        return [self._cut(text) for text in texts] if self.strings else texts

    def _cut(self, text: str) -> str:
        found = [text.find(string) for string in self.strings]
        return text[: min((at for at in found if at >= 0), default=len(text))]

    def _ends_with_string(self, sequences: Sequences, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        ended = np.zeros(len(rows), np.bool_)
        candidates = np.flatnonzero(self._may_complete(tokens))
        starts = np.maximum(sequences.prompt_length[rows], sequences.length[rows] - self._window)
        tails = [sequences.tokens[rows[i], starts[i] : sequences.length[rows[i]]].tolist() for i in candidates]
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=True) if tails else []
        ended[candidates] = [any(string in text for string in self.strings) for text in texts]
        return ended

    def _may_complete(self, tokens: np.ndarray) -> np.ndarray:
        """Whether a stop string can end in each token: it holds the last character of one, or part of a character."""
        for token in np.unique(tokens[self._completes[tokens] == _UNKNOWN]):
            text = self._tokenizer.decode([int(token)], skip_special_tokens=True)
            may = "\ufffd" in text or any(character in text for character in self._last_characters)
            self._completes[token] = _MAY if may else _CANNOT
        return self._completes[tokens] == _MAY


def _check_stops(sampling: SamplingParams, vocab_size: int) -> None:
    outside = [index for index in sampling.stop_token_ids if not 0 <= index < vocab_size]
    if outside:
        raise ConfigError(
            f"sampling.stop_token_ids holds {outside[0]}, and the model has ids 0 to {vocab_size - 1}; take it out"
        )
