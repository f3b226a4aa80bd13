"""KV slots: who owns which, whose prefix is kept, which live on the host. Knows no KV array and no device;
the arrays live with the attention worker."""

from jaxlamina.kv.allocator import OutOfSlots, SlotAllocator
from jaxlamina.kv.prefix import PrefixCache
from jaxlamina.kv.slot_list import SlotList, append_each, extend_each
from jaxlamina.kv.tiers import HostTier, Move

__all__ = [
    "HostTier",
    "Move",
    "OutOfSlots",
    "PrefixCache",
    "SlotAllocator",
    "SlotList",
    "append_each",
    "extend_each",
]
