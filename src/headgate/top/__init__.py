"""`headgate top`: the figures of a service, live in a terminal."""
