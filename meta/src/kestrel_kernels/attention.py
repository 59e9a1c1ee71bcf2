"""`kestrel_attention` under the common namespace."""

from kestrel_attention import *  # noqa: F403
