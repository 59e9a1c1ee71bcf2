"""`kestrel_quant` under the common namespace."""

from kestrel_quant import *  # noqa: F403
