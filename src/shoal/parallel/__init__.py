"""How one step runs on many devices: one file per strategy, each building a `TrainUnit`."""
