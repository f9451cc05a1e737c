"""Checkpoints: safetensors shards beside a JSON manifest, whole or not there, readable into any layout."""

from hybridflow.checkpoint.export import HUGGING_FACE, export_checkpoint
from hybridflow.checkpoint.manifest import CheckpointError, Manifest, ShardEntry, TensorShard, intersect, to_slices
from hybridflow.checkpoint.reader import Checkpoint, load_shards, newest_checkpoint, open_checkpoint
from hybridflow.checkpoint.writer import CheckpointWriter, prune, write_shard

__all__ = [
    "HUGGING_FACE",
    "Checkpoint",
    "CheckpointError",
    "CheckpointWriter",
    "Manifest",
    "ShardEntry",
    "TensorShard",
    "export_checkpoint",
    "intersect",
    "load_shards",
    "newest_checkpoint",
    "open_checkpoint",
    "prune",
    "to_slices",
    "write_shard",
]
