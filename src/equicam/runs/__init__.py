"""An audit: images and a model in; a run on disk, a queue and a report out."""

SHARD_SIZE = 32
"""Images per shard by default; stated here because `--help` shows it and must not import pyarrow or torch."""
CAUSAL_IMAGES = 100
"""Images that the signal-or-noise test needs at least, unless the run has fewer; here for the same reason."""
