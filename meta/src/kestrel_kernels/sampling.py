"""`kestrel_sampling` under the common namespace."""

from kestrel_sampling import *  # noqa: F403
