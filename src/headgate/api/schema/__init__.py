"""The JSON bodies that a service and its clients exchange."""
