"""`headgate top`: the live screen."""
