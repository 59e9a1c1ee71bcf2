"""Adapters for inference engines. An engine is imported when its module is, and changed only by an explicit call."""

from __future__ import annotations
