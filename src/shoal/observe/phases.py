"""What a worker's seconds are booked to. Every second of a worker that trains belongs to exactly one phase."""

COMPUTING = ("h2d", "forward", "backward", "forward_backward", "optimizer")
"""Of a step: copying to the device as far as it is waited for, the passes (in a pipeline both as one, because there
they take turns), and the update."""
STEPPING = ("data", *COMPUTING, "comm")
"""The phases of a step: `data` is waiting for a batch, `comm` waiting for other workers that nothing hides."""
PHASES = ("start", *STEPPING, "compile", "checkpoint", "evaluate", "report", "end")
"""All of them: getting ready, steps, torch.compile at work wherever it is needed, saving as far as steps wait for it,
validation, reporting, and what follows the last step."""
