"""Times ops of this checkout: python tools/time_ops.py norm:rms_norm sampling --out figures.json"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "packages" / "runtime" / "src"))

from kestrel_runtime.bench.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main([*sys.argv[1:], "--checkout", str(ROOT)]))
