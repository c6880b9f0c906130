"""What a backend must be able to do."""

from __future__ import annotations

import abc

from precision_scope._levels import Float32MatmulPrecision


class Backend(abc.ABC):
    """A holder of one process-wide float32 matmul precision setting.

    Subclass it, set ``name``, and hand an instance to
    :func:`register_backend`. Calls come from whichever thread enters or
    leaves a scope, one at a time, and only ever with validated levels. They
    must not enter scopes, unregister backends, or wait for threads that do. An
    exception from any of them is reported with the backend's name.

    Attributes:
        name: The backend's name in messages and reports; unique.
        module: The module that the backend is for, if it is not always there:
            one with code of its own, no namespace package. The backend is left
            alone before somebody else has imported that, by an import statement
            or its like; it then gets the level in force at once.
    """

    name: str
    module: str | None = None

    def is_active(self) -> bool:
        """Return whether the backend is in use, cheaply and importing nothing.

        Once ``module`` has been imported, it is asked at every entry of a scope
        until it first answers True, as it does by default.
        """
        return True

    @abc.abstractmethod
    def save(self) -> object:
        """Return the whole present setting, for :meth:`restore`."""

    @abc.abstractmethod
    def apply(self, level: Float32MatmulPrecision, /) -> None:
        """Make ``level`` the setting of the whole process.

        It must do no harm to apply the level that is already in force.
        """

    @abc.abstractmethod
    def restore(self, saved: object, /) -> None:
        """Bring back the setting that :meth:`save` returned; may be repeated."""

    @abc.abstractmethod
    def describe(self) -> dict[str, str]:
        """Return the setting cell by cell, for reports."""

    def current_level(self) -> Float32MatmulPrecision | None:
        """Return the level that the setting amounts to, for reports; None if that is not known."""
        return None
