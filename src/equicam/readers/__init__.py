"""What sees a model. Everything after a reading is a pure function of tensors."""
