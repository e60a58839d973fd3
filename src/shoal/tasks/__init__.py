"""What is learned: model, datasets, loss and metrics behind one small protocol."""
