"""`kestrel_moe` under the common namespace."""

from kestrel_moe import *  # noqa: F403
