"""What Python runs when it starts where ``python -m precision_scope run`` has put this folder on its path.

The program's own Python may be any, and so may its modules, which must not be
shadowed: nothing is imported here but what waits for torch.
"""

import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 -- see above
_package = os.path.dirname(_folder)  # noqa: PTH120

if sys.version_info >= (3, 10):  # noqa: UP036 -- see above
    sys.path.insert(0, os.path.dirname(_package))  # noqa: PTH120 -- the program's own path may not have it
    try:
        from precision_scope._imports import when_imported

        when_imported("torch", lambda _torch: __import__("precision_scope._run_level")._run_level.begin())
    except Exception as error:  # the program would run at another level than asked for
        sys.stderr.write("precision_scope: what is asked for cannot be set: " + repr(error) + "\n")
        sys.stderr.flush()
        os._exit(2)  # site turns SystemExit into a fatal error of Python's
    finally:
        del sys.path[0]

# Leave the path as it would be, and import the sitecustomize that would have been.
sys.path[:] = [entry for entry in sys.path if entry != _folder]
_this = sys.modules.pop("sitecustomize")
try:
    __import__("sitecustomize")
except ImportError as error:
    if getattr(error, "name", "sitecustomize") != "sitecustomize":  # Python 2 does not say
        raise
finally:
    sys.modules.setdefault("sitecustomize", _this)
