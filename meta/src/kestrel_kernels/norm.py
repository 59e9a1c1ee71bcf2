"""`kestrel_norm` under the common namespace."""

from kestrel_norm import *  # noqa: F403
