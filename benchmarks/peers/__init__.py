"""The same no-op work in other task queues, each with one worker process and its fast settings.

These modules run under an interpreter of their own, which `make bench` makes: nothing else in the
project may import what they need.
"""
