"""Control messages between rank 0 and the attention ranks, over TCP and one step ahead of the tensors.

Import from the modules: `messages` (what is said), `frames` (where a message begins and ends), `connection`
(one peer), `channel` (the group), `watchdog` (deadlines of what runs on a device).
"""
