"""Where batches come from: sources in the public formats, the order of samples, and the loader."""
