"""What happens between a request and a step: admission, the scheduler and its room for KV, the engine, and
what comes after a step."""
