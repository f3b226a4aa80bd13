"""Small causal language models as their authors would publish them: plain Flax (NNX, Linen) and plain JAX.

None of them knows of what splits them. Each file has ``VOCAB_SIZE``, ``MAX_LEN`` and ``build(seed)``, which
returns ``(fn, params)`` with ``fn(params, tokens [B, T], positions [B, T]) -> logits [B, T, V]``, in
float32. ``refused`` holds models that are wrong for splitting on purpose, ``published`` models of published
packages.
"""
