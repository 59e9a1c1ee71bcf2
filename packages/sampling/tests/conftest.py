from kestrel_runtime.testing import pytest_collection_modifyitems, pytest_configure  # noqa: F401
