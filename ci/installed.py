"""`installed.py kestrel_norm ...`: every module comes from this environment, not from the source tree."""

from __future__ import annotations

import importlib.util
import sys

for name in sys.argv[1:]:
    spec = importlib.util.find_spec(name)
    if spec is None or not str(spec.origin).startswith(sys.prefix):
        raise SystemExit(f"{name}: expected an installed package in {sys.prefix}, got {spec and spec.origin}")
