"""One run in one process: the worker that builds things and the loop that trains."""
