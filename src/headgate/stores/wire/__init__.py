"""Steps and their answers on their way to a process that writes."""
