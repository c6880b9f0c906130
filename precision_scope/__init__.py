"""Scoped float32 matmul precision for PyTorch."""

TYPE_CHECKING = False  # as in typing, which Python does not import when it starts
if TYPE_CHECKING:
    from precision_scope._emulation import disable_emulation, enable_emulation
    from precision_scope._errors import PrecisionConflictWarning, PrecisionScopeError
    from precision_scope._isolation import enable_isolation
    from precision_scope._levels import FLOAT32_MATMUL_PRECISION, Float32MatmulPrecision
    from precision_scope._process import get_float32_matmul_precision, set_float32_matmul_precision
    from precision_scope._report import report
    from precision_scope._scopes import matmul_precision

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

_MODULES = {
    "FLOAT32_MATMUL_PRECISION": "_levels",
    "Float32MatmulPrecision": "_levels",
    "PrecisionConflictWarning": "_errors",
    "PrecisionScopeError": "_errors",
    "disable_emulation": "_emulation",
    "enable_emulation": "_emulation",
    "enable_isolation": "_isolation",
    "get_float32_matmul_precision": "_process",
    "matmul_precision": "_scopes",
    "report": "_report",
    "set_float32_matmul_precision": "_process",
}

if not TYPE_CHECKING:  # or every name would be taken to exist

    def __getattr__(name: str) -> object:
        """Import torch where a name is used, and not before: the pytest plug-in leaves that to the tests."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # torch first: who waits for torch to be there may want this package whole.
        import torch  # noqa: F401, PLC0415

        for module in ("_setup", _MODULES[name]):
            found = __import__(f"{__name__}.{module}", fromlist=[name])
        globals()[name] = getattr(found, name)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
