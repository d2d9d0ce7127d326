"""An audit: images and a model in; a run on disk, a queue and evidence out."""
