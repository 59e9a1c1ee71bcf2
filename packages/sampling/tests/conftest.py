from kestrel_runtime.testing import kernels_only, pytest_collection_modifyitems, pytest_configure  # noqa: F401
