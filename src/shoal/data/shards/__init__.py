"""Data in many files, here or in an object store: the index, readers by format, the cache, and writing them."""
