"""The named barriers of a CTA; 0 is that of all its threads."""

CONSUMERS = 1  # the consumer warps meet
OPENED = 2  # the opening lies in shared memory, and the mbarriers are made (opening.py)
PREPARED = 3  # the first warp to the producer of K and V: the mbarriers are made (mainloop_sm90.py)
