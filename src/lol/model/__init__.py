"""The model, for one device: it knows nothing of training, ranks or files."""
