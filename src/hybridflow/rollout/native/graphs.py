"""Decoding on a GPU: each step one captured CUDA graph, rows' state on the device, and a host that reads what came out later.

Dimensions: B seats of a graph, C seats in all, S steps of a window, W blocks of a table, V vocabulary, D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor, nn

from hybridflow.models import BLOCK_SIZE, LanguageModel, PagedKVCache, penalize_repetition
from hybridflow.models.attention import AttentionForm, layer_index
from hybridflow.models.head_passes import scale_logits
from hybridflow.rollout.native.draws import compute_uniforms
from hybridflow.rollout.native.layers import FusedLayers
from hybridflow.rollout.native.parallel import TensorGroup, can_draw, compute_raw_logits
from hybridflow.rollout.native.sampler import Drawn, sample_tokens
from hybridflow.rollout.native.seats import Seats
from hybridflow.rollout.native.sequences import Draws
from hybridflow.types import UNSHAPED, SamplingParams, Shaping

# Some 10 ms at the smallest models: time enough for the host to book a window, and the end of a row is seen no more than two of them late.
_MAX_STEPS = 8
_LEAST_SEATS, _LEAST_BLOCKS = 8, 32
# Rows that have ended cost a graph little but for its matrix products; a new seating costs the device a few milliseconds of waiting.
_WAITING_SHARE = 8
# About twenty sizes for each way of sampling, and a run has two or three ways.
_MAX_GRAPHS = 64


def can_capture(model: LanguageModel) -> bool:
    """Whether steps can run as graphs: on a GPU with Triton, in fast numerics, with logits of the whole vocabulary."""
    return (
        model.device.type == "cuda"
        and model.numerics == "fast"
        and can_draw(model)
        and model.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and find_spec("triton") is not None
    )


def round_seats(count: int) -> int:
    """Seats of the graph that serves so many rows: 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, ..."""
    power = _round_to_power(count, _LEAST_SEATS)
    between = power * 3 // 4
    return between if count <= between and power > _LEAST_SEATS else power


@dataclass(frozen=True)
class _Form:
    """What a captured step depends on beside its sizes."""

    temperature: float
    shaping: Shaping

    @property
    def cuts(self) -> bool:
        """Whether some tokens cannot be drawn, and how many can is told."""
        return self.shaping.cuts and self.temperature > 0


@dataclass
class _State:
    """Rows' state at fixed addresses; each field [C] but for tables [C, W], outputs [S, C], the step's own number [1] and `seen`.

    seen:     [C, V] bool, which tokens each row holds; None until a way of sampling looks back.
    out_num_kept: [S, C] int32, among how many tokens each was drawn; None until a way of sampling cuts.
    """

    tokens: Tensor
    lengths: Tensor
    limits: Tensor
    live: Tensor
    keys: Tensor
    tables: Tensor
    positions: Tensor
    slots: Tensor
    contexts: Tensor
    out_tokens: Tensor
    out_logprobs: Tensor
    step: Tensor
    seen: Tensor | None = None
    out_num_kept: Tensor | None = None

    @classmethod
    def build(cls, num_seats: int, num_blocks: int, device: torch.device) -> _State:
        """For so many seats with tables of so many blocks."""
        long, short = (torch.zeros(num_seats, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
        outputs = torch.zeros((_MAX_STEPS, num_seats), device=device)
        return cls(
            tokens=long.clone(), lengths=short.clone(), limits=short.clone(), live=short.clone(), keys=long.clone(),
            tables=torch.zeros((num_seats, num_blocks), dtype=torch.int32, device=device), positions=long.clone(),
            slots=long.clone(), contexts=short.clone(), out_tokens=outputs.int(), out_logprobs=outputs,
            step=torch.zeros(1, dtype=torch.int32, device=device),
        )  # fmt: skip


class GraphWindow:
    """Steps under way on the device, and their outputs on the way to the host.

    outputs: tokens, log-probabilities and, where sampling cuts, the counts of tokens kept, [S, B] each.
    group:   ranks that the device waits for in each step; one that is gone would never let it end.
    """

    def __init__(self, steps: int, outputs: Sequence[Tensor], group: TensorGroup | None = None) -> None:
        self.steps, self._group = steps, group
        self._outputs = [_to_host(part) for part in outputs]
        self._done = torch.cuda.Event()
        self._done.record()

    def read(self) -> Draws:
        """See `Window`."""
        if self._group is None:
            self._done.synchronize()
        else:
            self._group.wait(self._done)
        return Draws(*(part.numpy() for part in self._outputs))


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class GraphDecoder:
    """Decodes by replaying graphs, captured once for each number of seats and way of sampling; implements `Decoder`.

    Graphs read weights, cache and state where these lie: they stay valid when weights are written in place, and are captured anew when the
    cache or the tables move. One slot of the cache, `idle_slot`, takes what seats without a row write.
    """

    max_steps, ahead = _MAX_STEPS, True

    def __init__(self, model: LanguageModel, fused: FusedLayers | None, group: TensorGroup | None = None) -> None:
        self._model, self._fused, self._group = model, fused, group
        self._cache: PagedKVCache | None = None
        self._idle_slot = 0
        self._state: _State | None = None
        self._graphs: dict[tuple[int, _Form], torch.cuda.CUDAGraph] = {}
        # Graphs run one after another, so that all take their memory from one pool; and each stream has a workspace for products.
        self._pool = torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream(model.device)
        self._form = _Form(1.0, UNSHAPED)
        self._is_stop_V = torch.zeros(model.vocab_size, dtype=torch.int32, device=model.device)
        self._num_seats = 0

    def prepare(
        self,
        cache: PagedKVCache,
        idle_slot: int,
        sampling: SamplingParams,
        stop_ids: np.ndarray,
        *,
        most_seats: int,
        longest: int,
    ) -> None:
        """Before a `generate` call: where keys and values go, how tokens are drawn and which of them end a row.

        stop_ids:   [n] int64, tokens that end a row.
        most_seats: rows of this call that decode at a time, at most.
        longest:    tokens of its longest row, at most.
        """
        seats, blocks = round_seats(most_seats), _round_to_power(-(-longest // BLOCK_SIZE), _LEAST_BLOCKS)
        moved = self._fused is not None and self._fused.reach(longest)
        state = self._state
        # Attention launches programs for all that a table can hold, so one far too wide is built anew as well.
        fits = state is not None and state.tables.shape[0] >= seats and blocks <= state.tables.shape[1] <= 4 * blocks
        if moved or not fits or cache is not self._cache:
            self._graphs.clear()
            if not fits:
                self._state = _State.build(seats, blocks, self._model.device)
        self._cache, self._idle_slot = cache, idle_slot
        self._form = _Form(sampling.temperature, sampling.shaping)
        state = self._get_state()
        if self.looks_back and state.seen is None:
            state.seen = torch.zeros(
                (len(state.tokens), len(self._is_stop_V)), dtype=torch.bool, device=state.tokens.device
            )
        if self._form.cuts and state.out_num_kept is None:
            state.out_num_kept = torch.zeros_like(state.out_tokens)
        self._is_stop_V.zero_()
        self._is_stop_V[torch.from_numpy(stop_ids).to(self._model.device)] = 1

    @property
    def looks_back(self) -> bool:
        """See `Decoder`."""
        return self._form.shaping.repetition_penalty != 1.0

    def release(self) -> None:
        """Gives back all memory on the device but that of the weights; `prepare` takes it again."""
        self._graphs.clear()
        # A pool of graphs that are gone takes no new ones while a tensor of theirs lives.
        self._pool = torch.cuda.graph_pool_handle()
        self._cache = self._state = None

    def seat(self, seats: Seats) -> None:
        """See `Decoder`."""
        state = self._get_state()
        count = len(seats.tokens)
        self._num_seats = round_seats(count)
        state.live.zero_()
        for held, values in (
            (state.tokens, seats.tokens),
            (state.lengths, seats.lengths.astype(np.int32)),
            (state.limits, seats.limits.astype(np.int32)),
            (state.keys, seats.keys),
            (state.live, np.ones(count, np.int32)),
        ):
            held[:count].copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)
        if seats.known is not None:
            known_BL = torch.from_numpy(seats.known).pin_memory().to(self._model.device, non_blocking=True)
            self._get_seen(count).zero_().scatter_(1, known_BL, True)

    def launch(self, steps: int, block_tables: np.ndarray) -> GraphWindow:
        """See `Decoder`."""
        state = self._get_state()
        count, width = block_tables.shape
        width = min(width, state.tables.shape[1])
        state.tables[:count, :width].copy_(
            torch.from_numpy(np.ascontiguousarray(block_tables[:, :width])).pin_memory(), non_blocking=True
        )
        state.step.zero_()
        graph = self._find_graph()
        for _ in range(steps):
            graph.replay()
        outputs = [state.out_tokens, state.out_logprobs]
        if self._form.cuts:
            outputs.append(self._get_num_kept(count))
        return GraphWindow(steps, [output[:steps, :count] for output in outputs], self._group)

    def stop(self, seats: np.ndarray) -> None:
        """See `Decoder`."""
        if len(seats):
            self._get_state().live[torch.from_numpy(seats).pin_memory().to(self._model.device, non_blocking=True)] = 0

    def is_worth_seating(self, seated: int, live: int, waiting: int) -> bool:
        """See `Decoder`."""
        if waiting and seated - live >= max(1, seated // _WAITING_SHARE):
            return True
        return round_seats(live) < round_seats(seated)

    def _get_state(self) -> _State:
        assert self._state is not None, "prepare() comes first"
        return self._state

    def _get_seen(self, count: int) -> Tensor:
        seen_CV = self._get_state().seen
        assert seen_CV is not None, "prepare() makes it where sampling looks back"
        return seen_CV[:count]

    def _get_num_kept(self, count: int) -> Tensor:
        num_kept_SC = self._get_state().out_num_kept
        assert num_kept_SC is not None, "prepare() makes it where sampling cuts"
        return num_kept_SC[:, :count]

    def _find_graph(self) -> torch.cuda.CUDAGraph:
        key = (self._num_seats, self._form)
        if key not in self._graphs:
            if len(self._graphs) >= _MAX_GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[key] = self._capture()
        return self._graphs[key]

    def _capture(self) -> torch.cuda.CUDAGraph:
        """A graph of one step. The runs that warm up leave the rows' state as it was: every seat idles."""
        state = self._get_state()
        live = state.live.clone()
        state.live.zero_()
        now = torch.cuda.current_stream(self._model.device)
        self._beside.wait_stream(now)
        with torch.cuda.stream(self._beside):
            for _ in range(2):
                self._step()
        now.wait_stream(self._beside)
        graph = torch.cuda.CUDAGraph()
        # Another thread looks after the collectives of a group, and may ask the device about them meanwhile.
        mode = "global" if self._group is None else "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._beside, capture_error_mode=mode):
            self._step()
        state.live.copy_(live)
        state.step.zero_()
        return graph

    def _step(self) -> None:
        from hybridflow.rollout.native.kernels import advance

        state, count = self._get_state(), self._num_seats
        advance.prepare_step(state, count, self._idle_slot)
        hidden_BD = self._compute_hidden(count)
        seen_BV = self._get_seen(count) if self.looks_back else None
        drawn = draw_on_device(
            self._model, hidden_BD, state.keys[:count], state.lengths[:count], self._form.temperature,
            self._form.shaping, seen_BV,
        )  # fmt: skip
        if drawn.num_kept is not None:
            # Before the step is counted.
            self._get_num_kept(count).index_copy_(0, state.step.long(), drawn.num_kept[None].int())
        advance.finish_step(state, count, drawn.tokens, drawn.logprobs, self._is_stop_V)
        if seen_BV is not None:
            # Of an idle seat this is the token that it had, so that the runs that warm up change nothing.
            seen_BV.scatter_(1, state.tokens[:count, None], True)

    def _compute_hidden(self, count: int) -> Tensor:
        state, cache = self._get_state(), self._cache
        assert cache is not None
        tokens_B, positions_B = state.tokens[:count], state.positions[:count]
        where = (state.slots[:count], state.tables[:count], state.contexts[:count])
        if self._fused is not None:
            return self._fused.decode_states(tokens_B, positions_B, *where, cache)
        return self._model.planned_states(tokens_B, positions_B, _CachedAttention(cache, *where))


@dataclass(frozen=True)
class _CachedAttention:
    """One new token a seat against the cache; an attention plan for modules that do not store keys and values themselves."""

    cache: PagedKVCache
    slots_B: Tensor
    tables_BW: Tensor
    contexts_B: Tensor

    def attend(
        self, module: nn.Module, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, form: AttentionForm
    ) -> Tensor:
        """Stores keys and values, then attends."""
        layer = layer_index(module)
        self.cache.write(layer, self.slots_B, key_TNK, value_TNK)
        return self.attend_stored(layer, module, query_THK, None, None, form)

    def attend_stored(
        self,
        layer: int,
        module: nn.Module,
        query_BHK: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        form: AttentionForm,
    ) -> Tensor:
        """Attends to what is stored."""
        from hybridflow.rollout.native import kernels

        return kernels.decode_attention(
            query_BHK, self.cache.keys[layer], self.cache.values[layer], self.tables_BW, self.contexts_B,
            scale=form.scale, window=form.window, softcap=form.softcap,
        )  # fmt: skip


def draw_on_device(
    model: LanguageModel,
    hidden_BD: Tensor,
    keys_B: Tensor,
    positions_B: Tensor,
    temperature: float,
    shaping: Shaping = UNSHAPED,
    seen_BV: Tensor | None = None,
) -> Drawn:
    """The next token after each hidden state, without waiting.

    temperature: 0 takes the most likely token.
    seen_BV:     which tokens each row holds, where repetition is penalised.
    """
    from hybridflow.rollout.native import kernels

    head, greedy = model.head, temperature == 0
    raw_BV = compute_raw_logits(hidden_BD, head)
    heat = 1.0 if greedy else temperature
    if shaping == UNSHAPED:
        tokens_B, logprobs_B = kernels.sample(
            raw_BV, keys_B, positions_B, temperature=heat, greedy=greedy, logit_scale=head.logit_scale,
            softcap=head.softcap,
        )  # fmt: skip
        return Drawn(tokens_B, logprobs_B, None)
    uniforms_B = None if greedy else compute_uniforms(keys_B, positions_B.long())
    logits_BV = scale_logits(raw_BV, head.logit_scale, head.softcap, heat)
    if seen_BV is not None:
        logits_BV = penalize_repetition(logits_BV, seen_BV, shaping.repetition_penalty)
    return sample_tokens(logits_BV, uniforms_B, shaping)


def _round_to_power(count: int, least: int) -> int:
    """The power of two at or above it, and `least` at least."""
    return max(least, 1 << (count - 1).bit_length())
