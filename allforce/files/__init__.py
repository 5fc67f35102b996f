"""Files of a run and of a model: checkpoints, model files, what is in them."""
