"""The demo: a small decoder in the shape of Moondream 3's text model, written in ops of this library.

`config` holds the sizes, `weights` the tensors, `stores` the formats of a KV cache, `cache` its pages, `model` the
decoder, `generate` the loop over tokens, `memory` the check of free memory, `request` the checked options, `run` one
request, `cli` the command. tools/train_tiny.py trained `tiny.pt`; `tiny.json` records that run.
"""
