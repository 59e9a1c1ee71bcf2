"""The demo: a small decoder in the shape of Moondream 3's text model, written in ops of this library.

`config` has the sizes, `weights` the tensors, `stores` the formats of a KV cache, `cache` its pages, `model` the
decoder, `generate` the loop, `memory` what fits, `run` one request, `cli` the command. `tiny.pt` is what
tools/train_tiny.py trained, `tiny.json` the record of that run.
"""
