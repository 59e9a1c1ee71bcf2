"""`kestrel_kvcache` under the common namespace."""

from kestrel_kvcache import *  # noqa: F403
