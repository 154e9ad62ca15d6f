"""Provider key slots at work: one loop that wakes each key and one that reads its quota."""
