"""What a run would do, without doing it."""
