"""A run as it goes, from the files of its folder, drawn in a terminal: `shoal monitor`. Reads, and writes nothing."""
