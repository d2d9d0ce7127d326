"""The review page: a local server over a run and its log."""
