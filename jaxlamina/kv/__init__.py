"""KV slots: who owns which. Knows no array and no device; the arrays live with the attention worker."""

from jaxlamina.kv.allocator import OutOfSlots, SlotAllocator

__all__ = ["OutOfSlots", "SlotAllocator"]
