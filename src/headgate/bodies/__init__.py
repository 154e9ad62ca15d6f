"""The JSON that a service and its clients exchange, as one struct for each body."""
