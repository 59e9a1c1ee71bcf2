"""How an op reports that no kernel covers a call."""


class UnsupportedError(RuntimeError):
    """A valid call that no kernel covers (dtype, head size, architecture, ...).

    A launch raises it before it has written anything; the op then runs its reference, unless the backend is
    ``"kernel"``. Invalid input is never an UnsupportedError: it is a ValueError or a TypeError.
    """


class KestrelFallbackWarning(UserWarning):
    """An op ran its PyTorch reference on a GPU. Issued once per op and reason."""
