import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from hybridflow.config import ConfigError
from hybridflow.rollout.native.sequences import Draws, Finish, Sequences
from hybridflow.rollout.native.stopping import StopRules, collect_eos_ids
from hybridflow.types import SamplingParams

PIECES = ["<unk>", "</s>", "<|end|>", "a", "b", "ab", ".", "\n", "STO", "P", " OP", "<0xC3>", "<0xA9>", " c"]
A, B, AB, DOT, NEWLINE, STO, P, C3, A9 = 3, 4, 5, 6, 7, 8, 9, 11, 12
EOS, END = 1, 2
PROMPT = np.array([A, B, A], np.int32)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", additional_special_tokens=["<|end|>"]
    )  # fmt: skip


def feed(tokenizer, responses, *, max_new_tokens=20, **sampling) -> tuple[list[str], list[str], list[int]]:
    """Feeds rows token by token, all at once. returns: (finish names, texts, response lengths) when each had its say."""
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    rules = StopRules(params, collect_eos_ids(tokenizer, None), tokenizer, len(PIECES))
    sequences = Sequences([PROMPT] * len(responses), 1, max_new_tokens, 100)
    for at in range(max(map(len, responses))):
        rows = np.array([i for i in sequences.unfinished() if at < len(responses[i])], np.int64)
        sequences.append(rows, Draws(np.array([responses[i][at] for i in rows]), np.full(len(rows), -1.0)))
        rules.mark_finished(sequences, rows)
    lengths = sequences.length[: len(responses)] - len(PROMPT)
    texts = rules.decode([sequences.tokens[i, 3 : 3 + n] for i, n in enumerate(lengths)])
    return [Finish(code).name for code in sequences.finish], texts, lengths.tolist()


def test_eos_stops_and_is_kept_as_a_token_but_not_as_text(tokenizer):
    assert feed(tokenizer, [[A, B, EOS, A], [A, A, A, A]]) == (["STOP", "NONE"], ["ab", "aaaa"], [3, 4])


def test_ignore_eos_ignores_the_models_ids_but_not_the_ones_asked_for(tokenizer):
    finish, texts, lengths = feed(tokenizer, [[A, EOS, B], [A, EOS, DOT, B]], ignore_eos=True, stop_token_ids=(DOT,))
    assert (finish, texts, lengths) == (["NONE", "STOP"], ["ab", "a"], [3, 3])


def test_every_stop_id_counts(tokenizer):
    finish, _, _ = feed(tokenizer, [[A, DOT], [A, NEWLINE], [A, EOS]], stop_token_ids=(DOT, NEWLINE))
    assert finish == ["STOP"] * 3


def test_stop_string_over_token_borders_cuts_the_text_and_keeps_the_tokens(tokenizer):
    rows = [[A, STO, P, B], [AB, NEWLINE, NEWLINE, B], [STO, A, P, B], [A, AB, A, B]]
    finish, texts, lengths = feed(tokenizer, rows, stop_strings=("STOP", "\n\n", "bab"))
    assert finish == ["STOP", "STOP", "NONE", "STOP"]
    assert texts == ["a", "ab", "STOaPb", "aa"]
    assert lengths == [3, 3, 4, 4]


def test_stop_string_inside_one_token_and_of_a_split_character(tokenizer):
    finish, texts, lengths = feed(tokenizer, [[B, STO, A], [A, C3, A9, B]], stop_strings=("TO", "é"))
    assert (finish, texts, lengths) == (["STOP", "STOP"], ["bS", "a"], [2, 3])


def test_the_prompt_takes_no_part_in_a_stop_string(tokenizer):
    assert feed(tokenizer, [[B, A]], stop_strings=("ab",))[0] == ["NONE"]  # the prompt ends in "a"


def test_stop_string_that_is_a_special_token_stops_by_its_id(tokenizer):
    assert feed(tokenizer, [[A, END, B]], stop_strings=("<|end|>",)) == (["STOP"], ["a"], [2])


def test_length_and_context_end_a_row_and_a_stop_there_is_a_stop(tokenizer):
    assert feed(tokenizer, [[A, A, A], [A, A, EOS]], max_new_tokens=3)[0] == ["LENGTH", "STOP"]


def test_non_finite_logprob_fails_its_row(tokenizer):
    rules = StopRules(SamplingParams(), set(), tokenizer, len(PIECES))
    sequences = Sequences([PROMPT] * 2, 1, 5, 100)
    rows = np.arange(2)
    sequences.append(rows, Draws(np.array([A, A]), np.array([-1.0, np.nan])))
    rules.mark_finished(sequences, rows)
    assert sequences.finish.tolist() == [Finish.NONE, Finish.FAILED]


def test_eos_ids_come_from_tokenizer_and_generation_config(tokenizer):
    assert collect_eos_ids(tokenizer, GenerationConfig(eos_token_id=[5, 6])) == {1, 5, 6}
    assert collect_eos_ids(tokenizer, GenerationConfig(eos_token_id=7)) == {1, 7}
    assert collect_eos_ids(tokenizer, GenerationConfig()) == {1}


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"stop_strings": ("a", "")}, "empty string"),
        ({"stop_token_ids": (5, 14)}, "^sampling.stop_token_ids holds 14, and the model has ids 0 to 13"),
    ],
)
def test_stops_that_could_never_be_honoured_are_refused(tokenizer, sampling, message):
    with pytest.raises(ConfigError, match=message):
        StopRules(SamplingParams(**sampling), set(), tokenizer, len(PIECES))
