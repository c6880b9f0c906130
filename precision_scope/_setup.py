"""What has to be in place before one of the public names is used."""

import os

# To be there, with all that they need.
from precision_scope import _process, _scopes  # noqa: F401  # pyright: ignore[reportUnusedImport]
from precision_scope._compilation import watch_compilations
from precision_scope._dynamo import hide_package
from precision_scope.backends._registry import watch_for_backends

hide_package()
watch_compilations()
watch_for_backends()

isolation = os.environ.get("PRECISION_SCOPE_ISOLATION", "")
if isolation == "1":
    from precision_scope._isolation import enable_isolation

    enable_isolation()
elif isolation not in ("", "0"):
    raise ValueError(f"the environment variable PRECISION_SCOPE_ISOLATION must be 1 or 0, got {isolation!r}")
