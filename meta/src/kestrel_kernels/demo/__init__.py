"""The demo: a small decoder in the shape of Moondream 3's text model, written in ops of this library.

`config` sizes, `weights` tensors, `cache` the paged KV cache, `model` the decoder, `generate` the loop, `cli` the command.
"""
