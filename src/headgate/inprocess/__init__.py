"""The load scheduler for one event loop: bounded concurrency, load-based order and budgets.

For programs that want no server. The arithmetic is that of `headgate.core`, and the money goes
through the same trackers as everywhere else; what is here is only what an event loop adds: waiting,
cancelling, and giving a permit back however its holder ends.
"""
