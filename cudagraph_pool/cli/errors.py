"""How a command ends that cannot do what it was asked for: by an exit code and one line."""

FAILED = 1
BAD_INPUT = 2


class CommandError(Exception):
    """Ends a command with this message and exit code."""

    def __init__(self, message: str, code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.code = code
