"""Rows and the environment of reports in the tests of the bench."""

from __future__ import annotations

from kestrel_runtime.bench import Row

H200 = "NVIDIA H200"
ENVIRONMENT = {
    "gpu": H200,
    "driver": "580.1",
    "clocks": {"sm": "1980 MHz", "memory": "3201 MHz", "sm_max": "1980 MHz"},
    "versions": {"torch": "2.11.0"},
    "git": "abc",
    "empty_us": 0.55,
    "empty_host_us": 3.0,
}


def row(op="rms_norm", shape="2x4", candidate="kestrel", us=2.0, spread=0.1, **others) -> Row:
    return Row("norm", op, shape, candidate, us=us, p20=us - spread / 2, p80=us + spread / 2, **others)


def stop(*_, **__):
    raise KeyboardInterrupt
