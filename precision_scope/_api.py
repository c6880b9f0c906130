"""The public names, and what has to be in place before one of them is used."""

from precision_scope._compilation import watch_compilations
from precision_scope._dynamo import hide_package
from precision_scope._emulation import disable_emulation, enable_emulation
from precision_scope._errors import PrecisionConflictWarning, PrecisionScopeError
from precision_scope._isolation import enable_if_environment_says_so, enable_isolation
from precision_scope._levels import Float32MatmulPrecision
from precision_scope._process import get_float32_matmul_precision, set_float32_matmul_precision
from precision_scope._report import report
from precision_scope._scopes import matmul_precision
from precision_scope.backends._registry import watch_for_backends

FLOAT32_MATMUL_PRECISION = Float32MatmulPrecision
"""The RFC's name for :class:`Float32MatmulPrecision`."""

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

hide_package()
watch_compilations()
watch_for_backends()
enable_if_environment_says_so()
