"""The two ways a run ends badly, and how each names the field and the remedy."""


class UserError(ValueError):
    """The input is wrong: a recipe field, an argument, a data file. The message names it and says what to do.

    The command ends with status 2 when this comes up before training starts, with 1 when it comes up in the middle.
    """


class NoDataError(UserError):
    """The data that a recipe names are not there, or cannot be reached from here."""


class RunError(RuntimeError):
    """The run itself failed although the input could be read: diverged, out of memory. Status 1."""

    cause = ""
    """What a launcher knows of it: the type of the error in the worker, or how the worker ended."""


class DivergedError(RunError):
    """The loss is no number any more."""


class NoMemoryError(RunError):
    """A device, or the machine, has too little memory."""


class NoRoomError(RunError):
    """There was no place for the workers for longer than is borne."""


class WorkerError(RunError):
    """An exception that the code of a run raised in one of its workers."""

    def __init__(self, rank: int, node: str, kind: str, message: str, trace: str) -> None:
        super().__init__(f"worker {rank} on {node}: {kind}: {message}")
        self.trace = trace
        """The traceback, as the worker printed it."""
