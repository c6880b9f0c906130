"""The package's error and its warning."""

from __future__ import annotations


class PrecisionScopeError(RuntimeError):
    """Report that a backend failed to save, apply or restore its setting, or that ranks differ.

    Attributes:
        backends: The names of the backends that failed, in the order of
            failing; none where ranks differ.

    The first backend's own exception is the ``__cause__``. When the error is
    raised while a scope is entered, the scope is not live and the other
    backends were put back; when at exit, the other backends were restored.
    """

    def __init__(self, message: str, backends: tuple[str, ...] = ()) -> None:
        super().__init__(message, backends)
        self.backends = backends

    def __str__(self) -> str:
        return str(self.args[0])


class PrecisionConflictWarning(UserWarning):
    """Warn that scopes live at the same time want different levels.

    PyTorch's flags are one per process, so until isolation is on the process
    runs at the strictest level that any live scope asks for.
    """
