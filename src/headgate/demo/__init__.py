"""A demonstration of a service: simulated agents, a fake provider, and settings for both."""
