import sys
from pathlib import Path

from kestrel_runtime.testing import kernels_only, pytest_collection_modifyitems, pytest_configure  # noqa: F401

sys.path.append(str(Path(__file__).parent))  # expert_cases and good_calls, which tests import by name
