"""The OpenAI-compatible server: one thread with the engine, an asyncio side with the endpoints, files and
batches.

`jaxlamina serve` runs it. Knows `jaxlamina.LLM` and HTTP; nothing of how a step is computed or where.
"""
