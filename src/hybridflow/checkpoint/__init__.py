"""Checkpoints: safetensors shards beside a JSON manifest, whole or not there, readable into any layout."""

from hybridflow.checkpoint.export import HUGGING_FACE, export_checkpoint
from hybridflow.checkpoint.manifest import CheckpointError, Manifest, ShardEntry, TensorShard, intersect
from hybridflow.checkpoint.reader import Box, Checkpoint, load_shards, newest_checkpoint, open_checkpoint
from hybridflow.checkpoint.writer import CheckpointWriter, prune, write_shard

__all__ = [
    "HUGGING_FACE",
    "Box",
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
    "write_shard",
]
