"""A job of several processes: the cluster file, who does what, membership, deadlines and the control
channel."""
