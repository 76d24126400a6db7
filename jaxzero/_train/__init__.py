"""zero3: a training step made of the public functions."""
