"""An audit: images and a model in; a run on disk, a queue and evidence out."""

SHARD_SIZE = 32
"""Images per shard by default; stated here because `--help` shows it and must not import pyarrow or torch."""
