"""What vLLM's workers get from us (`worker_extension_cls`): weights in pieces, wherever the worker runs.

vLLM imports this module in the worker before it loads the model, which is when `_keep_tied_heads_fresh` has to run. A vLLM server takes it
as `--worker-extension-cls hybridflow.rollout.vllm_worker.WeightReceiver`, where hybridflow is installed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import vllm
from safetensors.torch import load_file
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from hybridflow.rollout.buckets import Entry, import_buffer, unpack

_FIRST_VERSION = (0, 20)
"""Older ones lack `model_loader.reload` as it is used here."""


class WeightReceiver:
    """Further methods of vLLM's worker, called by `collective_rpc`.

    A new set of weights is `begin_weights`, then `take_weights` or `take_buffer` for each bucket, then `end_weights`. vLLM writes them into
    the storage that it has, so captured graphs stay valid; between begin and end it must not generate.
    """

    model_runner: Any
    vllm_config: Any
    model_config: Any

    def begin_weights(self) -> None:
        """Gives the layers the form that a checkpoint is loaded into."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def take_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Takes up tensors that lie in this process."""
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            # A layer whose other parts are still to come keeps what it is given, and the trainer may write to it.
            self.model_runner.get_model().load_weights([(name, weight.clone()) for name, weight in bucket])

    def take_buffer(self, entries: Sequence[Sequence[Any]], exported: Sequence[Any], size: int) -> None:
        """Takes up tensors from another process's CUDA buffer, which may be used again when this returns."""
        named = [Entry(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in entries]
        self.take_weights(unpack(named, import_buffer(exported, size)))
        torch.cuda.synchronize()

    def take_files(self, directory: str) -> None:
        """A whole new set from files that `write_weight_files` wrote: all three steps at once."""
        self.begin_weights()
        for path in sorted(Path(directory).glob("*.safetensors")):
            self.take_weights(list(load_file(path).items()))
        self.end_weights()

    def end_weights(self) -> None:
        """Gives the layers the form that they compute in."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)

    def clear_kv_cache(self) -> None:
        """Zeroes the cache: what is not finite in blocks that nobody reads reaches a sum as zero times NaN."""
        for cache in self.model_runner.kv_caches:
            cache.zero_()


def _keep_tied_heads_fresh() -> None:
    """On a CPU, makes vLLM multiply by the weights themselves.

    It would by a copy in oneDNN's own form, which a reload makes anew for the embedding and not for the head that is tied to it. So the
    head would stay on the first weights, without a word.
    """
    if current_platform.is_cpu():
        import vllm._custom_ops as operators

        operators._supports_onednn = False


def _check_version() -> None:
    numbers = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if numbers < _FIRST_VERSION:
        raise ImportError(f"vLLM {vllm.__version__} is older than 0.20; pip install 'vllm>=0.20'")


_check_version()
_keep_tied_heads_fresh()
