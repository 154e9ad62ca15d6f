"""Key slots at work: a loop that wakes each and one that reads its quota."""
