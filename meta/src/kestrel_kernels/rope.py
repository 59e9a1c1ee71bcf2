"""`kestrel_rope` under the common namespace."""

from kestrel_rope import *  # noqa: F403
