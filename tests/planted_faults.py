"""Faults that training systems have really had, each with the test that turns red when it is planted in this one's source.

    python tests/planted_faults.py            # all of them, some minutes
    python tests/planted_faults.py 12 35      # those of these kinds
    python tests/planted_faults.py --table    # the table of docs/traps.md

Each fault is a small edit. It is made in a temporary copy of the project, its test runs there and must fail, and the edit is undone. The
kinds are those of `docs/traps.md`. `unit/test_traps.py` holds that every edit still finds its place, that every test is there, and that
the page shows this table.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("HYBRIDFLOW_DATA", ROOT.parent / "shared" / "data"))
LONGEST_S = 600.0
SLOW_IMPORTS = ("hypothesis", "numpy", "pyarrow", "torch", "transformers", "transformers.models.llama.modeling_llama")


@dataclass(frozen=True)
class Fault:
    """One edit: `old`, which stands once in `src/hybridflow/<file>`, becomes `new`, and `tests/<test>` turns red.

    kind: its number in docs/traps.md. told: what is wrong then, in a few words.
    """

    kind: int
    told: str
    file: str
    old: str
    new: str
    test: str

    @property
    def source(self) -> str:
        """The file's path below the project."""
        return f"src/hybridflow/{self.file}"


ENGINE, PACKING, LOSSES = "train_engine/engine.py", "train_engine/packing.py", "algorithms/losses.py"
UPDATE = "unit/test_train_engine_update.py::test_"
LOSS = "unit/test_algorithms_losses.py::test_"
KL = "unit/test_algorithms_kl.py::test_"
ADVANTAGES = "unit/test_algorithms_advantages.py::test_"
PREPARE = "unit/test_algorithms_prepare.py::test_"
PAPER = "unit/test_algorithms_policy_gradient.py::test_"
CHECKPOINT = "unit/test_checkpoint.py::test_"
CHAT, TOKENIZERS, LOADER = (f"unit/test_data_{name}.py::test_" for name in ("chat", "tokenizers", "loader"))
ROLLOUT = "unit/test_rollout_engine.py::test_"
STOPPING = "unit/test_rollout_stopping.py::test_"
REQUESTS = "unit/test_rollout_requests.py::test_"
COMPONENTS, POOL = "unit/test_rewards_components.py::test_", "unit/test_rewards_pool.py::test_"
LORA, LOADING = "unit/test_models_lora.py::test_", "unit/test_models_loading.py::test_"
TRAPS = "unit/test_traps.py::test_"
FACES, RUNS = "e2e/test_faces.py::test_", "e2e/test_runs.py::test_"

# fmt: off
FAULTS = (
    Fault(1, "each micro-batch is divided by its own weight", ENGINE,
          "loss_sum.total / totals.denominator", "loss_sum.total / loss_sum.weight",
          UPDATE + "float64_gradient_is_the_same_for_every_split"),
    Fault(1, "each micro-batch is divided by its own tokens, in supervised training too", "algorithms/losses.py",
          "    total = (weights_T.to(loss_T.dtype) * loss_T).sum()\n",
          "    total = (weights_T.to(loss_T.dtype) * loss_T).sum() / weights_T.sum()\n",
          UPDATE + "gradient_equals_the_one_of_single_rows_through_transformers"),
    Fault(3, "the denominator counts all tokens, the numerator those of the mask", ENGINE,
          "compute_denominator(counts, loss.normalization)", "compute_denominator(rows.lengths, loss.normalization)",
          UPDATE + "rows_that_are_not_ok_take_no_part_and_no_denominator"),
    Fault(3, "rows that a filter took out stay in the denominator", PACKING,
          'ok = batch.numpy("state") == RowState.OK', 'ok = batch.numpy("state") != RowState.EMPTY',
          UPDATE + "rows_that_are_not_ok_take_no_part_and_no_denominator"),
    Fault(3, "rows without a counted token count as sequences", LOSSES,
          "float(np.count_nonzero(lengths_S))", "float(lengths_S.size)",
          LOSS + "denominators_count_what_the_mask_counts"),
    Fault(3, "the dummy row that fills a pass is a row to the loss", PACKING,
          "        cu_seqlens=cu_seqlens,\n", "        cu_seqlens=_build_attention(segments, part.padding, axis).cu_seqlens,\n",
          "unit/test_train_engine_packing.py::test_a_micro_batch_without_rows_is_a_dummy_that_nothing_scores"),
    Fault(3, "a step without anything to count divides 0 by 0", ENGINE,
          "if not totals.denominator:", "if totals.denominator is None:",
          UPDATE + "nothing_to_count_skips_the_step"),
    Fault(6, "every token counts alike where every response is to", LOSSES,
          "return counts_T.double() / lengths_T.clamp(min=1)", "return counts_T.double()",
          LOSS + "token_mean_and_sequence_mean_weigh_lengths_as_they_say"),
    Fault(6, "every response counts alike where every token is to", LOSSES,
          "        return counts_T.double()\n", '        normalization = "sequence_mean"\n',
          LOSS + "token_mean_and_sequence_mean_weigh_lengths_as_they_say"),
    Fault(6, "a response is divided by its own length where a constant is to divide it", LOSSES,
          "loss_T / self.constant_tokens, counts_T,", "loss_T, weights_T,",
          LOSS + "a_constant_length_favours_no_length"),
    Fault(7, "k1 in the loss is differentiated as it stands", "algorithms/kl.py",
          "return _attach_slope(log_ratio_T, log_ratio_T, logprobs_T)", "return logprobs_T - reference_logprobs_T",
          KL + "values_and_gradients_are_those_of_the_exact_kl_of_32_words"),
    Fault(7, "k3 stands in the reward", "algorithms/prepare.py",
          "kl.coefficient * (ours - theirs)", "kl.coefficient * (np.expm1(theirs - ours) + ours - theirs)",
          PAPER + "each_paper_from_rewards_to_gradient_by_hand"),
    Fault(7, "the exponential of k3 overflows", "algorithms/kl.py",
          "torch.expm1(-log_ratio_T.clamp(min=-MAX_LOG_RATIO))", "torch.expm1(-log_ratio_T)",
          KL + "k3_holds_value_and_slope_where_the_exponential_would_overflow"),
    Fault(7, "the exponential of the ratio overflows", LOSSES,
          "ratio_T = log_ratio_T.clamp(max=MAX_LOG_RATIO).exp()\n        low_T", "ratio_T = log_ratio_T.exp()\n        low_T",
          LOSS + "a_huge_ratio_stays_finite_and_gets_no_gradient"),
    Fault(8, "the pass for old log-probabilities has other micro-batches than the update", ENGINE,
          "micro_batch_tokens=self.settings.micro_batch_tokens,\n                only_masked",
          "micro_batch_tokens=self.settings.micro_batch_tokens // 2,\n                only_masked",
          UPDATE + "lr_zero_keeps_weights_bit_equal_and_the_ratio_at_one"),
    Fault(8, "the update leaves the temperature out", ENGINE,
          "temperature=loss.temperature,", "temperature=1.0,",
          UPDATE + "lr_zero_keeps_weights_bit_equal_and_the_ratio_at_one"),
    Fault(8, "the temperature of sampling does not reach the loss", "algorithms/policy_gradient.py",
          "PolicyLoss(**terms, temperature=sampling.temperature", "PolicyLoss(**terms, temperature=1.0",
          PAPER + "temperature_is_that_of_the_sampling_and_above_zero"),
    Fault(8, "the rollout's log-probabilities are those before the temperature", "rollout/native/seats.py",
          "    return to_host(sample_tokens(logits_BV, uniforms_B, sampling.shaping, exact=head.exact))",
          "    drawn = sample_tokens(logits_BV, uniforms_B, sampling.shaping, exact=head.exact)\n"
          "    whole_BV = (logits_BV * sampling.temperature).log_softmax(-1)\n"
          "    return to_host(drawn._replace(logprobs=whole_BV.gather(1, drawn.tokens[:, None])[:, 0]))",
          ROLLOUT + "the_trainer_computes_the_very_same_logprobs_in_exact_mode"),
    Fault(8, "slots that pad a row are attended to while decoding", "models/attention_padded.py",
          "mask = _visible(query_positions, key_positions, window)", "mask = key_positions > query_positions - 10**6",
          ROLLOUT + "fast_mode_agrees_with_exact_mode_within_rounding"),
    Fault(8, "the filters of sampling do not reach the loss", "algorithms/policy_gradient.py",
          ", shaping=sampling.shaping)", ")",
          TRAPS + "the_loss_is_of_the_distribution_that_is_sampled_from"),
    Fault(8, "the update leaves top-p and the other filters of sampling out", ENGINE,
          "build_shaped(rows, packed, loss.shaping, device)", "build_shaped(rows, packed, UNSHAPED, device)",
          "unit/test_rollout_logprobs.py::test_the_first_update_after_a_rollout_has_a_ratio_of_one"),
    Fault(8, "the trainer asks the rules of the cut again, and rounding answers otherwise", "models/head_shaping.py",
          "return keep_most_likely(logits_CV, self.num_kept_M[chunk], targets_M[chunk])",
          "cut_CV = cut_logits(logits_CV, self.shaping)\n"
          "        return cut_CV.scatter(1, targets_M[chunk, None], logits_CV.gather(1, targets_M[chunk, None]))",
          "unit/test_rollout_logprobs.py::test_a_trainer_of_other_rounding_computes_no_jump_at_the_border"),
    Fault(8, "the trainer keeps one token more than the rollout", "models/head_shaping.py",
          "self.num_kept_M[chunk], targets_M[chunk])", "self.num_kept_M[chunk] + 1, targets_M[chunk])",
          "unit/test_rollout_logprobs.py::test_the_trainer_computes_what_the_rollout_records"),
    Fault(8, "the reference is cut as the draw was, and sees no policy collapse", "roles/reference.py",
          "self._sampling.shaping.uncut)", "self._sampling.shaping)",
          "e2e/test_algorithms_learn.py::test_the_kl_of_a_policy_of_one_token_is_what_the_reference_thinks_of_it"),
    Fault(8, "the policy without its adapter is cut as the draw was, where it is the reference", "roles/actor.py",
          "self._sampling.shaping.uncut)", "self._sampling.shaping)",
          "e2e/test_algorithms_learn.py::test_the_kl_of_a_policy_of_one_token_is_what_the_reference_thinks_of_it"),
    Fault(8, "a learning rate of 0 is taken for one that is not set", ENGINE,
          "self.settings.optimizer.lr, self.settings.schedule", "self.settings.optimizer.lr or 1e-6, self.settings.schedule",
          UPDATE + "lr_zero_keeps_weights_bit_equal_and_the_ratio_at_one"),
    Fault(9, "dropout is on in the update", ENGINE,
          "self.model.module.eval()", "self.model.module.train()",
          UPDATE + "dropout_never_wakes_up"),
    Fault(9, "dropout is on in the pass for log-probabilities", "train_engine/logprobs.py",
          "model.module.eval()", "model.module.train()",
          UPDATE + "dropout_never_wakes_up"),
    Fault(9, "the schedule moves with every micro-batch", ENGINE,
          "                self._pass(rows", "                self._steps_taken += 1\n                self._pass(rows",
          UPDATE + "the_schedule_moves_once_a_step_and_not_on_skipped_ones"),
    Fault(9, "the schedule moves with a skipped step", ENGINE,
          "        self.optimizer.discard_gradients()\n        self._skipped_in_a_row += 1",
          "        self.optimizer.discard_gradients()\n        self._steps_taken += 1\n        self._skipped_in_a_row += 1",
          UPDATE + "the_schedule_moves_once_a_step_and_not_on_skipped_ones"),
    Fault(10, "a tied weight is trained under both of its names", ENGINE,
          "model.module.named_parameters()}\n        self.optimizer",
          "model.module.named_parameters(remove_duplicate=False)}\n        self.optimizer",
          UPDATE + "a_tied_weight_is_trained_once"),
    Fault(10, "a tied weight is written under both of its names", "models/lora.py",
          "dict(model.module.named_parameters())\n    layers", "dict(model.module.named_parameters(remove_duplicate=False))\n    layers",
          LOADING + "save_and_load_are_inverse"),
    Fault(10, "a tied weight is not written", "models/loading.py",
          "for name, weight in parameters}\n    save_file", 'for name, weight in parameters if "embed" not in name}\n    save_file',
          LOADING + "save_and_load_are_inverse"),
    Fault(10, "a head that is tied stays behind when weights are sent", "rollout/base.py",
          "        own[name].copy_(weight)", '        if "embed" not in name:\n            own[name].copy_(weight)',
          TRAPS + "new_weights_take_the_place_of_every_old_one"),
    Fault(11, "the reward of an empty response lands on its neighbour's last token", "algorithms/prepare.py",
          "        return np.repeat(values_S, np.diff(self.offsets))",
          "        values_T = np.repeat(values_S, np.diff(self.offsets))\n"
          "        values_T[self.offsets[1:] - 1] = values_S\n        return values_T",
          PREPARE + "an_empty_response_gets_nothing_and_gives_nothing_to_its_neighbours"),
    Fault(11, "an empty response moves its siblings' baseline", "algorithms/prepare.py",
          "empty_S = ok_S & (lengths_S == 0)", "empty_S = ok_S & (lengths_S < 0)",
          PREPARE + "an_empty_response_gets_nothing_and_gives_nothing_to_its_neighbours"),
    Fault(12, "a failed sample is a reward of 0 in its siblings' baseline", "algorithms/advantages.py",
          "np.asarray(rewards_S, np.float64)[ok_S], index_S[ok_S]", "np.nan_to_num(np.asarray(rewards_S, np.float64)), index_S",
          ADVANTAGES + "a_row_that_is_not_ok_does_not_move_its_siblings"),
    Fault(12, "a rejected group takes part in a baseline", "algorithms/prepare.py",
          "ok_S = state_S == RowState.OK\n    advantages_S", "ok_S = scored_state_S == RowState.OK\n    advantages_S",
          PREPARE + "a_rejected_group_is_no_part_of_a_users_baseline"),
    Fault(12, "groups are taken as they come, not by their ids", "algorithms/advantages.py",
          "    rewards, index =", "    index_S = np.sort(index_S)\n    rewards, index =",
          ADVANTAGES + "interleaved_groups_are_told_apart_by_id"),
    Fault(12, "a partial group is divided by the size of a whole one", "algorithms/advantages.py",
          "divisor_P = np.maximum(count_P, 1)", "divisor_P = np.full_like(count_P, count_P.max(initial=1))",
          ADVANTAGES + "matches_the_loop_by_hand_for_interleaved_uneven_groups"),
    Fault(12, "a group without spread is divided by it", "algorithms/advantages.py",
          "EQUAL_REWARDS = 1e-6", "EQUAL_REWARDS = -1.0",
          ADVANTAGES + "equal_rewards_give_exact_zeros"),
    Fault(12, "rounding of equal rewards becomes a signal", "algorithms/advantages.py",
          "EQUAL_REWARDS = 1e-6", "EQUAL_REWARDS = 0.0",
          ADVANTAGES + "equal_rewards_give_exact_zeros"),
    Fault(12, "rounding of a batch of equal rewards becomes a signal", "algorithms/prepare.py",
          "is_flat = whole.std <= EQUAL_REWARDS * np.hypot(whole.mean, whole.std)", "is_flat = whole.std == 0.0",
          PAPER + "equal_rewards_over_the_whole_batch_are_no_signal"),
    Fault(14, "what a tool said is trained as the assistant's words", "data/messages.py",
          'if message["role"] == "assistant" and index]', 'if message["role"] in ("assistant", "tool") and index]',
          CHAT + "words_of_the_assistant_and_the_end_of_its_turn_are_trained_and_nothing_else"),
    Fault(14, "the prompt of an example is trained", "data/encode.py",
          "[0] * len(prompt) + [1] * len(response)", "[1] * (len(prompt) + len(response))",
          TOKENIZERS + "response_and_eos_are_trained_and_bos_comes_as_the_tokenizer_has_it"),
    Fault(14, "a token of the template is trained", "data/chat.py",
          "start, stop = len(before),", "start, stop = len(before) - 1,",
          CHAT + "words_of_the_assistant_and_the_end_of_its_turn_are_trained_and_nothing_else"),
    Fault(14, "the prompt of a rollout is trained", "rollout/base.py",
          "within >= np.repeat(prompt_lengths, lengths)", "within >= 0",
          TRAPS + "sampled_tokens_count_and_no_other"),
    Fault(14, "the end of an example is not trained", "data/encode.py",
          "else [*ids, self._eos_id] for", "else ids for",
          TOKENIZERS + "response_and_eos_are_trained_and_bos_comes_as_the_tokenizer_has_it"),
    Fault(14, "the end of a turn is not trained", "data/chat.py",
          "mask[start : stop + 1] = [1] * (stop + 1 - start)", "mask[start:stop] = [1] * (stop - start)",
          CHAT + "words_of_the_assistant_and_the_end_of_its_turn_are_trained_and_nothing_else"),
    Fault(14, "the end that was sampled is no token of its row", "rollout/native/engine.py",
          "ends, starts = rows.length[: rows.num_rows],", "ends, starts = rows.length[: rows.num_rows] - (rows.finish == Finish.STOP),",
          TRAPS + "an_end_that_was_sampled_is_kept_and_counts"),
    Fault(14, "what is the pad token is masked, and so is the end that is the same token", "data/encode.py",
          "[0] * len(prompt) + [1] * len(response)",
          "[0] * len(prompt) + [int(token != self._tokenizer.pad_token_id) for token in response]",
          TOKENIZERS + "eos_is_trained_where_it_is_the_pad_token_too"),
    Fault(14, "a text that brings its beginning gets a second one", "data/tokenizers.py",
          "ids if bos_id is None or ids[:1] == [bos_id] else", "ids if bos_id is None else",
          TOKENIZERS + "a_text_that_brings_its_own_bos_or_eos_gets_no_second_one"),
    Fault(14, "a chat whose template writes no beginning gets the tokenizer's", "data/encode.py",
          '(encode_prompts if self._layout == "text" else encode_texts)', "encode_prompts",
          CHAT + "the_prompt_of_a_rollout_is_the_beginning_of_the_example_that_is_learned"),
    Fault(15, "the last token is taken for an end that never came", "rollout/base.py",
          "(within >= np.repeat(prompt_lengths, lengths)).astype(np.uint8)",
          "((within >= np.repeat(prompt_lengths, lengths)) & (within < np.repeat(lengths - 1, lengths))).astype(np.uint8)",
          TRAPS + "sampled_tokens_count_and_no_other"),
    Fault(15, "of several ids that end a sequence the first alone does", "rollout/native/stopping.py",
          "value if isinstance(value, (list, tuple)) else [value] for", "value[:1] if isinstance(value, (list, tuple)) else [value] for",
          STOPPING + "eos_ids_come_from_tokenizer_and_generation_config"),
    Fault(15, "of several stop ids that are asked for the first alone stops", "rollout/native/stopping.py",
          "ids = set(sampling.stop_token_ids)", "ids = set(sampling.stop_token_ids[:1])",
          STOPPING + "every_stop_id_counts"),
    Fault(15, "a stop string is looked for in the newest token alone", "rollout/native/stopping.py",
          "sequences.length[rows] - self._window", "sequences.length[rows] - 1",
          STOPPING + "stop_string_over_token_borders_cuts_the_text_and_keeps_the_tokens"),
    Fault(16, "a verifier that hangs is waited for", "rewards/workers.py",
          'return (self._functions[name]["timeout_s"] or math.inf) + (', "return 3.0 + (",
          COMPONENTS + "a_component_that_fails_fails_its_row_by_name_and_no_other"),
    Fault(16, "a verifier that fails is a reward of 0", "rewards/pool.py",
          '            if value is None:\n                return None, f"{name}: {error}"',
          '            value = value or 0.0\n            if value is None:\n                return None, f"{name}: {error}"',
          COMPONENTS + "a_component_that_fails_fails_its_row_by_name_and_no_other"),
    Fault(16, "an error of the function is caught where it runs, and 0 given for it", "rewards/child.py",
          "        return None, _explain(error)\n\n\nasync", "        return 0.0, None\n\n\nasync",
          POOL + "a_bad_row_is_an_error_row_and_its_neighbours_are_scored"),
    Fault(16, "an error of an async function is caught where it runs, and 0 given for it", "rewards/child.py",
          'return None, f"no result within {timeout_s or 0.0:g} s" if limit.expired() else _explain(error)', "return 0.0, None",
          COMPONENTS + "an_async_function_that_raises_or_returns_no_number_is_an_error_row"),
    Fault(18, "rows of a pass attend to those before them", PACKING,
          "    cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))\n    wrap",
          "    cu_seqlens = torch.tensor([0, lengths.sum()], dtype=torch.int32)\n    lengths = lengths.sum(keepdims=True)\n    wrap",
          UPDATE + "a_change_in_one_row_moves_no_other_row"),
    Fault(18, "positions go on from one row of a pass to the next", PACKING,
          "positions_T=to_device(part.cut(torch.from_numpy(positions_T)), device)",
          "positions_T=to_device(part.cut(torch.arange(places_T.size)), device)",
          UPDATE + "exact_mode_log_prob_equals_the_training_forward_bit_for_bit"),
    Fault(18, "exact attention sees all rows as one", "models/attention_exact.py",
          "lambda rows, positions: starts[rows] + positions)", "lambda rows, positions: starts[rows * 0] + positions)",
          "unit/test_models_families.py::test_a_change_in_one_packed_row_moves_no_other"),
    Fault(18, "gradients of one row reach another's tokens", "models/attention_padded.py",
          "index_select(0, ctx.unpad_index), None, None", "index_select(0, ctx.unpad_index.roll(1)), None, None",
          "unit/test_models_families.py::test_no_gradient_leaks_between_packed_rows"),
    Fault(18, "rows that begin otherwise are given one beginning", "train_engine/segments.py",
          "alike.setdefault((trunk, tokens[start : start + trunk].tobytes()), [])", 'alike.setdefault((trunk, b""), [])',
          "unit/test_train_engine_segments.py::test_groups_hold_each_row_once_begin_alike_and_keep_to_the_budget"),
    Fault(19, "a pass that names no rows attends to all that it is given", "models/attention.py",
          "    if attention_pass is None:\n",
          "    if attention_pass is None:\n"
          "        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)\n"
          "        return out.transpose(1, 2), None\n    if attention_pass is None:\n",
          "unit/test_models_attention.py::test_the_module_alone_does_not_run_without_boundaries"),
    Fault(19, "layers that attend by another function are not noticed", "models/model.py",
          "if attention_pass.calls != self.num_layers and not self.layers_compiled:", "if attention_pass.calls > self.num_layers:",
          "unit/test_models_attention.py::test_a_shared_config_that_switches_attention_back_is_caught"),
    Fault(20, "weights of one dimension are skipped", "rollout/base.py",
          "        own[name].copy_(weight)", "        if weight.dim() > 1:\n            own[name].copy_(weight)",
          TRAPS + "new_weights_take_the_place_of_every_old_one"),
    Fault(20, "a family has a buffer that is saved and not sent", "models/loading.py",
          "    module.config.dtype = dtype\n", '    module.config.dtype = dtype\n    module.register_buffer("odd", torch.ones(1))\n',
          TRAPS + "parameters_are_all_that_a_sync_has_to_send"),
    Fault(20, "a weight that did not come is not missed", "rollout/base.py",
          "odd = sorted(self._came ^ self._shapes.keys())", "odd = sorted(self._came - self._shapes.keys())",
          REQUESTS + "only_what_fits_passes_and_all_else_is_named"),
    Fault(20, "an adapter is never sent after the first rollout", "roles/actor.py",
          "        if self._separate is not None:\n            self._weights =",
          "        if self._separate is not None and self._weights is None:\n            self._weights =",
          "unit/test_roles_adapter.py::test_generators_follow_the_trainer_and_are_sent_what_the_form_says"),
    Fault(20, "an adapter is left out of the weights that are sent", "models/lora.py",
          "        if name in layers:\n            prefix", "        if name in layers and read is Parameter.detach:\n            prefix",
          "unit/test_roles_adapter.py::test_generators_follow_the_trainer_and_are_sent_what_the_form_says"),
    Fault(20, "a quantised model is taken, with whatever its list of exceptions leaves out", "models/families.py",
          'if settings.get("quantization_config") is not None:', 'if settings.get("quantization_config") == {}:',
          LOADING + "models_we_would_compute_wrongly_are_refused"),
    Fault(20, "a rollout that is far from its trainer goes on", "weights/probe.py",
          "    if not result.passed:", "    if result.num_tokens < 0:",
          "unit/test_weights_probe.py::test_a_result_names_the_worst_token_and_counts_only_scored_ones"),
    Fault(21, "states of a prompt outlive the weights that they were computed with", "rollout/native/engine.py",
          "        hidden_TD = self._compute_states(job, step)\n",
          '        kept = vars(self).setdefault("_kept", {})\n'
          "        hidden_TD = kept.setdefault(job.sequences.tokens[step.sequences].tobytes(), self._compute_states(job, step))\n",
          ROLLOUT + "it_runs_on_the_trainers_weights_and_leaves_the_module_as_it_was"),
    Fault(21, "weights move to other addresses, and what was captured reads the old ones", "train_engine/optimizer.py",
          "local_part(self.live).copy_(master, non_blocking=True)", "self.live.data = master.to(self.live.dtype)",
          UPDATE + "bfloat16_on_the_cpu_trains_through_masters_at_fixed_addresses"),
    Fault(21, "weights that lie side by side for generation are copies", "rollout/native/layers.py",
          "        parameter.data = part\n", "        parameter.data = part.clone()\n",
          "unit/test_rollout_layers.py::test_joined_parameters_are_views_of_one_storage_and_the_same_objects"),
    Fault(22, "new weights are taken while rows are generated", "rollout/native/engine.py",
          'with self._turns.take("load_weights"):', "with contextlib.nullcontext():",
          ROLLOUT + "generation_refuses_company"),
    Fault(23, "an adapter is merged without its scale", "models/lora.py",
          "lora_A.to(wide), alpha=scale)", "lora_A.to(wide))",
          LORA + "a_merged_copy_is_the_adapted_model"),
    Fault(23, "an adapter's update is rounded before it is added", "models/lora.py",
          "matrix.addmm_(lora_B.to(wide), lora_A.to(wide), alpha=scale)",
          "matrix.add_(scale * (lora_B.to(base.dtype) @ lora_A.to(base.dtype)))",
          LORA + "bfloat16_is_merged_in_float32_and_rounded_once"),
    Fault(24, "members of a group are drawn alike", "rollout/native/draws.py",
          "        sample_ids_S.astype(np.uint64),\n", "        np.zeros(len(sample_ids_S), np.uint64),\n",
          "unit/test_rollout_draws.py::test_each_part_of_the_key_gives_an_even_unrelated_stream"),
    Fault(24, "prompts are drawn by their place in the call, alike on every replica", "rollout/native/engine.py",
          'np.repeat(prompts.numpy("group_id"), samples)', "np.repeat(np.arange(prompts.num_rows), samples)",
          ROLLOUT + "the_company_of_other_prompts_and_samples_changes_no_bit_in_exact_mode"),
    Fault(24, "rows are in the order in which they were done", "rollout/requests.py",
          "rows = [samples.get(row, Sample()) for row in range(len(prompts))]",
          "rows = [*samples.values(), *(Sample() for row in range(len(prompts)) if row not in samples)]",
          REQUESTS + "answers_become_rows_and_each_failure_says_why"),
    Fault(24, "sums of metrics depend on which part came first", "types.py",
          "math.fsum(m.value * m.weight for m in metrics if m.weight)", "sum(m.value * m.weight for m in metrics if m.weight)",
          "unit/test_types.py::test_the_order_of_parts_changes_no_bit"),
    Fault(25, "an engine that sleeps keeps its cache", "rollout/native/engine.py",
          "            self._turns.asleep = True\n            self._free_cache()\n", "            self._turns.asleep = True\n",
          ROLLOUT + "sleep_frees_the_cache"),
    Fault(26, "a run that stopped at an epoch's border has no more to do", "data/loader.py",
          "return self._stream.order.epoch == self._stream.order.epochs",
          "return bool(self._stream.order.epoch) and not self._stream.order.position",
          RUNS + "sft_stopped_and_resumed_equals_undisturbed"),
    Fault(26, "a resumed run repeats the epoch from its start", "data/stream.py",
          'self.order.move_to(state["epoch"], state["position"])', 'self.order.move_to(state["epoch"], 0)',
          LOADER + "a_resumed_run_is_the_run"),
    Fault(26, "the order of a resumed run begins again", "data/stream.py",
          'self.order.move_to(state["epoch"], state["position"])', "self.order.move_to(0, 0)",
          LOADER + "resume_at_the_border_of_an_epoch_starts_the_next"),
    Fault(26, "groups of a resumed run are numbered, and drawn, from 0 again", "data/stream.py",
          'self.num_taken, self.counts = state["num_taken"],', "self.num_taken, self.counts = 0,",
          LOADER + "a_resumed_run_is_the_run"),
    Fault(26, "the optimizer's step is counted twice over a resume", ENGINE,
          'self._steps_taken = int(state["steps_taken"])', 'self._steps_taken = int(state["steps_taken"]) + 1',
          UPDATE + "steps_equal_fewer_steps_stop_resume_and_the_rest_bit_for_bit"),
    Fault(26, "the run's step is counted twice over a resume", "flow/job.py",
          "        return checkpoint.step\n", "        return checkpoint.step + 1\n",
          "unit/test_flow_job.py::test_a_run_that_goes_on"),
    Fault(27, "a checkpoint is never marked as the latest", "checkpoint/writer.py",
          "sequence = 1 + max((manifest.sequence for _, manifest in earlier), default=0)", "sequence = 1",
          CHECKPOINT + "the_last_one_written_is_the_newest"),
    Fault(27, "a run whose checkpoints cannot be read begins anew over them", "checkpoint/reader.py",
          "    if damaged:\n        raise CheckpointError", "    if damaged and not readable:\n        raise CheckpointError",
          CHECKPOINT + "where_all_are_damaged_nothing_starts_anew"),
    Fault(27, "a run that is not to go on writes over the one of its name", "flow/job.py",
          'if mode != "auto" and run.checkpoints.is_dir()', 'if mode == "path" and run.checkpoints.is_dir()',
          FACES + "a_used_name_is_not_written_over"),
    Fault(27, "whole old checkpoints go for new ones that are not whole", "checkpoint/writer.py",
          "complete = [found for found in readable if find_damage(*found, checksums=False) is None]", "complete = readable",
          CHECKPOINT + "old_ones_go_only_for_whole_new_ones"),
    Fault(27, "the checkpoint of a step goes before its successor has its name", "checkpoint/writer.py",
          "            self._final.rename(replaced)\n", "            _remove(self._final)\n",
          CHECKPOINT + "killed_before_any_call_that_touches_the_disk"),
    Fault(27, "a checkpoint has its name before it is whole", "checkpoint/writer.py",
          'self._directory = self._root / f".writing-{self._final.name}"', "self._directory = self._final",
          CHECKPOINT + "an_error_while_saving_leaves_nothing"),
    Fault(27, "a checkpoint has its name before it is on disk", "checkpoint/writer.py",
          "        _flush(self._directory / MANIFEST)\n", "",
          CHECKPOINT + "everything_is_flushed_before_the_rename"),
    Fault(28, "the place in the schedule is not saved", ENGINE,
          'counts = {"steps_taken": self._steps_taken,', 'counts = {"steps_taken": 0,',
          UPDATE + "steps_equal_fewer_steps_stop_resume_and_the_rest_bit_for_bit"),
    Fault(28, "the state of the random generator is not taken up", ENGINE,
          'torch.set_rng_state(ours["rng/cpu"])', "torch.get_rng_state()",
          UPDATE + "steps_equal_fewer_steps_stop_resume_and_the_rest_bit_for_bit"),
    Fault(28, "a moment of the optimizer is not saved", "train_engine/optimizer.py",
          '            tensors[f"exp_avg_sq/{name}"] = weight.exp_avg_sq\n', "",
          UPDATE + "steps_equal_fewer_steps_stop_resume_and_the_rest_bit_for_bit"),
    Fault(28, "the optimizer's own step counts are not taken up", "train_engine/optimizer.py",
          "            weight.num_steps.copy_(step)\n", "            step.clone()\n",
          UPDATE + "steps_equal_fewer_steps_stop_resume_and_the_rest_bit_for_bit"),
    Fault(28, "live weights stay behind the masters that were taken up", ENGINE,
          "        self.optimizer.round_masters()\n", "",
          UPDATE + "steps_equal_fewer_steps_stop_resume_and_the_rest_bit_for_bit"),
    Fault(28, "how many steps in a row failed is forgotten", ENGINE,
          'self._skipped_in_a_row = int(state["skipped_in_a_row"])', "self._skipped_in_a_row = 0",
          UPDATE + "steps_equal_fewer_steps_stop_resume_and_the_rest_bit_for_bit"),
    Fault(28, "how many steps in a row had failed rows alone is forgotten", "roles/actor_worker.py",
          'self._failures.failed_steps = state["version"], state["failed_steps"]', 'self._failures.failed_steps = state["version"], 0',
          TRAPS + "steps_of_failed_rows_are_counted_over_a_resume"),
    Fault(28, "the version of the weights begins again", "roles/actor_worker.py",
          'self._failures.failed_steps = state["version"], state["failed_steps"]', 'self._failures.failed_steps = 0, state["failed_steps"]',
          RUNS + "rl_stopped_and_resumed_equals_undisturbed"),
    Fault(28, "the last evaluation, which may have ended the run, is forgotten", "flow/job.py",
          'self._last_evaluation = checkpoint.state["last_evaluation"]', "self._last_evaluation = None",
          FACES + "a_run_that_reached_its_goal_goes_on_when_the_goal_is_raised"),
    Fault(29, "each rank takes up the part of the first", "checkpoint/reader.py",
          "reader.read(name, saved[name], box.offsets, box.shape)", "reader.read(name, saved[name], (0,) * len(box.shape), box.shape)",
          CHECKPOINT + "any_layout_is_read_into_any_other"),
    Fault(30, "an export is without some weights", "checkpoint/reader.py",
          "                if name.startswith(prefix)\n", '                if name.startswith(prefix) and "mlp" not in name\n',
          CHECKPOINT + "an_export_is_read_by_transformers"),
    Fault(30, "an export has the optimizer's numbers for weights", "checkpoint/export.py",
          "masters = checkpoint.load_tensors(role, WEIGHTS)",
          "masters = {name: weight * 0 for name, weight in checkpoint.load_tensors(role, WEIGHTS).items()}",
          RUNS + "export_gives_transformers_the_same_logits"),
    Fault(30, "a weight is exported twice", "models/lora.py",
          "dict(model.module.named_parameters())\n    layers", "dict(model.module.named_parameters(remove_duplicate=False))\n    layers",
          RUNS + "export_gives_transformers_the_same_logits"),
    Fault(30, "a saved model is without its adapter", "models/lora.py",
          "        if name in layers:\n            prefix", '        if name in layers and name == "":\n            prefix',
          LORA + "a_saved_model_is_the_merged_one"),
    Fault(30, "an export is merged with another scale", "checkpoint/export.py",
          "    scale, checksum = trained\n", "    scale, checksum = 1.0, trained[1]\n",
          CHECKPOINT + "an_adapter_is_exported_merged_into_its_own_base"),
    Fault(31, "an evaluation drops the rows that fill no batch", "data/loader.py",
          "rows = pool.take(max_rows or pool.num_rows)", "rows = pool.take((max_rows or pool.num_rows) // 4 * 4)",
          LOADER + "prompts_are_read_all_or_the_first_ones_after_texts"),
    Fault(31, "an evaluation repeats rows to fill the last batch", "data/loader.py",
          "shuffle=False, epochs=1), tokenizer)\n    rows = pool.take(max_rows or pool.num_rows)",
          "shuffle=False, epochs=None), tokenizer)\n    rows = pool.take(-(-(max_rows or pool.num_rows) // 4) * 4)",
          LOADER + "prompts_are_read_all_or_the_first_ones_after_texts"),
    Fault(31, "an evaluation of failed rows alone is a number", "flow/evaluation.py",
          "if summary.num_failed == summary.num_rows:", "if summary.num_rows == 0:",
          FACES + "a_run_whose_rows_all_fail_stops_and_says_why"),
    Fault(31, "an evaluation leaves failed rows out of its mean", "roles/reward_model.py",
          "float(np.where(failed, 0.0, rewards).mean())", "float(np.nanmean(rewards))",
          TRAPS + "a_failed_row_is_a_0_of_an_evaluation"),
    Fault(31, "an evaluation without rows is NaN", "roles/reward_model.py",
          "rewards).mean()) if batch.num_rows else 0.0", "rewards).mean())",
          TRAPS + "a_failed_row_is_a_0_of_an_evaluation"),
    Fault(31, "a run that failed ends with exit code 0", "cli/main.py",
          "        return 1\n    return 0\n", "    return 0\n",
          FACES + "a_run_whose_rows_all_fail_stops_and_says_why"),
    Fault(31, "means over no row are NaN", "algorithms/prepare.py",
          "    if present_P.any():\n", "    if present_P.size:\n",
          PREPARE + "nothing_ok_leaves_means_out_instead_of_nan"),
    Fault(33, "a misspelt key is ignored", "config/settings.py",
          'extra="forbid"', 'extra="ignore"',
          "unit/test_config_mutations.py::test_each_wrong_configuration_is_one_sentence"),
    Fault(33, "a setting of the loss is read and dropped", "algorithms/policy_gradient.py",
          "for field in fields(PolicyLossSettings)}", 'for field in fields(PolicyLossSettings) if field.name != "clip_dual"}',
          PAPER + "every_setting_of_the_loss_arrives_in_it"),
    Fault(33, "a setting of an evaluation is there and not read", "flow/evaluation.py",
          "max_rows=settings.max_prompts)", "max_rows=0)",
          TRAPS + "every_setting_is_read_somewhere"),
    Fault(33, "a default differs from that of the shipped configuration", "algorithms/policy_gradient.py",
          '= "group_mean"\n', '= "leave_one_out"\n',
          PAPER + "the_defaults_are_those_of_grpo_and_each_paper_has_a_file"),
    Fault(33, "a pattern of what is trained matches nothing, and nothing is said", "models/lora.py",
          "        if not any(name == target or name.endswith", "        if not linear and not any(name == target or name.endswith",
          LORA + "targets_that_match_nothing_we_adapt_are_refused_with_the_names_there_are"),
    Fault(34, "a batch that does not divide by its updates is refused", "roles/shares.py",
          "    if updates < 1:\n", "    if updates < 1 or group_ids_S.size % updates:\n",
          "unit/test_roles_shares.py::test_each_row_is_trained_in_the_update_of_the_whole_batch"),
    Fault(34, "what is left of a batch after equal updates is dropped", "roles/shares.py",
          "np.arange(updates + 1) * group_ids_S.size / updates", "np.arange(updates + 1) * (group_ids_S.size // updates)",
          "unit/test_roles_shares.py::test_one_rank_gets_all_chunks_in_order_and_the_rows_of_one_process"),
    Fault(35, "metrics reduce by what their names suggest", "types.py",
          "    (way,) = ways\n", '    way = Reduce.MAX if name.endswith("max") else Reduce.MEAN\n',
          "unit/test_types.py::test_each_metric_reduces_as_it_says"),
    Fault(35, "means merge without their weights", "types.py",
          "math.fsum(m.value * m.weight for m in metrics if m.weight) / weight if weight",
          "math.fsum(m.value for m in metrics if m.weight) / len(metrics) if weight",
          "unit/test_types.py::test_each_metric_reduces_as_it_says"),
    Fault(35, "the logged loss grows with the number of micro-batches", "train_engine/loss_totals.py",
          "sum(value for value, _ in pairs) / weight if weight", "sum(value / part for value, part in pairs if part) if weight",
          UPDATE + "metrics_are_the_same_for_every_split"),
)
# fmt: on


def read_table(faults: tuple[Fault, ...] = FAULTS) -> str:
    """The faults as a Markdown table, in the order of kinds."""
    rows = [f"| {fault.kind} | {fault.told} | `{fault.file}` | `{fault.test}` |" for fault in faults]
    return "\n".join(["| kind | planted: | in | turns red |", "|---|---|---|---|", *rows]) + "\n"


def copy_project(directory: Path) -> Path:
    """The project without what is built, hidden or cached."""
    copy = directory / "project"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "*.egg-info")
    )
    return copy


def plant(copy: Path, fault: Fault) -> tuple[int | None, str]:
    """Pytest's exit status with the fault in the copy, which is as before afterwards, and what it said; None where it came to no end."""
    path = copy / fault.source
    right = path.read_text()
    if right.count(fault.old) != 1:
        return None, f"'{fault.old.strip()}' stands {right.count(fault.old)} times in {fault.source}; correct the table"
    path.write_text(right.replace(fault.old, fault.new))
    try:
        return run_test(copy, fault.test)
    finally:
        path.write_text(right)


def run_test(copy: Path, test: str) -> tuple[int | None, str]:
    """The same of one test, in a process forked from this one, which has the slow imports behind it and nothing of the project."""
    with tempfile.TemporaryFile("w+") as said:
        process = multiprocessing.get_context("fork").Process(target=call_pytest, args=(copy, test, said.fileno()))
        process.start()
        process.join(LONGEST_S)
        if process.is_alive():
            process.kill()
            process.join()
            return None, f"no end within {LONGEST_S:.0f} s"
        said.seek(0)
        return process.exitcode, said.read()


def call_pytest(copy: Path, test: str, output: int) -> None:
    """Ends this process with pytest's exit status; what it says goes to the file."""
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy / "src"), "HYBRIDFLOW_DATA": str(DATA), "COLUMNS": "400"}
    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--timeout=0", str(copy / "tests" / test)]))


def main(words: list[str]) -> int:
    """1 where a fault left its test green, or could not be planted."""
    if words == ["--table"]:
        print(read_table(), end="")
        return 0
    # No compiled files: two edits within a second may have one size, and the second would not be seen.
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    for package in SLOW_IMPORTS:
        importlib.import_module(package)
    chosen = [fault for fault in FAULTS if not words or str(fault.kind) in words]
    with tempfile.TemporaryDirectory() as directory:
        copy = copy_project(Path(directory))
        are_red = [tell(fault, *plant(copy, fault)) for fault in chosen]
    print(f"{sum(are_red)} of {len(chosen)} faults turned their test red")
    return int(not all(are_red))


def tell(fault: Fault, status: int | None, said: str) -> bool:
    """Prints what came of a fault; whether its test failed, which status 1 alone means, but for one that only took too long."""
    lines = said.strip().splitlines()
    reason = next((line.partition(" - ")[2] for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    is_red = status == 1 and "from pytest-timeout" not in reason
    print(f"{'red  ' if is_red else 'GREEN'} {fault.kind:2} {fault.told} ({fault.test})", flush=True)
    for line in [reason] if is_red else lines[-5:]:
        print(f"         {line[:200]}", flush=True)
    return is_red


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
