"""The decisions and their arithmetic: pure functions of a snapshot and `now`."""
