"""Readers turn a network's output into data. Everything after a reading is a pure function of tensors."""
