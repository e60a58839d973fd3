"""Who runs the worker: in this process, and later torchrun and Ray."""
