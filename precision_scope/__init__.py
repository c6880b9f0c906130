"""Scoped float32 matmul precision for PyTorch."""

TYPE_CHECKING = False  # as in typing, which Python does not import when it starts
if TYPE_CHECKING:
    from precision_scope._api import (
        FLOAT32_MATMUL_PRECISION,
        Float32MatmulPrecision,
        PrecisionConflictWarning,
        PrecisionScopeError,
        disable_emulation,
        enable_emulation,
        enable_isolation,
        get_float32_matmul_precision,
        matmul_precision,
        report,
        set_float32_matmul_precision,
    )

__version__ = "0.1.0"

__all__ = [
    "FLOAT32_MATMUL_PRECISION",
    "Float32MatmulPrecision",
    "PrecisionConflictWarning",
    "PrecisionScopeError",
    "disable_emulation",
    "enable_emulation",
    "enable_isolation",
    "get_float32_matmul_precision",
    "matmul_precision",
    "report",
    "set_float32_matmul_precision",
]

if not TYPE_CHECKING:  # or every name would be taken to exist

    def __getattr__(name: str) -> object:
        """Import torch where a name is used, and not before: the pytest plug-in leaves that to the tests."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # torch first: who waits for torch to be there may want this package whole.
        import torch  # noqa: F401, PLC0415

        from precision_scope import _api  # noqa: PLC0415

        globals().update({public: getattr(_api, public) for public in __all__})
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
