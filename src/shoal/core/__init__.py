"""What every package stands on: errors, sections, seeds, storage, processes. Imports nothing else of Shoal."""
